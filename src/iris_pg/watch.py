"""What the ranks of a group tell each other about its operations, through their control pages, and what follows when a
wait takes long: a rank that is late, dead, or in another operation is named.

Operations are numbered on every rank, and a rank notes a digest of all that it was asked for. When a wait takes long it
says what it waits in, and looks at what the others say. A group that has failed stays failed, and its peers are told.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from iris_pg.errors import ClosedError, DeadlineError, IrisError, MismatchError, PeerLostError, where
from iris_pg.flags import DESCRIPTION_BYTES, HISTORY
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.platforms.atomics import atomics
from iris_pg.sizes import Sizes

_TAGS = 4096  # most tags that are kept
_LOOK_FROM = 16  # operations in flight, from which it is looked which are done
_LONGEST = DESCRIPTION_BYTES - 16  # most characters of a text that peers read
_LOST, _OTHER, _LATE, _FAULT = 1, 2, 3, 4  # why a rank gave up, in its peers' failure words
_KINDS = {_LOST: PeerLostError, _OTHER: MismatchError, _LATE: DeadlineError}

Key = tuple[Any, ...]


class Watch:
    """One rank's view of the operations of a group.

    Args:
        heap: its control pages are read and written; they lie in memory of the host.
        done: returns the index before which the engine has executed everything.
        tells_sizes: whether the engine's own flags do not tell a rank that a peer's message has another size.

    Attributes:
        sequence: number of operations begun.
        failure: what the group failed with.
        culprit: the rank that is gone, if that is why it failed.
        sizes: what ranks tell each other about the sizes of their messages, if they do.
    """

    def __init__(self, heap: SymmetricHeap, done: Callable[[], int], tells_sizes: bool = False) -> None:
        self.heap, self.links, self.rank, self.world = heap, heap.links, heap.rank, heap.world
        self.page, self._done = heap.control, done
        self.sequence = 0
        self.failure: BaseException | None = None
        self.culprit: int | None = None
        self._digest = 0  # of all operations so far
        self._tags: dict[Key, int] = {}
        self.sizes = Sizes(heap) if tells_sizes else None
        self._in_flight: deque[tuple[int, int, Key, int]] = deque()  # (end index, sequence number, key, digest)
        ops = atomics()
        self._load32, self._load64, self._store64 = ops.load32, ops.load64, ops.store64
        self._sequence_at = heap.base + self.page.sequence
        self._history_at = heap.base + self.page.history
        self._failures = [heap.base + self.page.failure(peer) for peer in range(self.world) if peer != self.rank]

    # Operations of this rank ------------------------------------------------------------------------------------------

    def begin(self, key: Key, end: int | None = None, tag: int | None = None) -> int:
        """Number an operation and tell the peers that this rank begins it, and what it was asked for so far; return
        the number. Calls come in the order of operations, one at a time.

        Args:
            end: index of the engine at which it will be done, where that is known (else :meth:`submitted` tells).
            tag: of the key, where it is known (:func:`tag_of`).

        Raises:
            ClosedError: the group has failed.
        """
        if self.failure:
            self.check_open()
        self.sequence = sequence = self.sequence + 1
        if tag is None and (tag := self._tags.get(key)) is None:
            if len(self._tags) >= _TAGS:
                self._tags.clear()
            tag = self._tags[key] = tag_of(key)
        self._digest = digest = (self._digest * 0x9E3779B1 + tag) & 0xFFFFFFFF  # so that the order counts
        self._store64(self._history_at + 8 * (sequence % HISTORY), (sequence & 0xFFFFFFFF) << 32 | digest)
        self._store64(self._sequence_at, sequence)
        in_flight = self._in_flight
        if end is None or (len(in_flight) > _LOOK_FROM and sequence % _LOOK_FROM == 0):
            done = self._done()
            while in_flight and in_flight[0][0] <= done:
                in_flight.popleft()
        if end is not None:
            in_flight.append((end, sequence, key, digest))
        return sequence

    def submitting(self, key: Key) -> None:
        """Note that the operation begun last is being submitted to the engine."""
        self._in_flight.append((1 << 63, self.sequence, key, self._digest))

    def submitted(self, index: int) -> None:
        """Note at which index of the engine it is done."""
        self._in_flight[-1] = (index, *self._in_flight[-1][1:])

    def current(self) -> tuple[int, Key]:
        """Return the first operation that is not done, or what is said when there is none."""
        done = self._done()
        for end, sequence, key, _ in list(self._in_flight):
            if end > done:
                return sequence, key
        return self.sequence, ("nothing",)

    def ended(self, sequence: int, key: Key) -> None:
        """Raise when an operation has ended here, but was another one on a peer. For an engine whose flags do not say
        what has come.

        A peer that has not begun it is not looked at; it finds the difference itself, at its own end.
        """
        self.say(sequence, key)
        self.compare(sequence, key)

    # When a wait takes long -------------------------------------------------------------------------------------------

    def describe(self, address: int) -> str:
        """Return that the current operation is late, which waits for the flag at ``address``, in words."""
        flag = self.page.name(address - self.heap.base)
        return self.late(flag[1] if flag else None) + f"; {flag[0] if flag else f'flag at {address:#x}'}"

    def late(self, writer: int | None) -> str:
        """Return that the current operation is late, and who keeps it waiting, in words."""
        sequence, key = self.current()
        return f"{text_of(key)}: Timed out waiting{self.absent(writer)} {self.where(sequence, key)}"

    def absent(self, writer: int | None = None) -> str:
        """Return which ranks have not begun the current operation, or else that ``writer`` is waited for, in words."""
        sequence, _ = self.current()
        late = [p for p in range(self.world) if p != self.rank and self.begun(p) < sequence]
        slow = f"; waiting for rank {writer}" if writer is not None and not late else ""
        return "".join(f"; rank {p} has not begun it (its last is seq {self.begun(p)})" for p in late) + slow

    def begun(self, peer: int) -> int:
        """Return the number of operations that ``peer`` has begun."""
        return self._load64(self.heap.bases[peer] + self.page.sequence)

    def _noted(self, peer: int, sequence: int) -> int | None:
        """Return a digest of what ``peer`` was asked for up to operation ``sequence``, if it still tells."""
        word = self._load64(self.heap.bases[peer] + self.page.history + 8 * (sequence % HISTORY))
        return word & 0xFFFFFFFF if word >> 32 == sequence & 0xFFFFFFFF else None

    def _noted_here(self, sequence: int) -> int | None:
        """Return the same of this rank, of any operation in flight: there may be more than HISTORY."""
        for _, number, _, digest in list(self._in_flight):
            if number == sequence:
                return digest
        return self._noted(self.rank, sequence)

    def _last_in_common(self, peer: int, sequence: int) -> int:
        """Return the last operation up to ``sequence`` that ``peer`` has begun too; or, when it is so far ahead that
        it no longer tells of it, the last that both have begun.
        """
        begun = self.begun(peer)
        return min(self.sequence if begun >= sequence + HISTORY else sequence, begun)

    def compare(self, sequence: int, key: Key) -> None:
        """Raise when a peer's operations up to ``sequence`` were not those of this rank."""
        for peer in range(self.world):
            last = self._last_in_common(peer, sequence)
            mine, theirs = self._noted_here(last), self._noted(peer, last)
            if last and None not in (mine, theirs) and mine != theirs:
                said = self._said(peer)
                other = said[1] if said and said[0] == sequence else "another"
                if said and said[1] == text_of(key):
                    other = "the same, but in different ones before"
                raise MismatchError(
                    f"ranks are in different operations: rank {self.rank} in {text_of(key)}, rank {peer} in {other}; "
                    "every rank calls the same operations with the same sizes and dtypes in the same order "
                    f"{self.where(sequence, key)}"
                )
            if self.sizes and (difference := self.sizes.difference(peer, last)):
                raise MismatchError(
                    f"ranks are in different operations: they disagree on the size of a message: {difference}; its "
                    f"receiver expects as many bytes as its sender sends, in {text_of(key)} "
                    f"{self.where(sequence, key)}"
                )

    def check(self, address: int, expected: int, seen: int) -> None:
        """Raise when the flag at ``address`` will never hold what is waited for."""
        flag = self.page.name(address - self.heap.base)
        writer = flag[1] if flag else self.rank
        self.check_peer(writer, lambda: self._load32(address) == expected)
        if seen not in (0, expected):
            sequence, key = self.current()
            raise MismatchError(
                f"ranks are in different operations: rank {self.rank} is in {text_of(key)} and rank {writer} in "
                f"another, or with other sizes or dtypes {self.where(sequence, key)}"
            )

    def check_peer(self, writer: int, arrived: Callable[[], bool] = lambda: False) -> None:
        """Raise when waiting for ``writer`` is in vain. ``arrived``: whether it had done its part before it went."""
        if self.failure:
            raise self.failure
        sequence, key = self.current()
        self.say(sequence, key)
        self.check_failed(text_of(key), self.where(sequence, key), lambda: self.absent(writer))
        if writer in self.links.lost() and not arrived():
            self.lose(writer)
        self.compare(sequence, key)

    def lose(self, peer: int) -> NoReturn:
        """Raise PeerLostError: ``peer`` is gone, and the current operation needs it."""
        sequence, key = self.current()
        self.culprit = peer
        raise PeerLostError(
            f"{text_of(key)}: rank {peer} has died, or has left the group, before its part was done "
            f"{self.where(sequence, key)}"
        )

    def hears_failure(self) -> bool:
        """Return whether a peer says that the group has failed."""
        load = self._load64
        for word in self._failures:
            if load(word):
                return True
        return False

    def check_failed(self, what: str, where_: str, absent: Callable[[], str] = str) -> None:
        """Raise when the group has failed here, or a peer says that it has; the error begins with ``what``."""
        if self.failure:
            raise self.failure
        for peer in range(self.world):
            word = self._load64(self.heap.base + self.page.failure(peer))
            if word:
                code, rank = word >> 32, (word & 0xFFFFFFFF) - 1
                why = {
                    _LOST: f"rank {rank} is gone",
                    _OTHER: "ranks are in different operations",
                    _LATE: f"it Timed out waiting{absent()}",
                    _FAULT: "it has failed, see there",
                }
                kind = _KINDS.get(code, IrisError)
                self.culprit = rank
                raise kind(f"{what}: {why[code]}, says rank {peer} {where_}")

    def say(self, sequence: int, key: Key) -> None:
        """Tell the peers what this rank waits in."""
        text = text_of(key).encode("ascii", errors="replace")
        at = self.page.description
        view = self.heap.bytes_at(self.rank, at, DESCRIPTION_BYTES).numpy()
        if self._load64(self.heap.base + at) == sequence:
            return
        self._store64(self.heap.base + at, 0)
        self._store64(self.heap.base + at + 8, len(text))
        view[16 : 16 + len(text)] = memoryview(text)
        self._store64(self.heap.base + at, sequence)

    def _said(self, peer: int) -> tuple[int, str] | None:
        at = self.page.description
        sequence = self._load64(self.heap.bases[peer] + at)
        if peer == self.rank or not sequence:
            return None
        n = min(self._load64(self.heap.bases[peer] + at + 8), DESCRIPTION_BYTES - 16)
        text = self.heap.bytes_at(peer, at + 16, DESCRIPTION_BYTES - 16).numpy()[:n].tobytes().decode(errors="replace")
        return (sequence, text) if self._load64(self.heap.bases[peer] + at) == sequence else None

    def give_up(self, error: BaseException, culprit: int | None = None) -> None:
        """Remember the first failure and tell the peers, so that they need not wait for this rank."""
        if self.failure is None and not isinstance(error, ClosedError):
            self.failure = error
            self.culprit = self.culprit if culprit is None else culprit
            code = next((code for code, kind in _KINDS.items() if isinstance(error, kind)), _FAULT)
            word = (code << 32) | ((self.rank if self.culprit is None else self.culprit) + 1)
            if not self.links.closed:
                for peer in range(self.world):
                    if peer != self.rank:
                        self._store64(self.heap.bases[peer] + self.page.failure(self.rank), word)

    def check_open(self) -> None:
        """Raise ClosedError when the group has failed or was closed."""
        if self.failure:
            raise ClosedError(
                "the group has failed before and cannot be used; destroy it and make a new one. It failed with: "
                f"{self.failure} {where(group=self.links.group, rank=self.rank)}"
            )

    def where(self, sequence: int, key: Key) -> str:
        """Return the suffix of a message about an operation."""
        return where(group=self.links.group, rank=self.rank, op=key[0], seq=sequence)


def tag_of(key: Key) -> int:
    """Return what the mailboxes of an operation carry."""
    return zlib.crc32(repr(key).encode()) | 2  # never 0 (empty) and never 1 (a credit)


def text_of(key: Key) -> str:
    """Return the key of an operation in words."""
    parts = (" ".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in key if part is not None)
    text = " ".join(parts)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
