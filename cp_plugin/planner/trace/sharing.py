"""Simulation of ranks that share processors and links, such as forked CPU ranks over TCP.

A waiting rank leaves its share of the cores to the others, up to a whole core each. Concurrent messages get equal parts
of a link, where ``Simulation`` serves them in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial

from cp_plugin.planner.machine import kernel_time
from cp_plugin.planner.machine.events import Event, Post, Wait
from cp_plugin.planner.machine.hardware import Device
from cp_plugin.planner.machine.links import Links
from cp_plugin.planner.trace.simulation import KERNELS, Message, Simulation

_PROCESSORS = "processors"
_NOTHING = 1e-12
"""Seconds below which work is done."""


@dataclass(slots=True, eq=False)
class _Work:
    """A kernel or message in progress."""

    left: float
    """Seconds at the profile's rate."""
    of: Hashable
    """The shared resource; None: a latency."""
    done: Callable[[], object]


class SharedSimulation(Simulation):
    """Simulation of ``programs``, which must have all ranks."""

    def __init__(self, programs: Mapping[int, tuple[Event, ...]], device: Device, links: Links) -> None:
        super().__init__(programs, device, links)
        self._now, self._works = 0.0, list[_Work]()
        self._started: set[int] = set()

    def _execute(self) -> None:
        for index in self._ranks:
            self._go_on(index)
        while self._works:
            self._advance()

    def _advance(self) -> None:
        """Advance to the next completion."""
        users = Counter(work.of for work in self._works)
        speeds = [self._speed(work.of, users[work.of]) for work in self._works]
        passed = min(work.left / speed for work, speed in zip(self._works, speeds, strict=True))
        self._now += passed
        for work, speed in zip(self._works, speeds, strict=True):
            work.left -= passed * speed
        finished = [work for work in self._works if work.left <= _NOTHING]
        self._works = [work for work in self._works if work.left > _NOTHING]
        for work in finished:
            work.done()

    def _speed(self, of: Hashable, users: int) -> float:
        """Rate relative to the profile, which was measured with all ranks at work and one message per link."""
        if of is None:
            return 1.0
        if of == _PROCESSORS:
            return min(float(self._device.shared_by), len(self._ranks) / users)
        return 1 / users

    def _go_on(self, index: int) -> None:
        """Run a rank until it blocks."""
        rank = self._ranks[index]
        for event in rank.events:
            match event:
                case Post():
                    self._settle(self._affected(self._posted(rank, index, event)))
                case Wait():
                    rank.waits_for = rank.posted[event.number]
                    if not self._woken(rank):
                        return
                case _:
                    seconds = kernel_time.seconds(event, self._device)
                    done = partial(self._computed, index, KERNELS[type(event)])
                    self._works.append(_Work(seconds, _PROCESSORS, done))
                    return

    def _computed(self, index: int, what: str) -> None:
        self._ranks[index].advance(what, self._now)
        self._go_on(index)

    def _settle(self, candidates: list[Message]) -> None:
        """Start messages whose partners and predecessors are ready."""
        while candidates:
            message = candidates.pop()
            partners = self._partners(message) if id(message) not in self._started else None
            if partners is None or any(p.before is not None and p.before.end is None for p in partners):
                continue
            for m in partners if message.post.verb != "exchange" else [message]:
                self._started.add(id(m))
                self._start(m)

    def _start(self, message: Message) -> None:
        """Schedule its latency, then its share of each link in parallel."""
        cost = self._links.cost(message.post, message.rank)
        parts = list(cost.busy)

        def one_done() -> None:
            parts.pop()
            if not parts:
                self._arrived(message)

        def begin() -> None:
            self._works.extend(_Work(seconds, (message.rank, level), one_done) for level, seconds in cost.busy)

        latency = cost.seconds - max((seconds for _, seconds in parts), default=0.0)
        self._works.append(_Work(latency, None, begin if parts else partial(self._arrived, message)))

    def _arrived(self, message: Message) -> None:
        message.end = self._now
        rank = self._ranks[message.rank]
        if message.after is not None:
            self._settle(self._affected(message.after))
        if rank.waits_for is message and self._woken(rank):
            self._go_on(message.rank)
