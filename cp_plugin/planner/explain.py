"""One configuration in depth: where the time of an attention call goes, what it sends where, and what limits it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from cp_plugin.attention.setups import Setup
from cp_plugin.comm import WHOLE
from cp_plugin.planner.candidates import Candidate, as_flags
from cp_plugin.planner.machine.events import Post
from cp_plugin.planner.machine.hardware import Cluster, Device, Kernel, Link, Rate
from cp_plugin.planner.machine.links import Level, Links
from cp_plugin.planner.price import beside, on, price
from cp_plugin.planner.trace.simulation import HOST, WAITING
from cp_plugin.planner.trace.timeline import Pass, Timeline, run
from cp_plugin.planner.training.footprint import Footprint
from cp_plugin.planner.training.iteration import Iteration
from cp_plugin.planner.training.model import LINEAR, Model
from cp_plugin.planner.training.parallel import Parallel, problem

Resource = Literal["kernels", "memory", "host", "inter", "intra", "latency"]
RESOURCES: Mapping[Resource, str] = {
    "kernels": "attention and matrix kernels",
    "memory": "passes over memory",
    "host": "the host, which starts kernels and posts messages",
    "inter": "links between nodes",
    "intra": "links inside nodes",
    "latency": "latency of messages",
}
EVERY = 8
"""Up to so many ranks all are simulated; of more, the first, the middle and the last one."""


class Split(NamedTuple):
    """The seconds of one rank in a forward or backward; together those of the slowest rank."""

    kernels: float
    """Attention, and products of matrices."""
    memory: float
    """Passes over memory."""
    host: float
    """For the host to start kernels."""
    waiting: float
    """For messages: communication that nothing hides."""
    idle: float
    """For slower ranks, after its own end."""


class Spread(NamedTuple):
    """Over ranks."""

    least: float
    median: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What was found."""

    model: Model
    parallel: Parallel
    timeline: Timeline
    """Of one call, in a layer of the first kind of softmax attention."""
    iteration: Iteration
    footprint: Footprint
    free: Mapping[Resource, float]
    """Seconds of the call if that resource took no time at all, and all else what it takes. Where streams share links a
    call may then take longer: messages come in another order, and links serve who comes first."""
    sent: Mapping[tuple[str, str, Level], float]
    """(phase, axis, level) -> bytes, of the rank that sends most."""

    @property
    def passes(self) -> Mapping[str, Pass]:
        """By name."""
        return {"forward": self.timeline.forward, "backward": self.timeline.backward}

    @property
    def limit(self) -> Resource:
        """What the call would gain most from, if it took no time."""
        return min(self.free, key=lambda resource: self.free[resource])

    @property
    def fits(self) -> bool:
        """Whether the device has the memory."""
        return self.footprint.total <= self.timeline.cluster.device.memory_bytes


def explain(model: Model, parallel: Parallel, setup: Setup, cluster: Cluster, *, every: bool = False) -> Explanation:
    """Simulate one attention call, and what follows from it for a training.

    Args:
        setup: a provider with all choices made; its problem is that of the model's first kind of attention.
        every: simulate all ranks, however many.

    Raises:
        ValueError: if the provider cannot do it, or the model cannot be divided so.
    """
    stride, size = parallel.tensor, setup.problem.size
    whole = every or size <= EVERY or cluster.device.shared_by > 0
    one = Candidate(name=setup.provider.name, setup=setup, flags=as_flags(setup))
    letters = set(model.attention_pattern) - {first_letter(model)}
    others = beside(one, {letter: on(problem(model, parallel, letter), cluster, stride) for letter in letters})
    priced = price(one, others, model, parallel, cluster, ranks="all" if whole else "few")
    timeline = priced.main
    return Explanation(
        model=model,
        parallel=parallel,
        timeline=timeline,
        iteration=priced.iteration,
        footprint=priced.footprint,
        free={r: run(setup, timeline.programs, without(cluster, r), stride).seconds for r in RESOURCES},
        sent=sent_by_level(timeline),
    )


def first_letter(model: Model) -> str:
    """Of the attention that is explained: softmax attention where there is any."""
    return min(model.attention_pattern, key=lambda letter: letter == LINEAR)


def split(of: Pass) -> dict[int, Split]:
    """Rank -> where its seconds went."""
    kinds = {kind: of.total(kind) for kind in ("attention", "products", "memory", HOST, WAITING)}
    return {
        rank: Split(
            kernels=kinds["attention"][rank] + kinds["products"][rank],
            memory=kinds["memory"][rank],
            host=kinds[HOST][rank],
            waiting=kinds[WAITING][rank],
            idle=of.seconds - end,
        )
        for rank, end in of.ends.items()
    }


def spread(values: Sequence[float]) -> Spread:
    """Of one figure over ranks."""
    return Spread(min(values), median(values), max(values))


def without(cluster: Cluster, resource: Resource) -> Cluster:
    """The cluster with a resource that takes no time."""
    c = cluster
    match resource:
        case "kernels" | "memory" | "host":
            return c.model_copy(update={"device": _device_without(c.device, resource)})
        case "latency":
            return c.model_copy(update={name: _without_latency(getattr(c, name)) for name in ("intra", "inter")})
    free = {"latency_s": 0.0, "bytes_per_s": math.inf, "verbs": {}}
    return c.model_copy(update={resource: getattr(c, resource).model_copy(update=free)})


def sent_by_level(timeline: Timeline) -> dict[tuple[str, str, Level], float]:
    """(phase, axis, level) -> bytes that the rank sends which sends most."""
    return max((_sent(timeline, rank) for rank in timeline.programs), key=lambda sent: sum(sent.values()))


def _sent(timeline: Timeline, rank: int) -> dict[tuple[str, str, Level], float]:
    """Of one rank; all levels together are its ledger.

    Rings of collectives leave each node once, so that each of its ranks has a part of what leaves it.
    """
    program, links = timeline.programs[rank], timeline.links
    shares = {axis: _leaving(links, axis, rank) for axis in (*links.axes, WHOLE)}
    found: dict[tuple[str, str, Level], float] = defaultdict(float)
    for phase, events in (("forward", program.forward), ("backward", program.backward)):
        for post in (e for e in events if isinstance(e, Post) and e.nbytes):
            if post.verb == "exchange" and post.to is None:  # it only receives
                continue
            if post.each:
                inside = links.nodes[links.members(post.axis, rank)] == links.nodes[rank]
                outside = 1 - float(np.asarray(post.each)[inside].sum()) / sum(post.each)
            elif post.verb == "exchange":
                outside = float(links.nodes[post.to] != links.nodes[rank])
            else:
                direct = post.verb == "all_to_all" or timeline.cluster.transport == "gloo"
                outside = shares[post.axis].direct if direct else shares[post.axis].around
            found[phase, post.axis, "inter"] += post.nbytes * outside
            found[phase, post.axis, "intra"] += post.nbytes * (1 - outside)
    return {key: nbytes for key, nbytes in found.items() if nbytes}


def _without_latency(link: Link) -> Link:
    verbs = {verb: of.model_copy(update={"latency_s": 0.0}) for verb, of in link.verbs.items()}
    return link.model_copy(update={"latency_s": 0.0, "wire": None, "verbs": verbs})


class _Leaving(NamedTuple):
    """The share of a collective's bytes that leaves the node."""

    direct: float
    """Of messages to all others."""
    around: float
    """Of a ring."""


def _leaving(links: Links, axis: str, rank: int) -> _Leaving:
    nodes = links.nodes[links.members(axis, rank)]
    inside = int((nodes == links.nodes[rank]).sum())
    if inside == len(nodes):
        return _Leaving(0.0, 0.0)
    return _Leaving((len(nodes) - inside) / (len(nodes) - 1), 1 / inside)


def _device_without(device: Device, resource: Resource) -> Device:
    if resource == "memory":
        return device.model_copy(update={"memory_bytes_per_s": math.inf, "launch_s": 0.0})
    if resource == "host":
        return device.model_copy(update={"host_launch_s": 0.0, "host_post_s": 0.0})
    free = Rate.model_construct(flops_per_s=math.inf, overhead_s=0.0, row_s=0.0)
    kernels = {
        d: Kernel.model_construct(forward=free, backward=free, block=k.block) for d, k in device.attention.items()
    }
    products = dict.fromkeys(device.gemm_flops_per_s, math.inf)
    return device.model_copy(update={"attention": kernels, "gemm_flops_per_s": products})
