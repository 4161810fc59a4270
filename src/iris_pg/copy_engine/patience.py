"""How a wait on the host waits: spin, yield, sleep; look for lost peers; give up at the deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from iris_pg.errors import DeadlineError
from iris_pg.platforms.atomics import atomics
from iris_pg.platforms.cpu import usable_cores


class Patience:
    """How polls of a queue wait.

    Args:
        timeout_s: deadline of one poll in seconds.
        ranks: processes that share this machine's cores; with more of them than cores, spinning only delays the others.
        check: called now and then with (address, expected, seen) while a poll waits; raises when waiting is in vain.
        describe: returns what the flag at an address is, in words, for messages.

    Attributes:
        yield_s: seconds that a wait yields its core to whoever wants it before it begins to sleep.
    """

    CHECK_S = 2e-3  # seconds between two looks at peers and the deadline
    _SPIN_S, _SLEEP_S = 5e-6, 500e-6  # longer spins keep a peer on the same core from running
    _TURNS = 400  # polls a spin, about 1 us

    def __init__(
        self,
        timeout_s: float,
        ranks: int = 1,
        check: Callable[[int, int, int], None] | None = None,
        describe: Callable[[int], str] | None = None,
    ) -> None:
        self.timeout_s, self.yield_s = timeout_s, 2e-3
        self.check = check
        self.describe = describe or (lambda address: f"flag at {address:#x}")
        self._spin_s = self._SPIN_S if ranks <= usable_cores() else 0.0
        self.turns = 5 * self._TURNS if self._spin_s else 1  # looks at a word before Python takes a wait over
        self._load, self._spin = atomics().load32, atomics().spin32

    def wait(self, address: int, mask: int, low: int, span: int, expected: int) -> None:
        """Return when ``((word & mask) - low) mod 2^32 <= span``.

        Raises:
            DeadlineError: not within ``timeout_s``. And whatever ``check`` raises.
        """
        start = time.monotonic()
        next_check = start + self.CHECK_S
        while not self._spin(address, mask, low, span, self._TURNS):
            now = time.monotonic()
            waited = now - start
            if now >= next_check:
                self.look(address, expected, waited)
                next_check = now + self.CHECK_S
            if waited < self._spin_s:
                continue
            if waited < self.yield_s:
                os.sched_yield()
            else:
                time.sleep(min(waited / 20, self._SLEEP_S))

    def look(self, address: int, expected: int, waited_s: float) -> None:
        """Raise when a wait that has lasted ``waited_s`` seconds is in vain or too long."""
        self.give_up(address, expected, self._load(address), waited_s)

    def give_up(self, address: int, expected: int, seen: int, waited_s: float) -> None:
        """The same for a word that was read otherwise."""
        if self.check:
            self.check(address, expected, seen)
        if waited_s > self.timeout_s:
            raise DeadlineError(
                f"{self.describe(address)} is late: it holds {seen:#x} and not {expected:#x} after {waited_s:.1f} s"
            )
