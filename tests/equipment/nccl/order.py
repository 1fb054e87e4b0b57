"""Would NCCL carry out what the ranks have posted?

A rank's trace is its program in the order of the host's calls. On CUDA the host waits for other ranks only where NCCL
connects them, and takes nothing from them, so a trace does not depend on other ranks, and all traces together say
everything. An operation is a kernel:

    it is launched  by the host, which waits until all ranks of a communicator have posted their first operation on it,
                    and until the partners of an operation that connects them have posted theirs (``connects``)
    it starts       when the previous operation on its communicator has ended (one stream each), and so has what the
                    compute stream was told to wait for before it was posted; more, by ``Device``
    it ends         when all its partners have started: nothing is buffered on the way

What starts never has to stop, so the order of evaluation does not matter: what has not ended at the end never will.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest

from cp_plugin.engine.common.text import ranks_named


class OrderError(AssertionError):
    """Something NCCL would not carry out: names rank, communicator and operation."""


class Device(Enum):
    """What launches on one rank share, beyond their streams."""

    STREAMS = "every communicator has a hardware queue of its own"
    ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS=1: an operation starts after all that were launched before it have started"
    ONE_AT_A_TIME = "one operation fills the device: it starts after all that were launched before it have ended"
    """All that NCCL promises for several communicators: use them in one order on all ranks."""


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
    partners: list[Operation] = field(default_factory=list, repr=False)
    """Operations of other ranks that must start before it can end."""
    connects: list[Operation] = field(default_factory=list, repr=False)
    """Those of the partners to which NCCL connects this rank in this operation: of the first message from one rank to
    another, of the first collective of its kind. Until they are posted the host waits inside ``ncclGroupEnd`` (NCCL
    2.28 to 2.30, ``ncclP2PPreconnectFunc`` and ``ncclCollPreconnect``)."""
    before: Operation | None = field(default=None, repr=False)
    """The previous operation on the communicator."""
    waits: int = 0
    """Waits of this rank before it was posted."""
    posted: bool = False
    """Whether the host has come to it."""
    started: bool = False
    ended: bool = False

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
    waited: list[Operation] = field(default_factory=list)
    """For which the compute stream waits, in this order."""
    _last: dict[Communicator, Operation] = field(default_factory=dict)

    def post(self, communicator: Communicator, pieces: tuple[Piece, ...], phase: str = "") -> Operation:
        """Launch an operation."""
        last = self._last.get(communicator)
        operation = Operation(
            rank=self.rank,
            communicator=communicator,
            pieces=pieces,
            number=0 if last is None else last.number + 1,
            phase=phase,
            before=last,
            waits=len(self.waited),
        )
        self._last[communicator] = operation
        self.operations.append(operation)
        return operation


def check(traces: Sequence[Trace]) -> None:
    """Check all ranks' traces against NCCL's rules.

    Raises:
        OrderError: naming a rank, a communicator and an operation.
    """
    _everybody_joins(traces)
    _match_collectives(traces)
    _match_messages(traces)
    for device in Device:
        _carry_out(traces, device)


def _by_communicator(traces: Sequence[Trace]) -> dict[Communicator, dict[int, list[Operation]]]:
    found: dict[Communicator, dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for operation in trace.operations:
            found[operation.communicator][trace.rank].append(operation)
    return found


def _everybody_joins(traces: Sequence[Trace]) -> None:
    for communicator, by_rank in _by_communicator(traces).items():
        missing = [rank for rank in communicator.ranks if rank not in by_rank]
        if missing:
            first = by_rank[min(by_rank)][0]
            raise OrderError(
                f"rank {first.rank}: {first} is the first of its communicator, and all its ranks have to join in "
                f"making one, but {ranks_named(missing)} {'has' if len(missing) == 1 else 'have'} no operation there"
            )


def _match_collectives(traces: Sequence[Trace]) -> None:
    for communicator, by_rank in _by_communicator(traces).items():
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
    for communicator, by_rank in _by_communicator(traces).items():
        sent, received = defaultdict(list), defaultdict(list)
        for operations in by_rank.values():
            for one in operations:
                for piece in one.pieces:
                    if piece.verb == "send":
                        sent[one.rank, piece.peer].append((one, piece))
                    elif piece.verb == "receive":
                        received[piece.peer, one.rank].append((one, piece))
        for source, to in sorted({*sent, *received}):
            for there, here in zip_longest(sent[source, to], received[source, to]):
                if here is None:
                    raise OrderError(f"rank {source}: {there[0]}: rank {to} does not receive the {there[1]}")
                if there is None:
                    raise OrderError(f"rank {to}: {here[0]}: rank {source} does not send for the {here[1]}")
                if (there[1].dtype, there[1].elements) != (here[1].dtype, here[1].elements):
                    raise OrderError(
                        f"{communicator}: rank {source}'s {there[0]} and rank {to}'s {here[0]} differ: {there[1]} "
                        f"is a {here[1]}"
                    )
                there[0].partners.append(here[0])
                here[0].partners.append(there[0])
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


class _Rank:
    """The state of one rank while its trace is carried out."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.waited_for = 0
        self.host = 0
        self.launched: list[Operation] = []  # in flight, in order

    @property
    def held(self) -> Operation | None:
        """The operation in which the host waits for other ranks."""
        return self.trace.operations[self.host] if self.host < len(self.trace.operations) else None

    def launch(self, arrived: dict[Communicator, set[int]]) -> bool:
        """Advance the host as far as possible; whether it moved."""
        began = self.host
        while (one := self.held) is not None:
            one.posted = True
            arrived[one.communicator].add(self.trace.rank)
            if len(arrived[one.communicator]) < len(one.communicator.ranks):
                break
            if not all(other.posted for other in one.connects):
                break
            self.launched.append(one)
            self.host += 1
        return self.host > began

    def go_on(self, device: Device) -> bool:
        """Start and end what can; whether anything did."""
        changed, earlier_ended, earlier_started = False, True, True
        one_queue, one_at_a_time = device is Device.ONE_QUEUE, device is Device.ONE_AT_A_TIME
        waited = self.trace.waited
        while self.waited_for < len(waited) and waited[self.waited_for].ended:
            self.waited_for += 1
        for one in self.launched:
            free = earlier_started if one_queue else earlier_ended if one_at_a_time else True
            in_turn = one.before is None or one.before.ended
            if not one.started and free and in_turn and one.waits <= self.waited_for:
                one.started = changed = True
            if one.started and all(other.started for other in one.partners):
                one.ended = changed = True
            earlier_started, earlier_ended = earlier_started and one.started, earlier_ended and one.ended
        self.launched = [one for one in self.launched if not one.ended]
        return changed


def _carry_out(traces: Sequence[Trace], device: Device) -> None:
    for trace in traces:
        for one in trace.operations:
            one.posted = one.started = one.ended = False
    ranks = {trace.rank: _Rank(trace) for trace in traces}
    arrived: dict[Communicator, set[int]] = defaultdict(set)
    while any([rank.launch(arrived) | rank.go_on(device) for rank in ranks.values()]):
        pass
    stuck = [rank for rank in ranks.values() if rank.launched or rank.held is not None]
    if stuck:
        circle = "; ".join(_circle(stuck[0], ranks, arrived))
        raise OrderError(f"ranks wait for each other ({device.value}): {circle}")


def _circle(rank: _Rank, ranks: dict[int, _Rank], arrived: dict[Communicator, set[int]]) -> Iterator[str]:
    """Who waits for whom, from a rank on until one recurs."""
    path: list[tuple[_Rank, str]] = []
    while all(rank is not before for before, _ in path):
        if rank.launched:  # the first of them waits for nothing of its own rank
            one = rank.launched[0]
            other = next(partner for partner in one.partners if not partner.started)
            path.append((rank, f"rank {one.rank}'s {one} waits for rank {other.rank}'s {other}"))
            rank = ranks[other.rank]
        else:
            assert rank.held is not None
            held, made = rank.held, rank.held.communicator
            missing = next((other for other in made.ranks if other not in arrived[made]), None)
            if missing is not None:
                path.append((rank, f"rank {rank.trace.rank}'s {held} waits for rank {missing} to make {made}"))
            else:
                peer = next(other for other in held.connects if not other.posted)
                missing = peer.rank
                path.append((rank, f"rank {held.rank}'s host waits in {held} for rank {missing} to post {peer}"))
            rank = ranks[missing]
    first = next(i for i, (before, _) in enumerate(path) if before is rank)
    return (text for _, text in path[first:])
