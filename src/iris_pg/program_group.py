"""The programs of all ranks together, as :mod:`iris_pg.verify` looks at them: steps as nodes, memory as pieces."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from iris_pg.errors import ArgumentError, ProgramError, where
from iris_pg.program import MAX_WORD, Add, Copy2D, Offer, Program, Pull, Reduce, Ref, Signal, Step, Take, Wait

Span: TypeAlias = tuple[Ref, int]
Output: TypeAlias = tuple[Ref, int, Ref | Collection[Ref]]
Label: TypeAlias = tuple[int, ...]
Fifos: TypeAlias = list[list[int]]  # numbers of nodes
_Row: TypeAlias = tuple[int, tuple[int, ...], int]  # (written address, read addresses, nbytes)

_SPACE = 1 << 48  # every (rank, buffer) begins at a multiple of this many bytes in one common row of addresses
_MAX_PASSES = 4096  # of cutting memory into pieces; each pass follows every cut through one more copy


@dataclass(slots=True)
class Node:
    """One step of one rank."""

    rank: int
    index: int  # in the rank's program
    step: Step
    lane: int  # number of its lane, among those of all ranks
    place: int  # in its lane, from 1
    previous: int  # number of the node before it in its lane, -1 for the first
    flag: int = -1  # number of its flag, -1 for a step that moves bytes
    moves: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # (piece written, pieces read)

    def error(self, what: str, rule: str, schedule: str | None = None) -> ProgramError:
        """Return the error of this step: what it does, and what is right."""
        return ProgramError(f"{self} {what}; {rule} {where(rank=self.rank, step=self.index, schedule=schedule)}")

    def __str__(self) -> str:
        return f"rank {self.rank} step {self.index} `{self.step}`"


class ProgramGroup:
    """The programs of all ranks, and memory cut into pieces such that every step moves whole pieces.

    A label says what a piece holds: the sorted addresses of the pieces, as they were at the start, that it is a copy or
    a reduction of; () while it is undefined. An address is a byte's place in one row of all memory of all ranks.
    """

    def __init__(self, programs: Sequence[Program], flags: Mapping[Ref, int]) -> None:
        self.nodes: list[Node] = []
        self.lane_ranks: list[int] = []
        self.users: dict[Ref, list[Node]] = {}  # flag -> its steps; a flag's number is its position here
        self._offers: dict[int, Ref] = {}  # position of a Pull among the nodes -> where it pulls from
        self._spaces: dict[tuple[int, str], int] = {}  # (rank, buffer) -> number
        self._cuts: list[int] = []  # sorted addresses where pieces begin
        for rank, program in enumerate(programs):
            if (program.rank, program.world) != (rank, len(programs)):
                raise ArgumentError(
                    f"verify: programs[{rank}] is of rank {program.rank} of {program.world}, and there are "
                    f"{len(programs)} programs; there must be one for each rank; pass the whole group's, rank 0 first"
                )
            lanes: dict[int, tuple[int, list[int]]] = {}
            for index, step in enumerate(program.steps):
                if step.lane not in lanes:
                    lanes[step.lane] = len(self.lane_ranks), [-1]
                    self.lane_ranks.append(rank)
                lane, before = lanes[step.lane]
                node = Node(rank, index, step, lane, len(before), before[-1])
                if isinstance(step, Signal | Take | Add | Wait):
                    self.users.setdefault(step.flag, []).append(node)
                before.append(len(self.nodes))
                self.nodes.append(node)
        self.initial = [flags.get(ref, 0) for ref in self.users]
        self.widths = [4] * len(self.users)  # of flags, in bytes
        self.is_mailbox = [isinstance(users[0].step, Signal | Take) for users in self.users.values()]
        for number, ref in enumerate(self.users):
            self._check_flag(number, ref, self.users[ref])
        self._find_offers()

    def _check_flag(self, number: int, ref: Ref, users: list[Node]) -> None:
        total = self.initial[number]
        if not 0 <= total <= MAX_WORD:
            raise ArgumentError(f"verify: flag {ref} starts at {total}; it holds 0..{MAX_WORD}; pass one of these")
        writer = next((node for node in users if isinstance(node.step, Signal)), None)
        for node in users:
            step = node.step
            node.flag = number
            if isinstance(step, Signal | Take) != self.is_mailbox[number]:
                raise node.error(f"shares its flag with {users[0]}", "a flag is a mailbox or a counter; use two flags")
            if isinstance(step, Signal) and writer and node.rank != writer.rank:
                raise node.error(f"signals the mailbox of {writer}", "a mailbox has one writer; give each its own")
            if isinstance(step, Take) and node.rank != ref.rank:
                raise node.error(f"takes from memory of rank {ref.rank}", "a mailbox lies at its reader; take your own")
            if isinstance(step, Take) and writer and step.writer != writer.rank:
                raise node.error(f"names another writer than {writer}", "a mailbox has one writer; name that rank")
            if isinstance(step, Add):
                total += step.value
                self.widths[number] = max(self.widths[number], step.width_bytes)
                if total > MAX_WORD:
                    raise node.error(
                        f"can bring its counter to {total}", f"{MAX_WORD} is the most; add less in one run"
                    )
            if ref.offset % self.widths[number]:
                raise node.error("uses a misaligned flag", f"its offset is a multiple of {self.widths[number]} bytes")

    def _find_offers(self) -> None:
        """Find what each Pull pulls from: the n-th take of a mailbox takes its n-th signal, and credits come first."""
        taken: dict[Ref, list[Node]] = {}
        for number, node in enumerate(self.nodes):
            step = node.step
            if isinstance(step, Take):
                taken.setdefault(step.flag, []).append(node)
            if not isinstance(step, Pull):
                continue
            takes = taken.get(step.flag, [])
            users = self.users.get(step.flag, [])
            signals = [user.step for user in users if isinstance(user.step, Signal)]
            at = len(takes) - 1 - bool(users and self.initial[users[0].flag])
            offer = signals[at] if 0 <= at < len(signals) else None
            if not takes or takes[-1].lane != node.lane or not isinstance(offer, Offer):
                raise node.error("pulls what was not offered", "take an offer from the flag on this lane before")
            if takes[-1].step.writer != step.writer or offer.src.rank != step.writer:  # type: ignore[union-attr]
                raise node.error(f"pulls from rank {step.writer} what {offer} offers", "name the rank that offers it")
            self._offers[number] = offer.src + step.offset

    def place(self, inputs: Sequence[Span], outputs: Sequence[Output]) -> None:
        """Cut memory into pieces; set the nodes' `moves`, the `labels` of the start and those `expected` at the end.

        Raises:
            ProgramError: a step's addresses are negative, overlap each other, or overlap a flag.
        """
        rows = [self._rows(number, node) for number, node in enumerate(self.nodes)]
        moves = {(dst, src, nbytes) for node_rows in rows for dst, read, nbytes in node_rows for src in read}
        flags = [(self._address(ref, users[0]), self.widths[users[0].flag]) for ref, users in self.users.items()]
        spans = flags + [(self._address(ref), nbytes) for ref, nbytes in [*inputs, *((o[0], o[1]) for o in outputs)]]
        spans += [(address, nbytes) for dst, src, nbytes in moves for address in (dst, src)]
        self._cuts = _cut({edge for address, nbytes in spans for edge in (address, address + nbytes)}, moves)

        owners: dict[int, Node] = {}
        for (address, width), users in zip(flags, self.users.values(), strict=True):
            for piece in self._pieces(address, width):
                if owners.setdefault(piece, users[0]) is not users[0]:
                    raise users[0].error(f"has a flag that overlaps that of {owners[piece]}", "keep flags 4 or 8 apart")
        for node, node_rows in zip(self.nodes, rows, strict=True):
            for dst, read, nbytes in node_rows:
                pieces_read = zip(*(self._pieces(src, nbytes) for src in read), strict=True)
                node.moves += zip(self._pieces(dst, nbytes), pieces_read, strict=True)
            for piece in (piece for dst, read in node.moves for piece in (dst, *read) if piece in owners):
                raise node.error(f"moves {self.text(piece)}, the flag of {owners[piece]}", "keep flags and data apart")

        self.labels: list[Label] = [()] * len(self._cuts)
        for ref, nbytes in inputs:
            for piece in self._pieces(self._address(ref), nbytes):
                self.labels[piece] = (self._cuts[piece],)
        self.expected: dict[int, Label] = {}
        for ref, nbytes, sources in outputs:
            base = self._address(ref)
            bases = [self._address(source) for source in ([sources] if isinstance(sources, Ref) else sources)]
            for piece in self._pieces(base, nbytes):
                label = tuple(sorted(source + self._cuts[piece] - base for source in bases))
                if self.expected.setdefault(piece, label) != label:
                    raise ArgumentError(
                        f"verify: outputs differ on {self.text(piece)}; it holds one value; give it once"
                    )

    def _rows(self, number: int, node: Node) -> list[_Row]:
        """Return what a node moves, a row each."""
        step = node.step
        if isinstance(step, Signal | Take | Add | Wait):
            return []
        refs = (step.dst, self._offers[number]) if isinstance(step, Pull) else step.refs()
        dst, *sources = (self._address(ref, node) for ref in refs)
        if isinstance(step, Reduce):
            for src in sources:  # they may overlap each other, and one may be dst
                if src != dst:
                    self._check_apart(node, [(dst, step.nbytes), (src, step.nbytes)])
            return [(dst, tuple(sources), step.nbytes)]
        rows: list[_Row] = []
        if isinstance(step, Copy2D):
            pitches = step.dst_pitch_bytes, step.src_pitch_bytes
            rows += ((dst + i * pitches[0], (sources[0] + i * pitches[1],), step.width_bytes) for i in range(step.rows))
        else:
            rows.append((dst, (sources[0],), step.nbytes))
        self._check_apart(node, [(address, n) for dst, (src,), n in rows for address in (dst, src)])
        return rows

    def _check_apart(self, node: Node, spans: list[tuple[int, int]]) -> None:
        spans.sort()
        for (address, nbytes), (following, _) in pairwise(spans):
            if address + nbytes > following:
                span = self._ref(following).span(address + nbytes - following)
                raise node.error(f"reads and writes {span}", "the two must not overlap; go through other memory")

    def _address(self, ref: Ref, node: Node | None = None) -> int:
        if not 0 <= ref.offset < _SPACE:
            what, rule = f"uses offset {ref.offset} of {ref.buffer!r}", f"offsets are in 0..{_SPACE - 1}; correct it"
            raise node.error(what, rule) if node else ArgumentError(f"verify: an input or output {what}; {rule}")
        return self._spaces.setdefault((ref.rank, ref.buffer), len(self._spaces)) * _SPACE + ref.offset

    def _ref(self, address: int) -> Ref:
        space, offset = divmod(address, _SPACE)
        return Ref(*list(self._spaces)[space], offset)

    def _pieces(self, address: int, nbytes: int) -> range:
        return range(bisect_left(self._cuts, address), bisect_left(self._cuts, address + nbytes))

    def text(self, piece: int) -> str:
        """Return a piece as text: ``rank1.out[0x0:0x8]``."""
        return self._ref(self._cuts[piece]).span(self._cuts[piece + 1] - self._cuts[piece])

    def label_text(self, label: Label) -> str:
        """Return what a piece holds as text."""
        return " + ".join(str(self._ref(address)) for address in label) or "nothing defined"

    def fifos(self, key_of_lane: Sequence[Hashable]) -> Fifos:
        """Return the nodes in the order written, in one FIFO for all lanes with the same key."""
        fifos: dict[Hashable, list[int]] = {}
        for number, node in enumerate(self.nodes):
            fifos.setdefault(key_of_lane[node.lane], []).append(number)
        return list(fifos.values())


def _cut(edges: set[int], moves: Collection[tuple[int, int, int]]) -> list[int]:
    """Return the sorted edges of pieces: `edges`, and for each edge within a move the same place on its other side."""
    new = edges
    for _ in range(_MAX_PASSES):
        row, found = sorted(new), set[int]()
        for dst, src, nbytes in moves:
            for here, there in ((dst, src), (src, dst)):
                inside = row[bisect_right(row, here) : bisect_left(row, here + nbytes)]
                found.update(edge - here + there for edge in inside)
        new = found - edges
        if not new:
            return sorted(edges)
        edges = edges | new
    raise ArgumentError(
        f"verify: after {_MAX_PASSES} passes memory still falls into smaller pieces ({len(edges)} now): copies shift "
        "bytes against each other in a circle, and that takes as many pieces as bytes; use sizes of a few KiB"
    )
