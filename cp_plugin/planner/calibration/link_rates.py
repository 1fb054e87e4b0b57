"""Measures the verbs of the mesh, all ranks at once, and finds the figures by which ``Links`` gives the same times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.comm import GroupMesh, Mesh, Pending, coordinates, flat_index
from cp_plugin.core.hosts import neighbours_per_host
from cp_plugin.planner.calibration.fitting import fit
from cp_plugin.planner.machine.events import Post
from cp_plugin.planner.machine.hardware import Cluster, Link, Verb, override
from cp_plugin.planner.machine.links import Level, Links, shortest_ring

INTER, INTRA, OUTER, INNER, ALL = "inter", "intra", "outer", "inner", "cp"
_ROUNDS = 3
_FIRST = 65536
"""Bytes of the message that tells how large the others are to be."""
SECONDS = (0.0, 0.08, 0.25)
"""For which messages are to travel."""
_SETTLED_S = 0.03
"""After a barrier, whose last messages must not queue behind the first that are timed."""
_TOO_LONG = 1.0
_LEAST, _MOST = 4096, 2**28
"""Bytes of a message."""
_NO_TIME = Link(latency_s=0.0, bytes_per_s=1e14)


class Sample(NamedTuple):
    """One verb of one size along one axis."""

    axes: Mapping[str, int]
    """Of the mesh."""
    verb: Verb
    axis: str
    nbytes: int
    """That a rank sends."""
    seconds: float


class Figures(NamedTuple):
    """What has been found."""

    intra: Link
    inter: Link
    """With what was measured of collectives in its ``verbs``."""
    nics: int


class Measured:
    """The links under ``torch.distributed``'s ranks. Collective over all of them."""

    def __init__(self, hosts: Sequence[str], device: torch.device, shown: Callable[[str], object]) -> None:
        """
        Args:
            hosts: of every rank; as many neighbouring ones on each.

        Raises:
            ValueError: for hosts with different numbers of ranks.
        """
        self._device, self._shown = device, shown
        size, self.per_node = len(hosts), neighbours_per_host(hosts)
        if self.per_node * len(set(hosts)) != size:
            raise ValueError(
                f"{size} ranks on {len(set(hosts))} hosts are not spread evenly, one host's after the other's: start "
                "as many on each"
            )
        rows = max(r for r in range(1, size + 1) if r * r <= size and size % r == 0)
        self._nodes = size // self.per_node
        self._placed = [rank // self.per_node for rank in range(size)]
        self._by_node = self._mesh({INTER: self._nodes, INTRA: self.per_node})
        self._square = self._mesh({OUTER: size // rows, INNER: rows})
        self._whole = self._mesh({ALL: size})

    def figures(self, profile: Cluster) -> Figures:
        """Of links and verbs; ``profile`` has all that is known but these."""
        intra = self._link("exchange", profile, self._by_node, INTRA, "inside a node") if self.per_node > 1 else None
        inter, nics = (intra, self.per_node) if self._nodes == 1 else self._between_nodes(profile)
        assert inter is not None
        found = override(profile, intra=intra or inter, inter=inter, nics=nics)
        verbs: tuple[Verb, ...] = ("all_to_all", "reduce_scatter", "all_gather") if self._nodes > 1 else ()
        own = {verb: self._collective(verb, found) for verb in verbs}
        return Figures(found.intra, found.inter.model_copy(update={"verbs": own}), nics)

    def sample(self, mesh: Mesh, verb: Verb, axis: str, nbytes: int, *, takes_part: bool = True) -> Sample:
        """The median of three rounds, each as long as its slowest rank."""
        tensors = _message(mesh, verb, axis, nbytes, self._device)

        def run(times: int) -> float:
            _synchronise(self._device)
            dist.barrier()
            time.sleep(_SETTLED_S)
            start = time.perf_counter()
            for _ in range(times if takes_part else 0):
                _VERBS[verb](mesh, axis, tensors).wait()
            _synchronise(self._device)
            found = [0.0] * dist.get_world_size()
            dist.all_gather_object(found, (time.perf_counter() - start) / times)
            return max(found)

        times = max(1, min(20, int(0.1 / run(1))))
        seconds = sorted(run(times) for _ in range(_ROUNDS))[_ROUNDS // 2]
        return Sample(mesh.axes, verb, axis, _sent(tensors, verb, mesh.axes[axis]), seconds)

    def _between_nodes(self, profile: Cluster) -> tuple[Link, int]:
        """One card's link, and the cards of a node: where ranks share one, all together get less than one alone."""
        each = self._link("exchange", override(profile, nics=self.per_node), self._by_node, INTER, "between nodes")
        if self.per_node == 1:
            return each, 1
        nbytes, first = self._sizes(each)[-1], self._by_node.coordinates[INTRA] == 0
        alone = self.sample(self._by_node, "exchange", INTER, nbytes, takes_part=first).seconds
        together = self.sample(self._by_node, "exchange", INTER, nbytes).seconds
        nics = max(1, min(self.per_node, round(self.per_node * alone / together)))
        return each.model_copy(update={"bytes_per_s": each.bytes_per_s * self.per_node / nics}), nics

    def _link(self, verb: Verb, profile: Cluster, mesh: Mesh, axis: str, where: str) -> Link:
        """From messages of several sizes along one axis."""
        self._shown(f"messages {where}")
        first = self.sample(mesh, verb, axis, _FIRST)
        rough = Link(latency_s=0.0, bytes_per_s=min(1e13, max(1e6, _FIRST / first.seconds)))
        samples = [first, *(self.sample(mesh, verb, axis, nbytes) for nbytes in self._sizes(rough))]
        return fitted(
            samples, profile, "intra" if axis == INTRA else "inter", self._placed, f"measured: {verb} {where}"
        )

    def _collective(self, verb: Verb, profile: Cluster) -> Link:
        """From groups of several sizes; not those in which the shortest message would take too long."""
        self._shown(verb)
        card = profile.inter.model_copy(
            update={"bytes_per_s": profile.inter.bytes_per_s * profile.nics / profile.per_node}
        )
        samples: list[Sample] = []
        for mesh, axis in ((self._square, OUTER), (self._square, INNER), (self._whole, ALL)):
            least = shortest_ring(profile, mesh.axes[axis]) if verb == "all_gather" else 0
            if self._leaves(mesh, axis) and not (samples and least > _TOO_LONG * card.bytes_per_s):
                samples += [self.sample(mesh, verb, axis, nbytes) for nbytes in self._sizes(card, least)]
        return fitted(samples, profile, "inter", self._placed, f"measured: {verb}")

    def _leaves(self, mesh: Mesh, axis: str) -> bool:
        """Whether ranks of different nodes are on the axis."""
        return any(self._placed[rank] != self._placed[0] for rank in mesh.row(axis, 0))

    def _sizes(self, link: Link, least: int = _LEAST) -> list[int]:
        """Bytes, with which messages travel for ``SECONDS``; none is alike another."""
        wanted = (max(s * link.bytes_per_s, least * (1 + i / 4), _LEAST) for i, s in enumerate(SECONDS))
        return sorted({int(min(_MOST, nbytes)) // 64 * 64 for nbytes in wanted})

    def _mesh(self, axes: dict[str, int]) -> Mesh:
        return GroupMesh.from_group(axes, dist.group.WORLD)


def fitted(samples: Sequence[Sample], profile: Cluster, level: Level, nodes: Sequence[int], source: str) -> Link:
    """The link by which ``Links`` gives these times, where the links of the other level take none.

    Args:
        nodes: of every rank.
    """
    work = [[_seconds_with(unit, s, profile, level, nodes) * much for unit, much in _UNITS] for s in samples]
    latency, byte = fit(work, [s.seconds for s in samples]).figures
    return Link(latency_s=latency, bytes_per_s=1 / max(byte, 1e-14), source=source)


_UNITS = ((Link(latency_s=1.0, bytes_per_s=1e14), 1.0), (Link(latency_s=0.0, bytes_per_s=1e6), 1e6))
"""A link on which a message takes a second whatever its size, and one on which a byte does when multiplied by this."""


def _seconds_with(link: Link, s: Sample, profile: Cluster, level: Level, nodes: Sequence[int]) -> float:
    """What the verb would take with that link: on the rank where it takes longest."""
    other: Level = "intra" if level == "inter" else "inter"
    links = Links(override(profile, **{level: link, other: _NO_TIME}), s.axes, nodes)
    return max(links.cost(_post(s, rank), rank).seconds for rank in range(prod(s.axes.values())))


def _post(s: Sample, rank: int) -> Post:
    """What a rank does: an exchange is with the next one up the axis, and the next one down."""
    to = source = None
    if s.verb == "exchange":
        at, n = coordinates(s.axes, rank), s.axes[s.axis]
        to, source = (flat_index(s.axes, {**at, s.axis: (at[s.axis] + by) % n}) for by in (1, -1))
    return Post(0, s.verb, s.axis, s.axis, s.nbytes, 2, to, source)


_VERBS: dict[Verb, Callable[[Mesh, str, tuple[Tensor, ...]], Pending]] = {
    "exchange": lambda mesh, axis, tensors: mesh.shift(axis, tensors),
    "all_gather": lambda mesh, axis, tensors: mesh.all_gather(axis, tensors),
    "reduce_scatter": lambda mesh, axis, tensors: mesh.reduce_scatter(axis, tensors),
    "all_to_all": lambda mesh, axis, tensors: mesh.all_to_all(axis, tensors),
}


def _message(mesh: Mesh, verb: Verb, axis: str, nbytes: int, device: torch.device) -> tuple[Tensor, ...]:
    """Two tensors, as k and v are, with which a rank sends so many bytes."""
    n = mesh.axes[axis]
    whole = {"exchange": nbytes, "all_gather": nbytes // (n - 1)}.get(verb, nbytes // (n - 1) * n)
    rows = max(n, whole // 512 // n * n)
    return tuple(torch.zeros(rows, 64, device=device) for _ in range(2))


def _sent(tensors: Sequence[Tensor], verb: Verb, n: int) -> int:
    """Bytes that a rank sends."""
    whole = sum(t.nbytes for t in tensors)
    return {"exchange": whole, "all_gather": (n - 1) * whole}.get(verb, (n - 1) * whole // n)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
