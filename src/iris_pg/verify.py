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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeAlias

from iris_pg.errors import ProgramError, where
from iris_pg.program import Add, Program, Ref, Signal, Take, Wait
from iris_pg.program_group import Fifos, Output, ProgramGroup, Span

_Pick: TypeAlias = Callable[[list[int]], int]  # ready FIFOs, the one that went last at the end -> position of the next


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
    group = ProgramGroup(programs, flags or {})
    group.place(inputs, outputs)
    order = _run(group, "serial", group.fifos(group.lane_ranks), lambda ready: 0)
    _Proof(group, order).check()
    for schedule, fifos, pick in _sampled(group, seed, schedules):
        _run(group, schedule, fifos, pick)


def _sampled(group: ProgramGroup, seed: int, count: int) -> Iterator[tuple[str, Fifos, _Pick]]:
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


def _run(group: ProgramGroup, schedule: str, fifos: Fifos, pick: _Pick) -> list[int]:
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

    def __init__(self, group: ProgramGroup, order: list[int]) -> None:
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
