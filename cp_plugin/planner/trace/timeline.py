"""Timeline of one attention call: the programs of its ranks, simulated on a cluster.

    simulate(setup, cluster=cluster("dgx-a100")).seconds

A rank's kernels run on one stream; kernels after a ``Wait`` start when the message has arrived. Where all ranks do the
same, a few stand for all, and their peers are assumed to be in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from cp_plugin.engine.attention.calls import Setup
from cp_plugin.planner.machine.events import Event, Post, Seconds
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.machine.links import Links, place
from cp_plugin.planner.packs import work
from cp_plugin.planner.trace.program import Program, program
from cp_plugin.planner.trace.simulation import WAITING, SharedSimulation, Simulation, Spent

Ranks = Literal["busiest", "few", "all"]
Trace = Callable[..., Program]
"""``program``, or another that makes one rank's program of a setup, a rank and ``tiled``."""


class Pass(NamedTuple):
    spent: Mapping[int, Spent]
    ends: Mapping[int, float]
    """Rank -> end."""

    @property
    def seconds(self) -> float:
        return max(self.ends.values())

    def total(self, what: str) -> dict[int, float]:
        """Rank -> seconds that it spends on this."""
        return {rank: sum(spent.get(what, ())) for rank, spent in self.spent.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One attention call."""

    setup: Setup
    cluster: Cluster
    forward: Pass
    backward: Pass
    programs: Mapping[int, Program]
    """Of the simulated ranks."""
    links: Links

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds

    @property
    def seconds_of(self) -> Seconds:
        """Seconds by pass, with the time each keeps a rank's network card busy."""
        alone = len(self.programs) < self.setup.problem.size

        def count_on_card(rank: int, events: Iterable[Event]) -> float:
            posts = (event for event in events if isinstance(event, Post))
            busy = (part for post in posts for part in self.links.cost(post, rank, worst=alone).busy)
            return sum(seconds for level, seconds in busy if level == "inter")

        forward = max(count_on_card(rank, program.forward) for rank, program in self.programs.items())
        backward = max(count_on_card(rank, program.backward) for rank, program in self.programs.items())
        return Seconds(self.forward.seconds, self.backward.seconds, forward, backward)

    @property
    def exposed_s(self) -> dict[int, float]:
        """Rank -> exposed communication."""
        return {r: self.forward.total(WAITING)[r] + self.backward.total(WAITING)[r] for r in self.programs}


def simulate(
    setup: Setup, *, cluster: Cluster, stride: int = 1, ranks: Ranks = "few", trace: Trace = program
) -> Timeline:
    """Simulate one attention call; ValueError for a setup that cannot run, with its reason, or a dtype without rates.

    Args:
        stride: devices between context-parallel ranks: the tensor-parallel size.
        ranks: ``all``; or, with peers assumed in step, ``few``: first, middle and last; or ``busiest``: one where work
            is even, else first and last; for packed documents the ones that compute most and send most.
        trace: makes the program of a rank.
    """
    size = setup.problem.size
    chosen: Iterable[int] = range(size) if ranks == "all" else ends(setup)
    if ranks == "few":
        chosen = sorted({0, size // 2, size - 1, *chosen})
    programs = programs_of(setup, chosen, tiled=cluster.device.shared_by > 0, trace=trace)
    return run(setup, programs, cluster, stride)


def programs_of(
    setup: Setup, ranks: Iterable[int], *, tiled: bool = False, trace: Trace = program
) -> dict[int, Program]:
    """Programs of these ranks; of all, if messages do not imply what the others do, unless documents are packed."""
    programs = {index: trace(setup, index, tiled=tiled) for index in ranks}
    posts = (e for p in programs.values() for e in (*p.forward, *p.backward) if isinstance(e, Post))
    own = (post.each or (post.verb == "exchange" and None in (post.to, post.source)) for post in posts)
    if not setup.problem.bounds and any(own):
        return {index: trace(setup, index, tiled=tiled) for index in range(setup.problem.size)}
    return programs


def run(setup: Setup, programs: Mapping[int, Program], cluster: Cluster, stride: int = 1) -> Timeline:
    links = links_of(setup, cluster, stride)
    shared = cluster.device.shared_by > 0 and len(programs) == setup.problem.size
    simulation = SharedSimulation if shared else Simulation
    forward, backward = (
        Pass(*simulation({rank: getattr(p, name) for rank, p in programs.items()}, cluster.device, links).run())
        for name in ("forward", "backward")
    )
    return Timeline(setup=setup, cluster=cluster, forward=forward, backward=backward, programs=programs, links=links)


def links_of(setup: Setup, cluster: Cluster, stride: int = 1) -> Links:
    """The links of a setup's mesh, on devices ``stride`` apart."""
    return Links(cluster, setup.axes, place(setup.problem.size, cluster, stride))


def ends(setup: Setup) -> tuple[int, ...]:
    """First and last rank, one of which is the busiest; one rank where work is even. For packed documents the ones that
    compute most and send most."""
    problem, last = setup.problem, setup.problem.size - 1
    if problem.bounds:
        sent = [sum(setup.provider.traffic(problem, setup.options, i).values()) for i in range(problem.size)]
        return tuple({int(work(setup).argmax()), int(np.argmax(sent))})
    uneven = problem.causal and setup.layout == "contiguous"
    return (0, last) if uneven and last else (last,)
