"""Prove that the programs of all ranks of a group work together, whatever the timing.

Builders of programs call :func:`verify` in their tests, for every world size and shape. Nothing is executed and no
memory is touched: the cost grows with the number of steps and not with that of bytes, so real sizes may be used.

Proven, for every interleaving of ranks and lanes, and for every merging of a rank's lanes in the order written:

- every rank ends;
- a mailbox has one writer and one reader, is signalled only when it is empty, is taken by its own rank with the tag
  that was written, and ends as it began; a counter never wraps; flags share no byte with each other or with data;
- what is pulled from a mailbox was offered by the signal that was taken from it last, on the same lane;
- no byte is read before it is defined; a step that writes a byte is ordered after all earlier steps that read or wrote
  it, and a step that reads it after the last write, between ranks and between the lanes of one rank alike;
- each output byte holds what it should, copied or reduced from exactly the given sources. It is written once, or not at
  all, if it was right from the start;
- every other byte that is written is read before it is overwritten and before the end. So a step that writes past the
  end of a slot or of a tensor does not pass, though nobody declares how large they are.

How:

1. One serial run, in which ranks take turns and each executes its steps one after another in the order written, has to
   end, with flags and outputs as they should be.
2. It tells which steps come before which in *any* run: those of a lane in their order; the n-th signal of a mailbox
   before the n-th take; an add before the waits that cannot pass without it. A vector clock per step keeps this.
3. By these clocks each signal and each take of a mailbox comes after the take before it, and the accesses to every byte
   are ordered as said above.
4. So, by induction over the steps of any other run, each take finds the signal that it found in the serial run; the
   order of 2 holds; each step reads the same bytes. And no run stops early: of the steps not done, the one that comes
   first in the serial run can go. Merging lanes in the order written only adds order that the serial run obeys too.

Sampled: flags and bytes are followed through seeded random schedules (lanes as they are; lanes merged at random; one
rank ahead of all others; one behind). They can find only what the proof misses by a mistake, as they do not rest on it.

Not looked at: sizes of buffers, alignment of data, whether a rank can reach an address, `dtype`, `op` and the order of
the sources of a Reduce, and what users do before and after. The last can be written down: a copy into its input at the
start of a rank's program and one out of its output at the end stand for the user, and show whether peers keep off in
time.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TypeAlias

from iris_pg.errors import ArgumentError, ProgramError, where
from iris_pg.program import MAX_WORD, Add, Copy2D, Offer, Program, Pull, Reduce, Ref, Signal, Step, Take, Wait

Span: TypeAlias = tuple[Ref, int]
Output: TypeAlias = tuple[Ref, int, Ref | Collection[Ref]]
_Label: TypeAlias = tuple[int, ...]
_Row: TypeAlias = tuple[int, tuple[int, ...], int]  # (written address, read addresses, nbytes)
_Fifos: TypeAlias = list[list[int]]  # numbers of nodes
_Pick: TypeAlias = Callable[[list[int]], int]  # ready FIFOs, the one that went last at the end -> position of the next

_SPACE = 1 << 48  # every (rank, buffer) begins at a multiple of this many bytes in one common row of addresses
_MAX_PASSES = 4096  # of cutting memory into pieces; each pass follows every cut through one more copy


def verify(
    programs: Sequence[Program],
    *,
    inputs: Sequence[Span],
    outputs: Sequence[Output],
    flags: Mapping[Ref, int] | None = None,
    seed: int = 0,
    schedules: int = 8,
) -> None:
    """Return if the programs are right together, else raise an error that says what is wrong and where.

    Args:
        programs: one for each rank, rank 0 first. Operations in a row are joined by :meth:`Program.then`.
        inputs: (address, nbytes) of the memory that holds data at the start. All other memory is undefined.
        outputs: (address, nbytes, sources) of the memory that holds results at the end. Byte i is the byte that was at
            ``sources + i`` at the start; or, of several sources, the reduction of the bytes there, each used once.
        flags: values that flags have at the start, where they are not 0 (credits).
        seed: of the random schedules.
        schedules: number of random ones, and again of those with merged lanes if a rank has several; besides, each
            rank is ahead once and behind once. With 0 there is only the proof.

    Raises:
        ProgramError: the programs are wrong. The message names rank, step, bytes, the other step where there is one,
            and the schedule, which the same `seed` and `schedules` give again.
        ArgumentError: the arguments contradict each other.
    """
    group = _Group(programs, flags or {})
    group.place(inputs, outputs)
    order = _run(group, "serial", group.fifos(group.lane_ranks), lambda ready: 0)
    _Proof(group, order).check()
    for schedule, fifos, pick in _sampled(group, seed, schedules):
        _run(group, schedule, fifos, pick)


@dataclass(slots=True)
class _Node:
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
        return ProgramError(f"{self} {what}; {rule} {where(rank=self.rank, step=self.index, schedule=schedule)}")

    def __str__(self) -> str:
        return f"rank {self.rank} step {self.index} `{self.step}`"


class _Group:
    """The programs of all ranks, and memory cut into pieces such that every step moves whole pieces.

    A label says what a piece holds: the sorted addresses of the pieces, as they were at the start, that it is a copy or
    a reduction of; () while it is undefined. An address is a byte's place in one row of all memory of all ranks.
    """

    def __init__(self, programs: Sequence[Program], flags: Mapping[Ref, int]) -> None:
        self.nodes: list[_Node] = []
        self.lane_ranks: list[int] = []
        self.users: dict[Ref, list[_Node]] = {}  # flag -> its steps; a flag's number is its position here
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
                node = _Node(rank, index, step, lane, len(before), before[-1])
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

    def _check_flag(self, number: int, ref: Ref, users: list[_Node]) -> None:
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
        taken: dict[Ref, list[_Node]] = {}
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

        owners: dict[int, _Node] = {}
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

        self.labels: list[_Label] = [()] * len(self._cuts)
        for ref, nbytes in inputs:
            for piece in self._pieces(self._address(ref), nbytes):
                self.labels[piece] = (self._cuts[piece],)
        self.expected: dict[int, _Label] = {}
        for ref, nbytes, sources in outputs:
            base = self._address(ref)
            bases = [self._address(source) for source in ([sources] if isinstance(sources, Ref) else sources)]
            for piece in self._pieces(base, nbytes):
                label = tuple(sorted(source + self._cuts[piece] - base for source in bases))
                if self.expected.setdefault(piece, label) != label:
                    raise ArgumentError(
                        f"verify: outputs differ on {self.text(piece)}; it holds one value; give it once"
                    )

    def _rows(self, number: int, node: _Node) -> list[_Row]:
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

    def _check_apart(self, node: _Node, spans: list[tuple[int, int]]) -> None:
        spans.sort()
        for (address, nbytes), (following, _) in pairwise(spans):
            if address + nbytes > following:
                span = self._ref(following).span(address + nbytes - following)
                raise node.error(f"reads and writes {span}", "the two must not overlap; go through other memory")

    def _address(self, ref: Ref, node: _Node | None = None) -> int:
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

    def label_text(self, label: _Label) -> str:
        """Return what a piece holds as text."""
        return " + ".join(str(self._ref(address)) for address in label) or "nothing defined"

    def fifos(self, key_of_lane: Sequence[Hashable]) -> _Fifos:
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


def _sampled(group: _Group, seed: int, count: int) -> Iterator[tuple[str, _Fifos, _Pick]]:
    """Yield random schedules: a name that tells how to get it again, the FIFOs, and a pick."""
    ranks = group.lane_ranks
    lanes = group.fifos(range(len(ranks)))
    for i in range(count):
        rng = random.Random(f"{seed} {i}")
        yield f"random-{i} seed={seed}", lanes, _lean(rng, ())
        if len(lanes) > len(set(ranks)):
            merged = group.fifos([(rank, rng.randrange(2)) for rank in ranks])
            yield f"merged-{i} seed={seed}", merged, _lean(rng, ())
    for rank in sorted(set(ranks)) if count else ():
        rng = random.Random(f"{seed} rank {rank}")
        own = {lane for lane, owner in enumerate(ranks) if owner == rank}
        yield f"ahead-{rank} seed={seed}", lanes, _lean(rng, own)
        yield f"behind-{rank} seed={seed}", lanes, _lean(rng, set(range(len(lanes))) - own)


def _lean(rng: random.Random, favoured: Collection[int]) -> _Pick:
    """Return a pick at random among those ready FIFOs that are favoured, or among all where none is."""

    def pick(ready: list[int]) -> int:
        if favoured and (at := [position for position, fifo in enumerate(ready) if fifo in favoured]):
            return at[int(rng.random() * len(at))]
        return int(rng.random() * len(ready))

    return pick


def _run(group: _Group, schedule: str, fifos: _Fifos, pick: _Pick) -> list[int]:
    """Follow flags and labels through one schedule; return the numbers of the nodes in the order in which they went."""
    flags, labels = list(group.initial), list(group.labels)
    order: list[int] = []
    heads = [0] * len(fifos)
    ready = list(range(len(fifos)))
    blocked: dict[int, list[int]] = {}  # flag -> FIFOs
    while ready:
        fifo = ready.pop(pick(ready))
        number = fifos[fifo][heads[fifo]]
        node = group.nodes[number]
        step, flag = node.step, node.flag
        if isinstance(step, Take | Wait):
            if flags[flag] < (step.value if isinstance(step, Wait) else 1):
                blocked.setdefault(flag, []).append(fifo)
                continue
            if isinstance(step, Take):
                if flags[flag] != step.tag:
                    raise node.error(f"finds tag {flags[flag]}", "signal and take the same tags", schedule)
                flags[flag] = 0
        elif isinstance(step, Signal | Add):
            if isinstance(step, Signal) and flags[flag]:
                raise node.error(f"finds tag {flags[flag]} there", "the mailbox must be empty; take a credit", schedule)
            flags[flag] += step.tag if isinstance(step, Signal) else step.value
            ready += blocked.pop(flag, ())
        else:
            for dst, read in node.moves:
                for piece in read:
                    if not labels[piece]:
                        rule = "what is read is an input or is written before; write it first, or read less"
                        raise node.error(f"reads {group.text(piece)}, which is undefined", rule, schedule)
                label = labels[read[0]]
                if len(read) > 1:
                    label = tuple(sorted(chain.from_iterable(labels[piece] for piece in read)))
                labels[dst] = label
        order.append(number)
        heads[fifo] += 1
        if heads[fifo] < len(fifos[fifo]):
            ready.append(fifo)

    if blocked:
        lines = []
        stuck = sorted(fifos[fifo][heads[fifo]] for waiting in blocked.values() for fifo in waiting)
        for node in map(group.nodes.__getitem__, stuck):
            users = group.users[node.step.refs()[0]]
            writers = sorted({user.rank for user in users if isinstance(user.step, Signal | Add)})
            lines.append(f"\n  {node}: the flag holds {flags[node.flag]}, ranks that write it: {writers or 'none'}")
        raise ProgramError(
            "deadlock: the steps below wait for ever; in the order written, each flag needs a write by a step that can "
            f"go first; signal earlier or wait later {where(schedule=schedule)}{''.join(lines)}"
        )
    for flag, is_mailbox in enumerate(group.is_mailbox):
        if is_mailbox and flags[flag] != group.initial[flag]:
            last = next(node for node in map(group.nodes.__getitem__, reversed(order)) if node.flag == flag)
            rule = f"it must end as it began, {group.initial[flag]}; give each signal its take"
            raise last.error(f"leaves {flags[flag]} in the mailbox at the end", rule, schedule)
    for piece, label in group.expected.items():
        if labels[piece] != label:
            what = f"{group.text(piece)} holds {group.label_text(labels[piece])}, not {group.label_text(label)}"
            for node in map(group.nodes.__getitem__, reversed(order)):
                if piece in dict(node.moves):
                    raise node.error(f"is the last to write an output: {what}", "correct the addresses", schedule)
            raise ProgramError(f"output {what}: no step writes it; add one that does {where(schedule=schedule)}")
    return order


class _Proof:
    """What comes before what in any run, and that this orders all that needs an order."""

    def __init__(self, group: _Group, order: list[int]) -> None:
        self._nodes, self._group, self._order = group.nodes, group, order
        needed: dict[int, list[int]] = {n: [] for n in order if isinstance(group.nodes[n].step, Wait)}
        while True:  # an add that is needed orders more steps, which can show that more adds are needed
            self._clocks = self._count(needed)
            found = {wait: self._needed_adds(wait) for wait in needed}
            if found == needed:
                break
            needed = found

    def _count(self, needed: dict[int, list[int]]) -> list[list[int]]:
        """Return each node's vector clock: for every lane, the place of the last step that comes before it or is it."""
        clocks: list[list[int]] = [[]] * len(self._nodes)
        signals: dict[int, int] = {}  # flag -> its last signal
        for number in self._order:
            node = self._nodes[number]
            clock = list(clocks[node.previous]) if node.previous >= 0 else [0] * len(self._group.lane_ranks)
            sources = needed.get(number, [])
            if isinstance(node.step, Signal):
                signals[node.flag] = number
            elif isinstance(node.step, Take) and node.flag in signals:
                sources = [signals[node.flag]]
            for source in sources:
                clock = list(map(max, clock, clocks[source]))
            clock[node.lane] = node.place
            clocks[number] = clock
        return clocks

    def _before(self, first: int, second: int) -> bool:
        """Say whether `first` comes before `second` in any run, or is it."""
        node = self._nodes[first]
        return self._clocks[second][node.lane] >= node.place

    def _needed_adds(self, wait: int) -> list[int]:
        """Return the adds without which a wait cannot pass, though all others that may come before it have."""
        flag, step = self._nodes[wait].flag, self._nodes[wait].step
        adds = [n for n in self._order if self._nodes[n].flag == flag and not self._before(wait, n)]
        values = {n: add.value for n in adds if isinstance(add := self._nodes[n].step, Add)}
        lacking = step.value - self._group.initial[flag] if isinstance(step, Wait) else 0
        return [n for n in values if sum(values[m] for m in values if not self._before(n, m)) < lacking]

    def check(self) -> None:
        """Raise a ProgramError unless takes, signals and accesses to bytes are ordered, and all writes have a use."""
        group, nodes = self._group, self._nodes
        takes: dict[int, int] = {}  # flag -> its last take
        writers: dict[int, int] = {}  # piece -> the last node that wrote it
        readers: dict[int, dict[int, int]] = {}  # piece -> lane -> the last node there that has read it since
        unread: dict[int, int] = {}  # piece -> the node that wrote it, while none has read it
        written: dict[int, int] = {}  # output piece -> the node that wrote it
        for number in self._order:
            node = nodes[number]
            if isinstance(node.step, Signal | Take):
                # A take does not come after the previous one by the signal that it takes: each could take either.
                start = number if isinstance(node.step, Signal) else node.previous
                last = takes.get(node.flag, -1)
                if last >= 0 and (start < 0 or not self._before(last, start)):
                    rule = "a mailbox is used again only when it is known to be empty; take another flag that tells"
                    raise node.error(f"does not come after {nodes[last]} in every run", rule, "serial")
                if isinstance(node.step, Take):
                    takes[node.flag] = number
            for dst, read in node.moves:
                for piece in read:
                    self._check_order(writers.get(piece, number), number, "reads {} while it is written by {}", piece)
                    readers.setdefault(piece, {})[node.lane] = number
                    unread.pop(piece, None)
                for reader in readers.pop(dst, {}).values():
                    self._check_order(reader, number, "overwrites {} while it is read by {}", dst)
                self._check_order(writers.get(dst, number), number, "overwrites {} while it is written by {}", dst)
                if group.labels[dst] and group.labels[dst] == group.expected.get(dst):
                    what = f"writes {group.text(dst)}, an output that is right from the start"
                    raise node.error(what, "it must not be written; leave the step out", "serial")
                if dst in group.expected and written.setdefault(dst, number) != number:
                    what = f"writes {group.text(dst)} again after {nodes[written[dst]]}"
                    raise node.error(what, "an output byte is written once; leave one of the two out", "serial")
                if dst in unread:
                    what = f"overwrites {group.text(dst)}, which nobody has read since {nodes[unread[dst]]}"
                    raise node.error(what, "what is written is read first; leave one of the two out", "serial")
                writers[dst] = unread[dst] = number
        for piece, number in unread.items():
            if piece not in group.expected:
                rule = "what is written is an output or is read later; write fewer bytes, or to another address"
                raise nodes[number].error(f"writes {group.text(piece)}, which nobody reads", rule, "serial")

    def _check_order(self, first: int, second: int, what: str, piece: int) -> None:
        if not self._before(first, second):
            rule = "nothing orders the two in every run; put a signal and a take between them, or both on one lane"
            raise self._nodes[second].error(what.format(self._group.text(piece), self._nodes[first]), rule, "serial")
