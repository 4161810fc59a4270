"""The thread of the software copy engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from iris_pg.copy_engine.software import Queue
from iris_pg.errors import IrisError


class EngineThread:
    """One daemon thread that executes several queues in turn, never waiting at a poll of one while another can run.

    Args:
        queues: what to execute.
        keep_looking: producers may ring a doorbell without :meth:`wake` (device kernels), so look now and then even
            when idle.
        name: of the thread.
    """

    # Pauses in seconds: idle, idle for long, and between looks at polls that have not passed.
    _IDLE_S, _IDLE_LONG_S, _NAP_S = 1e-3, 5e-3, 20e-6

    def __init__(self, queues: Sequence[Queue], keep_looking: bool, name: str) -> None:
        self.queues, self.keep_looking, self.name = list(queues), keep_looking, name
        self._wake = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None

    def add(self, queue: Queue) -> None:
        """Execute ``queue`` too."""
        self.queues.append(queue)
        self._wake.set()

    def wake(self) -> None:
        """Say that something was submitted; starts the thread the first time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """Stop the thread and wait for it. Idempotent."""
        self._stop = True
        self._wake.set()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _loop(self) -> None:
        order = list(self.queues)
        nap, idle = self._NAP_S, self._IDLE_S
        while not self._stop:
            if len(order) != len(self.queues):
                order = list(self.queues)
            ran = False
            hostile = order[0].hostile
            if hostile:
                hostile.shuffle(order)
            for queue in order:
                try:
                    ran |= not queue.idle and queue.advance()
                except IrisError:
                    pass  # the queue keeps it as its fault, and its pending operations were told
            if ran:
                nap, idle = self._NAP_S, self._IDLE_S
                continue
            if all(q.idle or q.fault for q in order):
                self._wake.clear()
                # What was said before it was cleared is seen here: that there is more to do, or that this is the end.
                if not self._stop and all(q.idle or q.fault for q in order):
                    self._wake.wait(idle if self.keep_looking else None)
                    idle = min(2 * idle, self._IDLE_LONG_S)
                nap = self._NAP_S
            elif len(order) == 1 and not self.keep_looking:
                try:
                    order[0].drive(order[0].ring.doorbell())  # nothing else can run: wait at its poll with patience
                except IrisError:
                    pass
            else:
                time.sleep(nap)
                nap = min(2 * nap, self._IDLE_S)
