"""Would NCCL carry out what the ranks have posted?

A rank's trace is its program in the order of the host's calls. On CUDA the host waits for other ranks only where NCCL
connects them, and takes nothing from them, so a trace does not depend on other ranks, and all traces together say
everything. An operation is a kernel:

    it is launched  by the host, which waits until all ranks of a communicator have posted their first operation on it,
                    and until the partners of an operation that connects them have posted theirs (``connects``)
    it starts       when all that were launched on its rank before it have ended: all that NCCL promises for several
                    communicators is to use them in one order on all ranks, since one operation may fill the device
    it ends         when all its partners have started: nothing is buffered on the way

What ends so also ends with a hardware queue for each communicator, or one for all, where an operation waits for fewer.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from cp_plugin.engine.common.text import ranks_named


class OrderError(AssertionError):
    """Something NCCL would not carry out: names rank, communicator and operation."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """A process group's; ranks are numbers in the whole mesh, in group order."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"communicator {self.name!r} of {ranks_named(self.ranks)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor of an operation. ``peer``: destination or source rank; None for a collective."""

    verb: str
    dtype: str
    elements: int
    peer: int | None = None

    def __str__(self) -> str:
        where = "" if self.peer is None else f" {'to' if self.verb == 'send' else 'from'} rank {self.peer}"
        return f"{self.verb}{where} of {self.elements} x {self.dtype}"


@dataclass(eq=False, slots=True, kw_only=True)
class Operation:
    """One launch on one rank."""

    rank: int
    communicator: Communicator
    pieces: tuple[Piece, ...]
    number: int
    """Operations this rank posted before it on this communicator."""
    phase: str = ""
    joins: list[Operation] = field(default_factory=list, repr=False)
    """In the first operation on a communicator those of the other ranks: all have to be posted to make it."""
    partners: list[Operation] = field(default_factory=list, repr=False)
    """Operations of other ranks that must start before it can end."""
    connects: list[Operation] = field(default_factory=list, repr=False)
    """Those of the partners to which NCCL connects this rank in this operation: of the first message from one rank to
    another, of the first collective of its kind. Until they are posted the host waits inside ``ncclGroupEnd`` (NCCL
    2.28 to 2.30, ``ncclP2PPreconnectFunc`` and ``ncclCollPreconnect``)."""

    @property
    def collective(self) -> bool:
        return self.pieces[0].peer is None

    def __str__(self) -> str:
        phase = f"{self.phase} " if self.phase else ""
        return f"{phase}{' + '.join(map(str, self.pieces))} (operation {self.number} of {self.communicator})"


@dataclass(slots=True)
class Trace:
    """What one rank does, in program order."""

    rank: int
    operations: list[Operation] = field(default_factory=list)

    def post(self, communicator: Communicator, pieces: tuple[Piece, ...], phase: str = "") -> Operation:
        """Launch an operation."""
        number = sum(one.communicator == communicator for one in self.operations)
        made = Operation(rank=self.rank, communicator=communicator, pieces=pieces, number=number, phase=phase)
        self.operations.append(made)
        return made


def check(traces: Sequence[Trace]) -> None:
    """Check all ranks' traces against NCCL's rules.

    Raises:
        OrderError: naming a rank, a communicator and an operation.
    """
    _everybody_joins(traces)
    _match_collectives(traces)
    _match_messages(traces)
    _go_on(traces, lambda one: one.joins + one.connects, _why_the_host_waits)
    _go_on(traces, lambda one: one.partners, lambda one, other: f"{one} waits for rank {other.rank}'s {other}")


def _group_by_communicator(traces: Sequence[Trace]) -> dict[Communicator, dict[int, list[Operation]]]:
    operations: dict[Communicator, dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for operation in trace.operations:
            operations[operation.communicator][trace.rank].append(operation)
    return operations


def _everybody_joins(traces: Sequence[Trace]) -> None:
    for communicator, by_rank in _group_by_communicator(traces).items():
        missing = [rank for rank in communicator.ranks if rank not in by_rank]
        if missing:
            first = by_rank[min(by_rank)][0]
            raise OrderError(
                f"rank {first.rank}: {first} is the first of its communicator, and all its ranks have to join in "
                f"making one, but {ranks_named(missing)} {'has' if len(missing) == 1 else 'have'} no operation there"
            )
        firsts = [operations[0] for operations in by_rank.values()]
        for one in firsts:
            one.joins = firsts


def _match_collectives(traces: Sequence[Trace]) -> None:
    for communicator, by_rank in _group_by_communicator(traces).items():
        lists = [[one for one in by_rank[rank] if one.collective] for rank in communicator.ranks]
        kinds = set[tuple[Piece, ...]]()
        for alike in zip_longest(*lists):
            first = next(one for one in alike if one is not None)
            for rank, other in zip(communicator.ranks, alike, strict=True):
                if other is None:
                    raise OrderError(f"rank {rank} never comes to rank {first.rank}'s {first}")
                if other.pieces != first.pieces:
                    raise OrderError(f"rank {first.rank} posts {first} where rank {rank} posts {other}")
            first_of_its_kind = first.pieces not in kinds
            kinds.add(first.pieces)
            for one in alike:
                one.partners = [other for other in alike if other is not one]
                one.connects = one.partners if first_of_its_kind else []  # NCCL chooses an algorithm by verb and size


def _match_messages(traces: Sequence[Trace]) -> None:
    """The n-th message from one rank to another is the n-th received, whatever batch it is in."""
    for communicator, by_rank in _group_by_communicator(traces).items():
        sent, received = defaultdict(list), defaultdict(list)
        for operations in by_rank.values():
            for one in operations:
                for piece in one.pieces:
                    if piece.verb == "send":
                        sent[one.rank, piece.peer].append((one, piece))
                    elif piece.verb == "receive":
                        received[piece.peer, one.rank].append((one, piece))
        for source, to in sorted({*sent, *received}):
            for left, right in zip_longest(sent[source, to], received[source, to]):
                if right is None:
                    raise OrderError(f"rank {source}: {left[0]}: rank {to} does not receive the {left[1]}")
                if left is None:
                    raise OrderError(f"rank {to}: {right[0]}: rank {source} does not send for the {right[1]}")
                if (left[1].dtype, left[1].elements) != (right[1].dtype, right[1].elements):
                    raise OrderError(
                        f"{communicator}: rank {source}'s {left[0]} and rank {to}'s {right[0]} differ: {left[1]} "
                        f"is a {right[1]}"
                    )
                left[0].partners.append(right[0])
                right[0].partners.append(left[0])
            first = sent[source, to][0][0], received[source, to][0][0]
            for one, other in (first, first[::-1]):
                one.connects.append(other)
        _connect_opposite(communicator, by_rank)


def _connect_opposite(communicator: Communicator, by_rank: dict[int, list[Operation]]) -> None:
    """To the rank half-way around the communicator NCCL connects both directions in one exchange, of as many bytes as
    each side believes: what one of them connects later the other has to connect later, too."""
    half, odd = divmod(len(communicator.ranks), 2)
    for place, rank in enumerate(communicator.ranks[:half] if not odd else ()):
        opposite = communicator.ranks[place + half]
        for one in by_rank[rank]:
            others = {id(other): other for other in one.connects if other.rank == opposite and not one.collective}
            if len(others) > 1 or any(_count(one, other) != _count(other, one) for other in others.values()):
                shown = " and ".join(map(str, others.values()))
                raise OrderError(
                    f"rank {rank}: {one} connects the rank opposite in another number of directions than rank "
                    f"{opposite}'s {shown}: NCCL exchanges messages of different sizes for it"
                )


def _count(one: Operation, other: Operation) -> int:
    """In how many directions an operation connects two ranks."""
    return sum(connected.rank == other.rank for connected in one.connects)


def _go_on(
    traces: Sequence[Trace], needed: Callable[[Operation], list[Operation]], why: Callable[[Operation, Operation], str]
) -> None:
    """Every rank comes to its operations in order, and passes one when other ranks have come to those it needs."""
    left = {trace.rank: deque(trace.operations) for trace in traces}
    came = set[Operation]()

    def missing(one: Operation) -> Operation | None:
        return next((other for other in needed(one) if other not in came), None)

    moved = True
    while moved:
        moved = False
        for operations in left.values():
            while operations and (operations[0] not in came or missing(operations[0]) is None):
                came.add(operations[0])
                if missing(operations[0]) is None:
                    operations.popleft()
                moved = True
    rank = next((rank for rank, operations in left.items() if operations), None)
    path: dict[int, str] = {}
    while rank is not None and rank not in path:
        one = left[rank][0]
        other = missing(one)
        assert other is not None
        path[rank] = f"rank {rank}'s {why(one, other)}"
        rank = other.rank
    if rank is not None:
        told = list(path.values())[list(path).index(rank) :]
        raise OrderError(f"ranks wait for each other: {'; '.join(told)}")


def _why_the_host_waits(one: Operation, other: Operation) -> str:
    if other in one.joins:
        return f"{one} waits for rank {other.rank} to make {one.communicator}"
    return f"host waits in {one} for rank {other.rank} to post {other}"
