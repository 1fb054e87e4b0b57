"""Calibration on all ranks: a cluster profile of the rates of kernels, and of links.

Of links the mesh's collectives are timed, then the ``Link`` is fitted that reproduces these times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from math import ceil, prod
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.engine.comm import GroupMesh, Mesh, coordinates, flat_index, network_between
from cp_plugin.engine.comm.every_rank import gather_hosts, gather_objects
from cp_plugin.engine.common.text import divisors
from cp_plugin.engine.core.dtypes import dtype_name
from cp_plugin.engine.core.problem import Transport
from cp_plugin.planner.calibration import kernel_rates
from cp_plugin.planner.calibration.kernel_rates import fit
from cp_plugin.planner.machine.events import Post
from cp_plugin.planner.machine.hardware import Cluster, Device, Link, Verb, override
from cp_plugin.planner.machine.links import Level, Links, shortest_ring

INTER, INTRA, OUTER, INNER, ALL = "inter", "intra", "outer", "inner", "cp"
_ROUNDS = 3
_FIRST = 65536
"""Bytes of the probe from which the other message sizes are derived."""
SECONDS = (0.0, 0.08, 0.25)
"""Target durations of the messages."""
_SETTLED_S = 0.03
"""Pause after a barrier, whose last messages must not delay the first timed ones."""
_TOO_LONG = 1.0
_LEAST, _MOST = 4096, 2**28
"""Limits of a message in bytes."""
_NO_TIME = Link(latency_s=0.0, bytes_per_s=1e14)


class Sample(NamedTuple):
    """A timed verb along one axis of a mesh."""

    axes: Mapping[str, int]
    verb: Verb
    axis: str
    nbytes: int
    """Sent by a rank."""
    seconds: float


class Measured:
    """The links between the ranks of ``torch.distributed``. All methods are collective."""

    def __init__(self, hosts: Sequence[str], device: torch.device, shown: Callable[[str], object]) -> None:
        """hosts: of every rank; ValueError unless all hold as many ranks, neighbouring ones."""
        self._device, self._shown = device, shown
        size, self.per_node = len(hosts), Transport(hosts=tuple(hosts)).per_host
        if self.per_node * len(set(hosts)) != size:
            raise ValueError(
                f"{size} ranks on {len(set(hosts))} hosts are not spread evenly, in consecutive blocks: start the same "
                "number of ranks on each host"
            )
        rows = max(r for r in divisors(size) if r * r <= size)
        self._nodes = size // self.per_node
        self._placed = [rank // self.per_node for rank in range(size)]
        shapes = {INTER: self._nodes, INTRA: self.per_node}, {OUTER: size // rows, INNER: rows}, {ALL: size}
        meshes = (GroupMesh.from_group(axes, dist.group.WORLD) for axes in shapes)
        self._by_node, self._square, self._whole = meshes

    def figures(self, profile: Cluster) -> dict[str, Any]:
        """The fields ``intra``, ``inter`` and ``nics`` of a profile, for a ``profile`` that has all others."""
        intra = self._link(profile, self._by_node, INTRA, "inside a node") if self.per_node > 1 else None
        inter, nics = (intra, self.per_node) if self._nodes == 1 else self._measure_nodes(profile)
        assert inter is not None
        measured = override(profile, intra=intra or inter, inter=inter, nics=nics)
        verbs: tuple[Verb, ...] = ("all_to_all", "reduce_scatter", "all_gather") if self._nodes > 1 else ()
        own = {verb: self._collective(verb, measured) for verb in verbs}
        return {"intra": measured.intra, "inter": measured.inter.model_copy(update={"verbs": own}), "nics": nics}

    def sample(self, mesh: Mesh, verb: Verb, axis: str, nbytes: int, *, takes_part: bool = True) -> Sample:
        """Median of three rounds, each timed by its slowest rank."""
        tensors = _message(mesh, verb, axis, nbytes, self._device)
        post = getattr(mesh, "shift" if verb == "exchange" else verb)

        def run(times: int) -> float:
            _synchronise(self._device)
            dist.barrier()
            time.sleep(_SETTLED_S)
            start = time.perf_counter()
            for _ in range(times if takes_part else 0):
                post(axis, tensors).wait()
            _synchronise(self._device)
            return max(gather_objects((time.perf_counter() - start) / times))

        times = max(1, min(20, int(0.1 / run(1))))
        seconds = sorted(run(times) for _ in range(_ROUNDS))[_ROUNDS // 2]
        return Sample(mesh.axes, verb, axis, _sent(tensors, verb, mesh.axes[axis]), seconds)

    def _measure_nodes(self, profile: Cluster) -> tuple[Link, int]:
        """A card's link and the number of cards per node: all ranks of a node together against one alone."""
        each = self._link(override(profile, nics=self.per_node), self._by_node, INTER, "between nodes")
        if self.per_node == 1:
            return each, 1
        nbytes, first = self._sizes(each)[-1], self._by_node.coordinates[INTRA] == 0
        alone = self.sample(self._by_node, "exchange", INTER, nbytes, takes_part=first).seconds
        together = self.sample(self._by_node, "exchange", INTER, nbytes).seconds
        nics = max(1, min(self.per_node, round(self.per_node * alone / together)))
        return each.model_copy(update={"bytes_per_s": each.bytes_per_s * self.per_node / nics}), nics

    def _link(self, profile: Cluster, mesh: Mesh, axis: str, where: str) -> Link:
        """Fit from messages of several sizes along one axis."""
        self._shown(f"messages {where}")
        first = self.sample(mesh, "exchange", axis, _FIRST)
        rough = Link(latency_s=0.0, bytes_per_s=min(1e13, max(1e6, _FIRST / first.seconds)))
        samples = [first, *(self.sample(mesh, "exchange", axis, nbytes) for nbytes in self._sizes(rough))]
        level: Level = "intra" if axis == INTRA else "inter"
        return fitted(samples, profile, level, self._placed, f"measured: exchange {where}")

    def _collective(self, verb: Verb, profile: Cluster) -> Link:
        """Fit from groups of several sizes, except those whose shortest message would take too long."""
        self._shown(verb)
        rate = profile.inter.bytes_per_s * profile.nics / profile.per_node
        card = profile.inter.model_copy(update={"bytes_per_s": rate})
        samples: list[Sample] = []
        for mesh, axis in ((self._square, OUTER), (self._square, INNER), (self._whole, ALL)):
            least = shortest_ring(profile, mesh.axes[axis]) if verb == "all_gather" else 0
            leaves = len({self._placed[rank] for rank in mesh.row(axis, 0)}) > 1
            if leaves and not (samples and least > _TOO_LONG * card.bytes_per_s):
                samples += [self.sample(mesh, verb, axis, nbytes) for nbytes in self._sizes(card, least)]
        return fitted(samples, profile, "inter", self._placed, f"measured: {verb}")

    def _sizes(self, link: Link, least: int = _LEAST) -> list[int]:
        """Distinct message sizes that take about ``SECONDS``."""
        wanted = (max(s * link.bytes_per_s, least * (1 + i / 4), _LEAST) for i, s in enumerate(SECONDS))
        return sorted({int(min(_MOST, nbytes)) // 64 * 64 for nbytes in wanted})


def fitted(samples: Sequence[Sample], profile: Cluster, level: Level, nodes: Sequence[int], source: str) -> Link:
    """The link with which ``Links`` reproduces these times, with a free link at the other level.

    nodes: of every rank.
    """
    work = [[_seconds_with(unit, s, profile, level, nodes) * much for unit, much in _UNITS] for s in samples]
    latency, byte = fit(work, [s.seconds for s in samples]).figures
    return Link(latency_s=latency, bytes_per_s=1 / max(byte, 1e-14), source=source)


_UNITS = ((Link(latency_s=1.0, bytes_per_s=1e14), 1.0), (Link(latency_s=0.0, bytes_per_s=1e6), 1e6))
"""Links of one second per message and, times the factor, one second per byte."""


def _seconds_with(link: Link, s: Sample, profile: Cluster, level: Level, nodes: Sequence[int]) -> float:
    """Seconds of the slowest rank if the level had that link."""
    other: Level = "intra" if level == "inter" else "inter"
    links = Links(override(profile, **{level: link, other: _NO_TIME}), s.axes, nodes)
    return max(links.cost(_post(s, rank), rank).seconds for rank in range(prod(s.axes.values())))


def _post(s: Sample, rank: int) -> Post:
    """The rank's part; an exchange sends up the axis and receives from below."""
    to = source = None
    if s.verb == "exchange":
        at, n = coordinates(s.axes, rank), s.axes[s.axis]
        to, source = (flat_index(s.axes, {**at, s.axis: (at[s.axis] + by) % n}) for by in (1, -1))
    return Post(0, s.verb, s.axis, s.axis, s.nbytes, 2, to, source)


def _message(mesh: Mesh, verb: Verb, axis: str, nbytes: int, device: torch.device) -> tuple[Tensor, ...]:
    """Two tensors, like k and v, for which a rank sends that many bytes."""
    n = mesh.axes[axis]
    whole = {"exchange": nbytes, "all_gather": nbytes // (n - 1)}.get(verb, nbytes // (n - 1) * n)
    rows = max(n, whole // 512 // n * n)
    return tuple(torch.zeros(rows, 64, device=device) for _ in range(2))


def _sent(tensors: Sequence[Tensor], verb: Verb, n: int) -> int:
    whole = sum(t.nbytes for t in tensors)
    return {"exchange": whole, "all_gather": (n - 1) * whole}.get(verb, (n - 1) * whole // n)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}


def calibrate(
    name: str,
    device: torch.device,
    dtypes: Sequence[torch.dtype] = (),
    head_dim: int | None = None,
    hosts: Sequence[str] = (),
    shown: Callable[[str], object] = lambda text: None,
) -> Cluster:
    """Measure kernels and links; collective over all ranks of ``torch.distributed``, which return the same profile.
    ValueError for hosts with different numbers of ranks.

    Args:
        dtypes: of attention and matrix products; default: ``DTYPES``.
        head_dim: of attention; default: 64 on the CPU, 128 on CUDA. Rates hold for this size only.
        hosts: of every rank; default: their host names.
        shown: progress callback.
    """
    size, on_cuda = dist.get_world_size(), device.type == "cuda"
    sharing = gather_hosts()
    local = sharing.count(sharing[dist.get_rank()])  # ranks on this host, which on the CPU share its memory and cores
    links = Measured(hosts or sharing, device, shown)
    sizes = kernel_rates.ON_CUDA if on_cuda else kernel_rates.ON_CPU
    sizes = sizes._replace(head_dim=head_dim or sizes.head_dim)
    bytes_per_s, launch_s = kernel_rates.memory(device, sizes, shown)
    every = {dtype_name(dtype): dtype for dtype in dtypes or DTYPES[device.type]}
    total = torch.cuda.get_device_properties(device).total_memory if on_cuda else psutil.virtual_memory().total // local
    measured_device = Device(
        name=torch.cuda.get_device_name(device) if on_cuda else "cpu",
        memory_bytes=float(total),
        memory_bytes_per_s=bytes_per_s,
        gemm_flops_per_s={n: kernel_rates.products(device, t, sizes, shown) for n, t in every.items()},
        attention={n: kernel_rates.attention(device, t, sizes, shown) for n, t in every.items()},
        launch_s=launch_s,
        shared_by=0 if on_cuda else ceil(local / len(os.sched_getaffinity(0))),
        source=f"measured with all ranks at work, heads of {sizes.head_dim}",
    )
    not_yet = Link(latency_s=0.0, bytes_per_s=1e9)
    profile = Cluster(
        name=name,
        device=measured_device,
        per_node=links.per_node,
        intra=not_yet,
        inter=not_yet,
        nics=1,
        transport=network_between(device),
    )
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    source = (
        f"measured by cp-plugin calibrate on {size} ranks, {links.per_node} on each node, at work at the same time; "
        f"torch {torch.__version__}, {when}"
    )
    measured = profile.model_copy(update={**links.figures(profile), "source": source})
    everywhere = [measured]
    dist.broadcast_object_list(everywhere, src=0)
    return everywhere[0]
