"""Communication cost model: seconds of a verb between ranks placed on nodes.

All ranks do the same at the same time. A node's cards are shared by those of its ranks whose messages leave it, and by
other groups on the node that send as much. An NCCL ring enters and leaves each node once, whatever the number of its
ranks there, and uses all their cards; its latency is that of NCCL's protocols. Tensors of one verb are one message.
Gloo collectives are modelled after ``engine.comm.group``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil, log2
from typing import Literal, NamedTuple

import numpy as np

from cp_plugin.engine.comm import WHOLE
from cp_plugin.engine.comm.group import SHORT
from cp_plugin.planner.machine.events import Post
from cp_plugin.planner.machine.hardware import Cluster, Link, Verb, Wire

Level = Literal["intra", "inter"]


class Cost(NamedTuple):
    """Cost of a verb on one rank."""

    seconds: float
    """From the time all its ranks are ready."""
    busy: tuple[tuple[Level, float], ...]
    """Seconds it occupies this rank's share of the links."""


class Links:
    """The links of a mesh; ``nodes``: the node of every rank."""

    def __init__(self, cluster: Cluster, axes: Mapping[str, int], nodes: Sequence[int] | np.ndarray) -> None:
        self.cluster, self.axes, self.nodes = cluster, dict(axes), np.asarray(nodes)
        self._costs: dict[tuple[object, ...], Cost] = {}

    def cost(self, post: Post, rank: int, *, worst: bool = False) -> Cost:
        """Cost of a verb on a rank; ``worst``: on the slowest rank, if all send as this one does."""
        key = (post._replace(number=0), rank, worst)
        if key not in self._costs:
            exchange = post.verb == "exchange"
            self._costs[key] = self._exchange(post, rank, worst) if exchange else self._collective(post, rank)
        return self._costs[key]

    def leaving(self, post: Post, rank: int) -> float:
        """The share of a message that leaves the node: of a ring, which does so once, each of its ranks has a part."""
        if post.verb == "exchange":
            return float(self.nodes[post.to] != self.nodes[rank])
        _, sent, steps = self._levels(post, rank, self.members(post.axis, rank))
        return float(sent[1]) / (sum(post.each) or post.nbytes) if steps[1] else 0.0

    def least(self, axis: str, nbytes: float) -> tuple[Level, float]:
        """Lower bound over all verbs that send ``nbytes`` from each rank along the axis."""
        inter, local = self.cluster.inter, 0
        if axis != WHOLE:
            nodes = self.nodes[self.members(axis, 0)]
            local = int((nodes == nodes[0]).sum())
            if local == len(nodes):
                return "intra", nbytes / self.cluster.intra.fastest
        fastest = inter.fastest
        card = fastest * self.cluster.nics / self.cluster.per_node
        own = fastest * max(1, self.cluster.nics // self.cluster.per_node)
        n = self.axes.get(axis, 1)
        return "inter", min(nbytes / own, nbytes / max(1, local) / card, nbytes * (n - local) / max(1, n - 1) / card)

    def members(self, axis: str, rank: int) -> np.ndarray:
        """Mask of the ranks on the axis through this one; for the whole mesh all ranks."""
        others = [places for name, places in self._places.items() if axis not in (name, WHOLE)]
        return np.logical_and.reduce([places == places[rank] for places in others] or [self.nodes >= 0])

    @cached_property
    def _places(self) -> dict[str, np.ndarray]:
        """Axis -> coordinate of every rank."""
        shape = tuple(self.axes.values())
        return dict(zip(self.axes, np.unravel_index(np.arange(len(self.nodes)), shape), strict=True))

    @cached_property
    def _per_node(self) -> int:
        """Ranks of this mesh on the fullest node."""
        return int(np.bincount(self.nodes).max())

    def _leave(self, axis: str, step: int) -> np.ndarray:
        """Per rank: whether its peer ``step`` up the axis is on another node."""
        places = dict(self._places)
        places[axis] = (places[axis] + step) % self.axes[axis]
        peers = np.ravel_multi_index(tuple(places.values()), tuple(self.axes.values()))
        return self.nodes[peers] != self.nodes

    def _exchange(self, post: Post, rank: int, worst: bool) -> Cost:
        peers = [peer for peer in (post.to, post.source) if peer is not None]
        if post.axis == WHOLE:
            outside = [bool(self.nodes[peer] != self.nodes[rank]) for peer in peers]
            return self._message(post, any(outside), not all(outside), self._per_node)
        places = self._places[post.axis]
        ways = [self._leave(post.axis, places[peer] - places[rank]) for peer in peers]
        outside, inside = np.logical_or.reduce(ways), ~np.logical_and.reduce(ways)
        kinds = [*zip(outside.tolist(), inside.tolist(), self._crossing(*ways).tolist(), strict=True)]
        messages = (self._message(post, *kind) for kind in (set(kinds) if worst else [kinds[rank]]))
        return max(messages, key=lambda cost: cost.seconds)

    def _crossing(self, *ways: np.ndarray) -> np.ndarray:
        """Per rank: how many ranks of its node use the cards in one direction at the same time."""
        return np.maximum.reduce([np.bincount(self.nodes, weights=way) for way in ways])[self.nodes]

    def _message(self, post: Post, outside: bool, inside: bool, crossing: float) -> Cost:
        busy: list[tuple[Level, float]] = []
        seconds = 0.0
        if inside:
            link = self.cluster.intra.link("exchange")
            busy.append(("intra", post.nbytes / link.bytes_per_s))
            seconds = link.latency_s + busy[-1][1]
        if outside:
            link = self.cluster.inter.link("exchange")
            busy.append(("inter", post.nbytes / self._share(link, crossing)))
            seconds = max(seconds, link.latency_s + busy[-1][1])
        return Cost(seconds, tuple(busy))

    def _share(self, link: Link, crossing: float) -> float:
        """Bytes per second of each of ``crossing`` ranks of a node whose messages leave it."""
        nics = self.cluster.nics
        own = max(1, nics // self.cluster.per_node)
        alike = max(1, self.cluster.per_node // self._per_node)  # groups on a node, if all its devices take part
        return link.bytes_per_s * min(own, nics / (crossing * alike))

    def _collective(self, post: Post, rank: int) -> Cost:
        """Rings for all-gather and reduce-scatter; messages to each rank, ``post.each`` or equal ones, for all-to-all.

        Gloo's ranks send directly, one message after the other, except in the ring of a long all-gather.
        """
        cluster, gloo = self.cluster, self.cluster.transport == "gloo"
        n, same = self.axes[post.axis], self.members(post.axis, rank)
        if gloo and post.verb == "all_gather" and post.nbytes >= shortest_ring(cluster, n):
            return self._steps_around(post, rank, same)
        direct, sent, steps = self._levels(post, rank, same)
        verb = "all_to_all" if post.each or (direct and post.verb == "all_gather") else post.verb
        intra, inter = cluster.intra.link(verb), cluster.inter.link(verb)
        card, serial = inter.bytes_per_s * cluster.nics / cluster.per_node, gloo or not direct
        levels: tuple[tuple[Level, Link, float], ...] = (("intra", intra, intra.bytes_per_s), ("inter", inter, card))
        used = [part for part in zip(levels, sent, steps, strict=True) if part[2]]
        busy = [(level, float(nbytes) / rate) for (level, _, rate), nbytes, _ in used]
        if not direct and cluster.intra.wire is not None:
            return self._ring(post, n, 1 + steps[1], busy)
        late = [link.latency_s * (number if serial else min(number, 1)) for (_, link, _), _, number in used]
        latency = sum(late) if serial else max(late, default=0.0)
        return Cost(latency + max((s for _, s in busy), default=0.0), tuple(busy))

    def _levels(self, post: Post, rank: int, same: np.ndarray) -> tuple[bool, list[float], list[int]]:
        """Whether a collective's messages go to each rank, and inside the node and out of it: bytes and messages."""
        nodes = self.nodes[same]
        n, inside = len(nodes), nodes == self.nodes[rank]
        local = int(inside.sum())
        if post.each:
            each = np.asarray(post.each)
            sent, steps = ([of(each[at]) for at in (inside, ~inside)] for of in (np.sum, np.count_nonzero))
            return True, sent, steps
        if self.cluster.transport == "gloo" or post.verb == "all_to_all":
            steps = [local - 1, n - local]
            return True, [post.nbytes * (peers / (n - 1)) for peers in steps], steps
        return False, [post.nbytes, post.nbytes * (1 / local)], [local - 1, len(np.unique(nodes)) - 1]

    def _ring(self, post: Post, ranks: int, nodes: int, busy: Sequence[tuple[Level, float]]) -> Cost:
        """The fastest of NCCL's protocols, given ``busy`` at full rates."""
        inside, between = self.cluster.intra.wire, self.cluster.inter.wire
        assert inside is not None
        if nodes > 1 and between is None:  # measured: every step between nodes takes as long
            latency = (nodes - 1) * self.cluster.inter.link(post.verb).latency_s
            return Cost(latency + max(s for _, s in busy), tuple(busy))
        full = max(s for _, s in busy)
        by_protocol = [
            (p.latency(ranks, nodes, inside, between or inside) + full / p.share, p.share)
            for p in protocols(ranks, nodes, inside)
        ]
        seconds, share = min(by_protocol)
        return Cost(seconds, tuple((level, s / share) for level, s in busy))

    def _steps_around(self, post: Post, rank: int, same: np.ndarray) -> Cost:
        """Gloo's ring in axis order: every step takes as long as its slowest message."""
        out, steps = self._leave(post.axis, 1), self.axes[post.axis] - 1
        crossing, inside = self._crossing(out), self.cluster.intra
        between = self.cluster.inter.link("all_gather")
        rates = [
            self._share(between, float(c)) if leaves else inside.bytes_per_s
            for leaves, c in zip(out, crossing, strict=True)
        ]
        slowest = min(rate for rate, member in zip(rates, same, strict=True) if member)
        latency = between.latency_s if out[same].any() else inside.latency_s
        level: Level = "inter" if out[rank] else "intra"
        return Cost(steps * latency + post.nbytes / slowest, ((level, post.nbytes / rates[rank]),))


def shortest_ring(cluster: Cluster, ranks: int) -> int:
    """Bytes sent per rank from which an all-gather uses a ring."""
    return (ranks - 1) * (SHORT + 1) if cluster.transport == "gloo" else 0


def place(size: int, cluster: Cluster, stride: int = 1) -> np.ndarray:
    """The node of every context-parallel rank, on consecutive devices ``stride`` apart."""
    return np.arange(size) * stride // cluster.per_node


class Protocol(NamedTuple):
    """Latencies of a protocol of NCCL's ring collectives, by NCCL's own model (``src/graph/tuning.cc``, ``baseLat``,
    ``hwLat``): a ring of n ranks makes n - 1 steps; those for short messages are faster, at a share of the rate."""

    start_s: float
    step_s: Mapping[Wire, float]
    share: float
    """Fraction of the link's rate."""
    tree: bool = False
    """Whether steps grow with the logarithm of the ranks; only with one rank per node (PAT, NCCL 2.23)."""

    def latency(self, ranks: int, nodes: int, inside: Wire, between: Wire) -> float:
        """Seconds for zero bytes."""
        if self.tree:
            return self.start_s + ceil(log2(ranks)) * self.step_s[between]
        return self.start_s + (ranks - nodes) * self.step_s[inside] + (nodes - 1) * self.step_s[between]


_SIMPLE: Mapping[Wire, float] = {"nvlink": 3.4e-6, "pcie": 5.7e-6, "network": 14e-6}
SIMPLE = Protocol(8.4e-6, _SIMPLE, 1.0)
LL128 = Protocol(14e-6, {"nvlink": 1.9e-6, "pcie": 2.5e-6, "network": 4e-6}, 0.92)
LL = Protocol(6.6e-6, {"nvlink": 0.6e-6, "pcie": 1e-6, "network": 2.7e-6}, 0.25)
PAT = Protocol(8.4e-6, _SIMPLE, 0.75, tree=True)


def protocols(ranks: int, nodes: int, inside: Wire) -> tuple[Protocol, ...]:
    """The protocols available to NCCL; LL128 needs NVLink within nodes."""
    return (SIMPLE, LL, *[LL128] * (inside == "nvlink"), *[PAT] * (nodes == ranks))


class Group(NamedTuple):
    """Ranks ``stride`` apart; all groups communicate at the same time."""

    size: int
    stride: int = 1


def cost(cluster: Cluster, group: Group, nbytes: float, verb: Verb) -> float:
    """All-gather to, reduce-scatter from, or all-to-all of ``nbytes`` on each rank: all but its own part is sent."""
    n = group.size
    if n == 1:
        return 0.0
    post = Post(0, verb, "group", "group", nbytes * (n - 1) / n, 1, None, None)  # type: ignore[arg-type]
    return Links(cluster, {"group": n}, place(n, cluster, group.stride)).cost(post, 0).seconds


def all_reduce(cluster: Cluster, group: Group, nbytes: float) -> float:
    return cost(cluster, group, nbytes, "reduce_scatter") + cost(cluster, group, nbytes, "all_gather")


def message(cluster: Cluster, stride: int, nbytes: float) -> float:
    """Send from every rank to the one ``stride`` further."""
    inside = stride < cluster.per_node
    link = (cluster.intra if inside else cluster.inter).link("exchange")
    share = 1.0 if inside else cluster.nics / cluster.per_node
    return link.latency_s + nbytes / (link.bytes_per_s * share)
