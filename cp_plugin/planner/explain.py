"""Explanation of one configuration: time breakdown of an attention call, traffic by level, and the bottleneck."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from cp_plugin.engine.attention.calls import Setup
from cp_plugin.planner.candidates import Candidate, as_flags
from cp_plugin.planner.errors import KNOWN_ERROR
from cp_plugin.planner.machine.events import Post
from cp_plugin.planner.machine.hardware import Cluster, Kernel, Link, Rate
from cp_plugin.planner.machine.links import Level
from cp_plugin.planner.price import Priced, price
from cp_plugin.planner.search import Plan, answer
from cp_plugin.planner.trace.simulation import HOST, WAITING
from cp_plugin.planner.trace.timeline import Pass, Timeline, run
from cp_plugin.planner.training.model import Model
from cp_plugin.planner.training.parallel import RECOMPUTE, Parallel, divided_alike

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
"""Up to this many ranks all are simulated; beyond, the first, middle and last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The result."""

    model: Model
    priced: Priced
    free: Mapping[Resource, float]
    """Seconds of the call if that resource were free and all else unchanged. With streams that share links this can be
    longer than the call itself: links serve messages in order of arrival, which changes."""
    sent: Mapping[tuple[str, str, Level], float]
    """(phase, axis, level) -> bytes, of the rank that sends most."""

    @property
    def timeline(self) -> Timeline:
        """One call in a layer of the first softmax kind."""
        return self.priced.main

    @property
    def passes(self) -> Mapping[str, Pass]:
        return {"forward": self.timeline.forward, "backward": self.timeline.backward}

    @property
    def limit(self) -> Resource:
        """The bottleneck: the resource whose removal gains most."""
        return min(self.free, key=lambda resource: self.free[resource])

    @property
    def fits(self) -> bool:
        return self.priced.footprint.total <= self.timeline.cluster.device.memory_bytes


class Gain(NamedTuple):
    """Factors whose product is stock Megatron's time over ours, each side at its best."""

    method: float
    """In stock's parallel sizes with stock's recomputation."""
    recomputation: float
    """In the same sizes: attention's output is kept, or less is recomputed, as the memory allows."""
    shape: float
    """Sizes of its own."""
    freed: str
    """What is recomputed otherwise."""

    @property
    def named(self) -> list[tuple[str, float]]:
        """Cause and factor, largest first; without those that change less than 1 %."""
        words = {"the method alone": self.method, self.freed: self.recomputation, "other parallel sizes": self.shape}
        causes = [(name, x) for name, x in words.items() if abs(x - 1) >= 0.01]
        return sorted(causes, key=lambda pair: -pair[1])

    def __str__(self) -> str:
        """``attention not repeated 1.24x, the method alone 1.02x``."""
        return ", ".join(f"{name} {x:.2f}x" for name, x in self.named)


@lru_cache(maxsize=1)
def gain(plan: Plan, ours: Priced, stock: Priced) -> Gain:
    """Where a gain over stock Megatron comes from: our method is priced in stock's shape, too, or if it cannot run
    there, the fastest of ours that can. Simulated once, however often it is printed."""
    there, allowed = stock.parallel, replace(plan.query.allowed, stock=False)
    kept = replace(there, recompute_attention=ours.parallel.recompute_attention)
    every = [replace(divided_alike(kept), recompute=again) for again in RECOMPUTE] if plan.query.free else []

    def own(**changes: Any) -> Priced:
        some = answer(replace(plan.query, allowed=allowed, **changes), worth=KNOWN_ERROR).methods
        able = [p for p in some if plan.fits(p)] or some
        named = [p for p in able if p.candidate.name == ours.candidate.name] or able
        return min(named, key=lambda p: p.iteration.seconds)

    alike, freed = own(shapes=[there], limit=math.inf, free=False), own(shapes=[kept, *every])
    recomputed = [(p.parallel.recompute, p.parallel.recompute_modules) for p in (alike, freed)]
    return Gain(
        method=stock.iteration.seconds / alike.iteration.seconds,
        recomputation=alike.iteration.seconds / freed.iteration.seconds,
        shape=ours.tokens_per_s / freed.tokens_per_s,
        freed="attention not repeated" if recomputed[0] == recomputed[1] else "less recomputation",
    )


def explain(model: Model, parallel: Parallel, setup: Setup, cluster: Cluster) -> Explanation:
    """Simulate one attention call and price the training iteration around it; ValueError if the provider cannot run it,
    or the model cannot be divided so.

    Args:
        setup: resolved, for the problem of the model's first kind of attention.
    """
    stride, size = parallel.tensor, setup.problem.size
    whole = size <= EVERY or cluster.device.shared_by > 0
    one = Candidate(name=setup.provider.name, setup=setup, flags=as_flags(setup))
    priced = price(one, model, parallel, cluster, ranks="all" if whole else "few")
    timeline = priced.main
    return Explanation(
        model=model,
        priced=priced,
        free={r: run(setup, timeline.programs, make_free(cluster, r), stride).seconds for r in RESOURCES},
        sent=max((_sent(timeline, rank) for rank in timeline.programs), key=lambda sent: sum(sent.values())),
    )


def split(one: Pass) -> dict[int, dict[str, float]]:
    """Rank -> its seconds by cause, which add up to those of the slowest rank.

    kernels    attention and matrix products
    memory     passes over memory
    host       kernel launches that the device waits for
    waiting    exposed communication
    idle       from its own end to that of the slowest rank
    """
    spent = {kind: one.total(kind) for kind in ("attention", "products", "memory", HOST, WAITING)}
    return {
        rank: {
            "kernels": spent["attention"][rank] + spent["products"][rank],
            **{kind: spent[kind][rank] for kind in ("memory", HOST, WAITING)},
            "idle": one.seconds - end,
        }
        for rank, end in one.ends.items()
    }


def make_free(cluster: Cluster, resource: Resource) -> Cluster:
    """The cluster with one resource free."""
    device, changes = cluster.device, dict[str, Any]()
    match resource:
        case "kernels":
            free = Rate.model_construct(flops_per_s=math.inf, overhead_s=0.0, row_s=0.0)
            changes["attention"] = {
                dtype: Kernel.model_construct(forward=free, backward=free, block=kernel.block)
                for dtype, kernel in device.attention.items()
            }
            changes["gemm_flops_per_s"] = dict.fromkeys(device.gemm_flops_per_s, math.inf)
        case "memory":
            changes = {"memory_bytes_per_s": math.inf, "launch_s": 0.0}
        case "host":
            changes = {"host_launch_s": 0.0, "host_post_s": 0.0}
        case "latency":
            links = {name: _without_latency(getattr(cluster, name)) for name in ("intra", "inter")}
            return cluster.model_copy(update=links)
        case _:
            free_link = {"latency_s": 0.0, "bytes_per_s": math.inf, "verbs": {}}
            return cluster.model_copy(update={resource: getattr(cluster, resource).model_copy(update=free_link)})
    return cluster.model_copy(update={"device": device.model_copy(update=changes)})


def _sent(timeline: Timeline, rank: int) -> dict[tuple[str, str, Level], float]:
    """The ledger of one rank, split by level."""
    program, links = timeline.programs[rank], timeline.links
    by_level: dict[tuple[str, str, Level], float] = defaultdict(float)
    for phase, events in (("forward", program.forward), ("backward", program.backward)):
        for post in (e for e in events if isinstance(e, Post) and e.sent):
            outside = links.leaving(post, rank)
            by_level[phase, post.axis, "inter"] += post.nbytes * outside
            by_level[phase, post.axis, "intra"] += post.nbytes * (1 - outside)
    return {key: nbytes for key, nbytes in by_level.items() if nbytes}


def _without_latency(link: Link) -> Link:
    verbs = {verb: of.model_copy(update={"latency_s": 0.0}) for verb, of in link.verbs.items()}
    return link.model_copy(update={"latency_s": 0.0, "wire": None, "verbs": verbs})
