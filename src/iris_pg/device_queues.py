"""AMD GPUs: operations on the queues of rocm-xio, and a trial of what streams are told.

With ``engine="sdma"`` collectives that move bytes go through the SDMA queue to each peer, which this process writes
itself (copy_engine/xio_queue.py). The stream of the operation lets the queues begin, and waits for their end, by words
in host memory, so that queues and streams follow each other both ways. Reductions are the stream's, whose kernels add;
so is what a graph captures, as what is in a queue is done once; and so are messages, which must not hold up
collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from iris_pg.copy_engine import xio
from iris_pg.copy_engine.calls import Call, fits, lower, over_queues
from iris_pg.copy_engine.xio_queue import WORDS_BYTES, Words, XioQueue
from iris_pg.device_page import DevicePage
from iris_pg.errors import DeadlineError, IrisError, UnsupportedError, where
from iris_pg.flags import LINE, MAIL_SLOTS
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.memory.sharing import Links
from iris_pg.platforms.gpu import platform as gpu
from iris_pg.program import Program, Ref, Signal

_OF_A_QUEUE = -(-WORDS_BYTES // LINE)  # words of the page, which are lines
_MAILBOXES = 2  # "go" and "done", of each queue


def words_for(world: int) -> int:
    """Return how many words of a page are used here: one of the trial, and those of a queue to each rank."""
    return 1 + world * (_MAILBOXES + _OF_A_QUEUE)


class DeviceQueues:
    """The queues of one rank.

    Args:
        library: rocm-xio.
        page: the words.
        first: number of the first of :func:`words_for` words.
        devices: the GPU of each rank, as this process numbers them, by rank.
        timeout_s: deadline of every wait.
        watch: raises when waiting is in vain.

    Raises:
        UnsupportedError: a queue is in use, or rocm-xio does not do what it says.
    """

    def __init__(
        self,
        library: xio.Library,
        page: DevicePage,
        first: int,
        devices: Sequence[int],
        timeout_s: float,
        watch: Callable[[], None],
    ) -> None:
        self._page, self._mailboxes = page, first + 1
        rank, group = page.heap.rank, page.heap.links.group
        self._queues: list[XioQueue] = []
        try:
            for peer, device in enumerate(devices):
                at = self._mailboxes + _MAILBOXES * len(devices) + _OF_A_QUEUE * peer
                words = Words(page.host_address_of_word(at), page.address_of_word(at))
                name = f"{group}/{rank}->{peer}"
                self._queues.append(XioQueue(library, devices[rank], device, words, timeout_s, name, watch))
        except BaseException:
            self.close()
            raise

    def prepare(
        self, program: Program, address: Callable[[Ref], int]
    ) -> tuple[Callable[[Any], None], list[gpu.FlagOp]]:
        """Return what puts ``program`` into the queues, and what a stream does to let them begin and to await them.

        Args:
            address: Ref -> address, as the GPU sees it.
        """

        def whole(ref: Ref) -> int:
            if ref.buffer != "queues":
                return address(ref)
            return self._page.address_of_word(self._mailboxes + ref.offset // LINE)

        spread = over_queues(program)
        calls: dict[int, list[Call]] = {}
        for queue, call in lower(spread, whole):
            calls.setdefault(queue, []).append(call)
        ops: list[gpu.FlagOp] = []
        for step in spread.steps:
            if step.lane == 0:
                at = whole(step.refs()[0])
                ops += [gpu.FlagOp(False, at, 1)] if isinstance(step, Signal) else _taken(at)

        def submit(stream: Any) -> None:
            for queue, of_queue in calls.items():
                self._queues[queue].submit(of_queue)

        return submit, ops

    def close(self) -> bool:
        """Give the queues back; return whether all have come to an end."""
        ended = [queue.close() for queue in self._queues]  # each of them, also behind one that has not
        return all(ended)


def make_queues(
    page: DevicePage, first: int, places: Sequence[str], timeout_s: float, watch: Callable[[], None]
) -> tuple[DeviceQueues | None, str]:
    """Return the queues of this rank, and what is to be said of them; None where rocm-xio has none for a rank (they are
    another group's, ranks share a GPU, or do not see each other's): then streams copy in their place. Collective;
    arguments are those of :class:`DeviceQueues`.

    Args:
        places: what identifies the GPU of each rank (``DeviceMemory.place``), by rank.

    Raises:
        UnsupportedError: on all ranks. rocm-xio is missing, or does not do what it says.
    """
    links, queues, problem, lack = page.heap.links, None, None, None
    try:
        library = xio.load()
    except IrisError as error:
        problem = str(error)
    else:
        try:
            devices = numbers(places, links.rank, links.group)
            held = next(filter(None, (library.owner(devices[links.rank], d) for d in devices)), None)
            lack = held and f"SDMA queues of a rank belong to {held}"
        except UnsupportedError as error:
            lack = str(error)
    if lack := _agreed(links, problem, lack):
        return None, f"by streams (hipMemcpyDeviceToDeviceNoCU): {lack}"
    try:
        queues = DeviceQueues(library, page, first, devices, timeout_s, watch)
    except IrisError as error:
        problem = str(error)
    try:
        _agreed(links, problem, None)
    except UnsupportedError:
        if queues:
            queues.close()
        raise
    return queues, "through SDMA queues of rocm-xio; reductions, messages and what graphs capture by streams"


def _agreed(links: Links, problem: str | None, lack: str | None) -> str | None:
    """Return what any rank says that it lacks, unless one has a problem, which is raised."""
    cards = [m.payload for m in links.exchange(dict(problem=problem, lack=lack), what="create SDMA queues")]
    for rank, card in enumerate(cards):
        if card["problem"]:
            raise UnsupportedError(f"rank {rank}: {card['problem']}")
    return next((str(card["lack"]) for card in cards if card["lack"]), None)


def _taken(at: int) -> list[gpu.FlagOp]:
    return [gpu.FlagOp(True, at, 1), gpu.FlagOp(False, at, 0)]


def numbers(places: Sequence[str], rank: int, group: str) -> list[int]:
    """Return under which number this process sees the GPU of each rank.

    Raises:
        UnsupportedError: it does not see one, or ranks share one.
    """
    from iris_pg.platforms import hip

    if len(set(places)) < len(places):
        raise UnsupportedError(
            f"ranks share a GPU ({', '.join(places)}), and rocm-xio has one SDMA queue for each pair of GPUs; use a "
            f"GPU for each rank {where(group=group, rank=rank)}"
        )
    found = [hip.number_of(place) for place in places]
    if None in found:
        hidden = [place for place, number in zip(places, found, strict=True) if number is None]
        raise UnsupportedError(
            f"this process does not see the GPUs {', '.join(hidden)} of other ranks, whose queues rocm-xio makes here; "
            "let every rank see all GPUs (unset HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, and call "
            f"torch.cuda.set_device) {where(group=group, rank=rank)}"
        )
    return [number for number in found if number is not None]


def try_streams(heap: SymmetricHeap, page: DevicePage, word: int, pair_bytes: int, timeout_s: float) -> None:
    """Try on every rank what streams are told in operations; collective.

    Args:
        heap: with the area of messages, of which the slots of this rank are used.
        page, word: where the flag is.
        pair_bytes: size of a slot.
        timeout_s: deadline.

    Raises:
        UnsupportedError: on all ranks, naming one on which it does not work.
    """
    from iris_pg.platforms import hip_streams

    def slot(at: int, number: int, sender: int) -> int:
        return heap.bases[at] + heap.areas["mail"] + (number * heap.world + sender) * pair_bytes

    device, mine, problem = heap.device, heap.rank, None
    stream = torch.cuda.Stream(device)
    flag = page.host_address_of_word(word), page.address_of_word(word)

    def settle() -> None:
        done = stream.record_event()
        torch.cuda.current_stream(device).synchronize()
        _until(done.query, timeout_s, f"{device}: a stream does not come to an end in a trial of its copies and flags")

    assert MAIL_SLOTS > 1  # so that each rank has two slots to itself
    try:
        with torch.cuda.device(device):
            here = slot(mine, 0, mine), slot(mine, 1, mine)
            peers = [peer for peer in range(heap.world) if peer != mine]
            for there in [slot(peer, 0, mine) for peer in peers] or here[1:]:
                hip_streams.check(device, stream.cuda_stream, here, there, flag, settle, pair_bytes)
    except IrisError as error:
        problem = str(error)
    for rank, message in enumerate(heap.links.exchange(dict(problem=problem), what="try streams of AMD GPUs")):
        if message.payload["problem"]:
            raise UnsupportedError(f"rank {rank}: {message.payload['problem']}")


def _until(is_done: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline:
            raise DeadlineError(f"{what}, within {timeout_s} s")
        time.sleep(1e-4)


__all__ = ["DeviceQueues", "fits", "make_queues", "numbers", "try_streams", "words_for"]
