"""Machine profiles: rates of kernels and links in SI units (bytes, seconds, FLOP/s).

    cluster("dgx-a100")                                       packaged; ``clusters()`` lists all
    cluster("mine.toml")                                      from a file; ``save`` writes one
    override(cluster("dgx-a100"), nics=1, inter="roce100")    with some figures changed

Rates are achieved ones, not peaks; ``source`` says where each comes from. Every figure has a range an order of
magnitude beyond any existing machine: outside of it the unit is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tomli_w
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, RootModel, model_validator

from cp_plugin.engine.common.names import find
from cp_plugin.planner.machine import profile_files

Dtype = Literal["bfloat16", "float16", "float32", "float64", "float8"]
Verb = Literal["exchange", "all_gather", "reduce_scatter", "all_to_all"]
Wire = Literal["nvlink", "pcie", "network"]
CARDS_PER_DEVICE = 4
"""Upper limit: 32 cards with 8 devices (EC2 p5)."""


def _bounded(low: float, high: float, unit: str) -> AfterValidator:
    def check(value: float) -> float:
        if not low <= value <= high:
            where = f"below {low:g}" if value < low else f"above {high:g}"
            raise ValueError(f"is {where}: expected {unit}")
        return value

    return AfterValidator(check)


Seconds = Annotated[float, _bounded(0, 1, "seconds, such as 5e-6 for 5 microseconds")]
"""Fixed cost of one message or kernel call."""
Bytes = Annotated[float, _bounded(1e6, 1e14, "bytes, such as 80e9 for 80 GB")]
BytesPerSecond = Annotated[float, _bounded(1e6, 1e14, "bytes per second, such as 25e9 for 25 GB/s or 200 Gb/s")]
FlopsPerSecond = Annotated[float, _bounded(1e6, 2e16, "FLOP/s, such as 250e12 for 250 TFLOP/s")]
Ranks = Annotated[int, _bounded(1, 4096, "a number of devices, such as 8")]
Cards = Annotated[int, _bounded(1, 4096, "a number of network cards, such as 8")]
Processors = Annotated[int, _bounded(0, 4096, "a number of multiprocessors, such as 132")]
Sharers = Annotated[int, _bounded(0, 4096, "a number of ranks, 0 where none share")]
Tokens = Annotated[int, _bounded(1, 65536, "a number of tokens, such as 128")]


class _Profile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Rate(_Profile):
    """Linear cost model of a kernel."""

    flops_per_s: FlopsPerSecond
    """In the limit of long sequences."""
    overhead_s: Seconds
    """Per call."""
    row_s: Seconds = 0.0
    """Per query token and head, for reading and writing: dominates short sequences."""

    def seconds(self, flops: float, rows: float) -> float:
        """Seconds of a call; ``rows``: query tokens times query heads times batch."""
        return self.overhead_s + rows * self.row_s + flops / self.flops_per_s


class Rates(_Profile):
    forward: Rate
    backward: Rate
    source: str = ""


class Kernel(Rates):
    """Attention on one device in one dtype, by the fastest known library.

    A forward is ``2 * pairs * heads * (d + e)`` FLOPs, a backward ``2 * pairs * heads * (3 d + 2 e)``; d, e: query and
    value head dim; pairs: visible (query, key) pairs rounded up to whole blocks.
    """

    block: Annotated[tuple[Tokens, Tokens], Field(strict=False)] = (128, 128)
    """Queries, keys: computed or skipped as a whole."""
    head_dim: int = 128
    """For which ``forward`` and ``backward`` were measured."""
    heads: dict[str, Rates] = {}
    """Other head dims -> rates; the nearest one applies."""

    def rate(self, direction: str, head_dim: int) -> Rate:
        near = min((self.head_dim, *map(int, self.heads)), key=lambda size: abs(size - head_dim))
        of = self if near == self.head_dim else self.heads[str(near)]
        return of.forward if direction == "forward" else of.backward


class Device(_Profile):
    """An accelerator, or a CPU."""

    name: str
    memory_bytes: Bytes
    memory_bytes_per_s: BytesPerSecond
    gemm_flops_per_s: dict[Dtype, FlopsPerSecond]
    """Large matrices; float32 is TF32 on NVIDIA devices."""
    attention: dict[Dtype, Kernel]
    launch_s: Seconds = 4e-6
    """Minimum duration of any other kernel."""
    host_launch_s: Seconds = 0.0
    """Host time per kernel launch, which bounds shorter kernels; 0: unknown."""
    host_post_s: Seconds = 0.0
    """Host time per posted message."""
    processors: Processors = 0
    """Streaming multiprocessors, each with its share of the rate for a kernel's longest block; 0: unknown."""
    shared_by: Sharers = 0
    """Ranks that share the device, as forked ranks share a CPU; 0: each rank has its own."""
    source: str = ""


class Link(_Profile):
    """A message of n bytes takes ``latency_s + n / bytes_per_s``."""

    latency_s: Seconds
    bytes_per_s: BytesPerSecond
    """In each direction at the same time."""
    wire: Wire | None = None
    """Selects NCCL's latency model for rings (``protocols``); None: every step takes ``latency_s``, as measured."""
    verbs: dict[Verb, Link] = {}
    """Figures of verbs that differ: sends between nodes are slower than collectives."""
    source: str = ""

    def link(self, verb: str) -> Link:
        return self.verbs.get(verb, self)  # type: ignore[call-overload]

    @property
    def fastest(self) -> float:
        """Upper bound on bytes per second over all verbs."""
        return max(link.bytes_per_s for link in (self, *self.verbs.values()))


class Cluster(_Profile):
    """Nodes of equal devices."""

    name: str
    device: Device
    per_node: Ranks
    """Devices per node."""
    intra: Link
    """One device to all others of its node together."""
    inter: Link
    """One network card."""
    nics: Cards
    """Network cards per node, shared evenly by its devices."""
    transport: Literal["nccl", "gloo"] = "nccl"
    """Whose collective algorithms are modelled."""
    source: str = ""

    @model_validator(mode="after")
    def _cards_fit(self) -> Cluster:
        if self.nics > CARDS_PER_DEVICE * self.per_node:
            raise ValueError(
                f"nics = {self.nics} for {self.per_node} devices of a node: write the network cards of one node, at "
                f"most {CARDS_PER_DEVICE} per device"
            )
        return self


@cache
def devices() -> dict[str, Device]:
    return {d.name: d for d in (profile_files.parse(path, Device) for path in _packaged("devices"))}


@cache
def links() -> dict[str, Link]:
    """The packaged links by name: NVLink generations and network cards."""
    return profile_files.parse(_PROFILES / "links.toml", RootModel[dict[str, Link]]).root


@cache
def clusters() -> dict[str, Cluster]:
    return {c.name: c for c in (load(path) for path in _packaged("clusters"))}


def device(name: str) -> Device:
    """Look up a packaged device; ValueError with the nearest names for an unknown one."""
    return find("device", name, devices())


def link(name: str) -> Link:
    """Look up a packaged link; ValueError as for ``device``."""
    return find("link", name, links())


def cluster(name: str) -> Cluster:
    """Look up a packaged cluster, or load a ``.toml`` file; ValueError as for ``device`` and ``load``."""
    if name.lower().endswith(".toml"):
        return load(Path(name))
    try:
        return find("cluster", name, clusters())
    except ValueError:
        if Path(name).is_file():
            raise ValueError(
                f"unknown cluster {name!r}: a profile is a .toml file, as cp-plugin calibrate writes"
            ) from None
        raise


def load(path: Path) -> Cluster:
    """Load a cluster from TOML; ``device``, ``intra`` and ``inter`` are tables, or names of packaged ones. ValueError
    for an unreadable file, and missing, unknown or out-of-range figures, with file, table, field, value and expected
    unit."""
    return profile_files.parse(path, Cluster, _NAMED)


def save(profile: Cluster, path: Path) -> None:
    path.write_text(tomli_w.dumps(profile.model_dump(exclude_defaults=True), multiline_strings=True), encoding="utf-8")


def override(profile: Cluster, **changes: Any) -> Cluster:
    """The cluster with some figures changed: ``override(c, nics=1, inter={"bytes_per_s": 12e9})``.

    ``device``, ``intra`` and ``inter`` may be names of packaged ones. ValueError as for ``load``.
    """
    what = f"cluster {profile.name}"
    new = profile_files.resolved(changes, _NAMED, what)
    return profile_files.validated(Cluster, _merged(profile.model_dump(), new), what)


_NAMED: profile_files.Named = {"device": device, "intra": link, "inter": link}
_PROFILES = Path(str(files("cp_plugin.planner.machine"))) / "profiles"


def _packaged(folder: str) -> list[Path]:
    return sorted((_PROFILES / folder).glob("*.toml"))


def _merged(old: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge tables recursively; a whole profile replaces the old one."""
    new = dict(old)
    for name, change in changes.items():
        both = isinstance(change, dict) and isinstance(old.get(name), dict)
        new[name] = _merged(old[name], change) if both else change
    return new


GPUS = {
    "A100-SXM4-40GB": "a100-40gb-sxm",
    "A100-SXM4-80GB": "a100-80gb-sxm",
    "A100 80GB PCIe": "a100-80gb-pcie",
    "A800-SXM4-80GB": "a800-80gb-sxm",
    "H100 80GB HBM3": "h100-80gb-sxm",
    "H200": "h200-141gb-sxm",
    "B200": "b200-180gb-sxm",
}
"""CUDA device name without the vendor -> packaged device. Others of the family (NVL, GH200) differ in memory, clocks or
links."""
CPU = "cpu"


class Inferred(NamedTuple):
    cluster: Cluster
    how: str


def infer_cluster(flag: str, ranks: int, *, cpu: bool) -> Inferred:
    """The cluster of this process, without measuring; ValueError as for ``cluster_of``.

    The GPU gives its name, the launcher the ranks per node; the network is that of the packaged cluster with such
    nodes, and does not matter on a single node. Anything uncertain is an error, never a guess.

    Args:
        flag: that names a cluster explicitly, for messages.
        ranks: of the whole training.
    """
    local = local_ranks(os.environ, 1 if cpu else torch.cuda.device_count(), ranks)
    return cluster_of(CPU if cpu else torch.cuda.get_device_name(), local, ranks, flag)


def local_ranks(environment: Mapping[str, str], seen: int, ranks: int) -> int:
    """Ranks per node: from the launcher, or the number of devices."""
    return int(environment.get("LOCAL_WORLD_SIZE") or min(max(seen, 1), ranks))


def cluster_of(gpu: str, per_node: int, ranks: int, flag: str) -> Inferred:
    """The packaged cluster with that GPU and number of ranks per node; ValueError for an unknown GPU, and for several
    nodes of an unknown size, with the clusters to choose from."""
    name = gpu.removeprefix("NVIDIA ")
    device = CPU if gpu == CPU else GPUS.get(name)
    choices = f"{flag} with one of {', '.join(clusters())}, or with a file that cp-plugin calibrate wrote"
    if device is None:
        raise ValueError(f"no profile for the GPU {gpu!r} (there are profiles for {', '.join(GPUS)}): use {choices}")
    having = [c for c in clusters().values() if c.device.name == device]
    how = f"{gpu} and {per_node} rank{'s' if per_node > 1 else ''} per node"
    alike = [c for c in having if c.per_node == per_node]
    if len(alike) == 1:
        return Inferred(alike[0], f"{alike[0].name}, inferred from {how}")
    if having and (ranks <= per_node or gpu == CPU):
        nearest = min(having, key=lambda c: (c.per_node < per_node, c.per_node))
        changed = override(nearest, per_node=per_node, nics=min(nearest.nics, per_node))
        return Inferred(changed, f"{nearest.name} with {per_node} per node, inferred from {how}")
    known = ", ".join(f"{c.name} has {c.per_node} per node" for c in having) or "no packaged cluster has these GPUs"
    raise ValueError(f"{how}: the network is unknown ({known}): use {choices}")
