"""Discrete-event simulation of the programs of ranks.

A message starts when all its ranks have posted it, the previous one of its stream is done, and their shares of the
links are free; links serve messages in order of arrival.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from cp_plugin.engine.comm import coordinates
from cp_plugin.planner.machine import kernel_time
from cp_plugin.planner.machine.events import Attention, Event, Memory, Post, Products, Wait
from cp_plugin.planner.machine.hardware import Device
from cp_plugin.planner.machine.links import Level, Links

WAITING = "waiting"
HOST = "host"
KERNELS = {Attention: "attention", Products: "products", Memory: "memory"}
Spent = Mapping[str, Sequence[float]]
"""``attention``, ``products``, ``memory``; ``host``: waiting for a launch; ``waiting``: for a message -> the seconds of
each."""


@dataclass(slots=True, eq=False)
class Message:
    """One rank's part in a verb."""

    rank: int
    post: Post
    posted: float
    before: Self | None
    """Its predecessor in its stream."""
    after: Self | None = None
    meetings: list[list[Message]] = field(default_factory=list)
    """The parts so far, its own included, of a collective; or of a sender and its receiver, for each direction."""
    started: bool = False
    end: float | None = None

    @property
    def ready(self) -> float:
        """When its own rank can start it, once ``before`` has ended."""
        return max(self.posted, 0.0 if self.before is None else self.before.end or 0.0)


@dataclass(slots=True)
class _Rank:
    events: Iterator[Event]
    clock: float = 0.0
    host: float = 0.0
    """Clock of its host, which launches kernels and posts messages ahead of the device."""
    waits_for: Message | None = None
    posted: dict[int, Message] = field(default_factory=dict)
    last: dict[str, Message] = field(default_factory=dict)
    """Stream -> its latest message."""
    free: dict[Level, float] = field(default_factory=lambda: {"intra": 0.0, "inter": 0.0})
    """When its share of the links is free."""
    spent: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def advance(self, what: str, end: float) -> None:
        """Spend the time until ``end`` on this."""
        self.spent[what].append(end - self.clock)
        self.clock = end


class Simulation:
    """Simulates ``programs``; peers without a program are assumed in step with their partners."""

    def __init__(self, programs: Mapping[int, tuple[Event, ...]], device: Device, links: Links) -> None:
        self._ranks = {index: _Rank(iter(events)) for index, events in programs.items()}
        self._device, self._links = device, links
        self._alone = len(programs) < len(links.nodes)
        self._met: Counter[Hashable] = Counter()
        self._meetings: dict[Hashable, list[Message]] = defaultdict(list)
        self._turns = [(0.0, index) for index in self._ranks]

    def run(self) -> tuple[dict[int, Spent], dict[int, float]]:
        """Return what every rank spends, and its end; RuntimeError on a deadlock, naming the ranks that still wait."""
        self._execute()
        if stuck := {i: r.waits_for.post for i, r in self._ranks.items() if r.waits_for is not None}:
            named = ", ".join(f"rank {i} for {post.verb} along {post.axis}" for i, post in list(stuck.items())[:4])
            raise RuntimeError(f"deadlock: these ranks wait for each other: {named}")
        return {i: r.spent for i, r in self._ranks.items()}, {i: r.clock for i, r in self._ranks.items()}

    def _execute(self) -> None:
        """Run all ranks until each has ended or waits for good."""
        heapq.heapify(self._turns)
        while self._turns:
            _, index = heapq.heappop(self._turns)
            if self._step(self._ranks[index], index):
                heapq.heappush(self._turns, (self._ranks[index].clock, index))

    def _step(self, rank: _Rank, index: int) -> bool:
        """Execute a rank's next event; False if it has to wait for a peer, or is done."""
        event = next(rank.events, None)
        match event:
            case None:
                return False
            case Post():
                rank.host += self._device.host_post_s
                self._post(rank, index, event)
            case Wait():
                rank.waits_for = rank.posted[event.number]
                return self._woken(rank)
            case _:
                return self._compute(rank, index, event)
        return True

    def _compute(self, rank: _Rank, index: int, event: Event) -> bool:
        """Spend the time of a kernel; False if others decide when it ends."""
        rank.host += kernel_time.launches(event) * self._device.host_launch_s
        if rank.host > rank.clock:
            rank.advance(HOST, rank.host)
        rank.advance(KERNELS[type(event)], rank.clock + kernel_time.seconds(event, self._device))
        return True

    def _post(self, rank: _Rank, index: int, post: Post) -> None:
        """Enter a rank's part in a verb where its partners look for it, and start what is ready then.

        A rank's nth message to a peer is that peer's nth from it.
        """
        message = Message(index, post, max(rank.clock, rank.host), rank.last.get(post.stream))
        if message.before is not None:
            message.before.after = message
        rank.posted[post.number] = rank.last[post.stream] = message
        for way in () if self._alone else self._ways(post, index):
            self._met[index, way] += 1
            message.meetings.append(self._meetings[way, self._met[index, way]])
            message.meetings[-1].append(message)
        self._settle(_affected(message))

    def _ways(self, post: Post, me: int) -> list[tuple[object, ...]]:
        """Return where a rank's part meets the others': in a collective, and in each direction of an exchange."""
        if post.verb == "exchange":
            ends = ((me, post.to), (post.source, me))
            return [(post.stream, *pair) for pair in ends if None not in pair]
        at = coordinates(self._links.axes, me)
        return [(post.stream, *(n for axis, n in at.items() if axis != post.axis))]

    def _woken(self, rank: _Rank) -> bool:
        """Advance a rank to the end of the message it waits for; False while that is unknown."""
        assert rank.waits_for is not None
        end = rank.waits_for.end
        if end is None:
            return False
        if end > rank.clock:
            rank.advance(WAITING, end)
        rank.waits_for = None
        return True

    def _settle(self, candidates: list[Message]) -> None:
        """Start the messages whose partners and predecessors are ready, and what follows from them."""
        while candidates:
            message = candidates.pop()
            exchange = message.post.verb == "exchange"
            size = 2 if exchange else self._links.axes[message.post.axis]
            if message.started or any(len(meeting) < size for meeting in message.meetings):
                continue
            partners = _affected(message)
            if any(p.before is not None and p.before.end is None for p in partners):
                continue
            together = [message] if exchange or self._alone else message.meetings[0]
            for m in together:
                m.started = True
            candidates += self._start(together, max(m.ready for m in partners))

    def _start(self, together: Sequence[Message], start: float) -> list[Message]:
        """Time messages whose partners are ready at ``start``; the messages that may follow."""
        costs = [self._links.cost(m.post, m.rank, worst=self._alone) for m in together]
        for m, cost in zip(together, costs, strict=True):
            start = max(start, *(self._ranks[m.rank].free[level] for level, _ in cost.busy), 0.0)
        for m, cost in zip(together, costs, strict=True):
            rank = self._ranks[m.rank]
            for level, seconds in cost.busy:
                rank.free[level] = start + seconds
            m.end = start + cost.seconds
            if rank.waits_for is m and self._woken(rank):
                heapq.heappush(self._turns, (rank.clock, m.rank))
        return [one for m in together if m.after is not None for one in _affected(m.after)]


def _affected(message: Message) -> list[Message]:
    """Messages that may start now: this one and its partners so far."""
    return [message, *(part for meeting in message.meetings for part in meeting if part is not message)]


_PROCESSORS = "processors"
_NOTHING = 1e-12
"""Seconds below which work is done."""


@dataclass(slots=True, eq=False)
class _Work:
    """A kernel or message in progress."""

    left: float
    """Seconds at the profile's rate."""
    resource: Hashable
    """The shared one; None: a latency."""
    done: Callable[[], object]


class SharedSimulation(Simulation):
    """Simulates ranks that share processors and links, such as forked CPU ranks over TCP; ``programs``: of all ranks.

    A waiting rank leaves its share of the cores to the others, up to a whole core each. Concurrent messages get equal
    parts of a link, where ``Simulation`` serves them in order.
    """

    def __init__(self, programs: Mapping[int, tuple[Event, ...]], device: Device, links: Links) -> None:
        super().__init__(programs, device, links)
        self._now, self._works = 0.0, list[_Work]()

    def _execute(self) -> None:
        for index in self._ranks:
            self._go_on(index)
        while self._works:
            self._advance()

    def _advance(self) -> None:
        """Advance to the next completion."""
        users = Counter(work.resource for work in self._works)
        speeds = [self._speed(work.resource, users[work.resource]) for work in self._works]
        passed = min(work.left / speed for work, speed in zip(self._works, speeds, strict=True))
        self._now += passed
        for work, speed in zip(self._works, speeds, strict=True):
            work.left -= passed * speed
        finished = [work for work in self._works if work.left <= _NOTHING]
        self._works = [work for work in self._works if work.left > _NOTHING]
        for work in finished:
            work.done()

    def _speed(self, resource: Hashable, users: int) -> float:
        """Rate relative to the profile, which was measured with all ranks at work and one message per link."""
        if resource is None:
            return 1.0
        if resource == _PROCESSORS:
            return min(float(self._device.shared_by), len(self._ranks) / users)
        return 1 / users

    def _go_on(self, index: int) -> None:
        """Run a rank until it blocks."""
        while self._step(self._ranks[index], index):
            pass

    def _compute(self, rank: _Rank, index: int, event: Event) -> bool:
        def done() -> None:
            rank.advance(KERNELS[type(event)], self._now)
            self._go_on(index)

        self._works.append(_Work(kernel_time.seconds(event, self._device), _PROCESSORS, done))
        return False

    def _start(self, together: Sequence[Message], start: float) -> list[Message]:
        for message in together:
            self._begin(message)
        return []

    def _begin(self, message: Message) -> None:
        """Schedule its latency, then its share of each link in parallel."""
        seconds, busy = self._links.cost(message.post, message.rank)
        left = len(busy)

        def one_done() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                self._arrived(message)

        def begin() -> None:
            self._works.extend(_Work(part, (message.rank, level), one_done) for level, part in busy)

        latency = seconds - max((part for _, part in busy), default=0.0)
        self._works.append(_Work(latency, None, begin if busy else one_done))

    def _arrived(self, message: Message) -> None:
        message.end = self._now
        rank = self._ranks[message.rank]
        if message.after is not None:
            self._settle(_affected(message.after))
        if rank.waits_for is message and self._woken(rank):
            self._go_on(message.rank)
