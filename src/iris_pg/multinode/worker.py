"""Runs the operations of a group one after another, in the order of their calls: in the caller where nothing is before
it, else on a thread.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable

from iris_pg.completion import Completion

_JOIN_S = 10.0  # a thread that waits for another host is released before it is joined

_open_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """A queue of operations, and the thread that runs them, which starts with the first that is asynchronous.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running = threading.RLock()  # held by whoever runs an operation
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], Completion]] = deque()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        _open_workers.add(self)

    def run(self, job: Callable[[], None]) -> None:
        """Run an operation in this thread, behind all that are in the queue. Raises what it raises."""
        while True:
            with self._running:
                # A callback on the thread itself may come here, so what is before it is run and not waited for.
                if not self._run_next():
                    job()
                    return

    def submit(self, job: Callable[[], None], completion: Completion) -> None:
        """Put an operation in the queue; its completion is told how it ended."""
        with self._changed:
            self._jobs.append((job, completion))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run_next(self) -> bool:
        with self._changed:
            if not self._jobs:
                return False
            job, completion = self._jobs.popleft()
        error: BaseException | None = None
        try:
            job()
        except BaseException as raised:
            error = raised
        if tell := completion.finished(error):
            tell()
        return True

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._is_closed:
                    self._changed.wait()
                if not self._jobs:
                    return
            with self._running:
                self._run_next()

    def close(self) -> None:
        """End the thread, once the queue is empty: what is in it fails in a group that is closed. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            thread, self._thread = self._thread, None
        if thread and thread is not threading.current_thread():
            thread.join(_JOIN_S)


@atexit.register
def _at_exit() -> None:
    """Stop every thread before the interpreter ends, as transports do."""
    for worker in list(_open_workers):
        worker.close()
