"""What the planner knows of a machine: rates of kernels and links, in SI units (bytes, seconds, FLOP/s).

    cluster("dgx-a100")                                       one that is packaged: ``clusters()`` has all of them
    cluster("mine.toml")                                      one's own: ``save`` writes it
    override(cluster("dgx-a100"), nics=1, inter="roce100")    with some figures changed

Rates are achievable ones, not peaks; ``source`` says where each comes from. Every figure has a range, an order of
magnitude beyond any machine there is: outside of it the figure is not unlikely but in the wrong unit.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, RootModel, model_validator

from cp_plugin.core.names import did_you_mean, find
from cp_plugin.planner.machine import profile_files

Dtype = Literal["bfloat16", "float16", "float32", "float64", "float8"]
Verb = Literal["exchange", "all_gather", "reduce_scatter", "all_to_all"]
Wire = Literal["nvlink", "pcie", "network"]
CARDS_PER_DEVICE = 4
"""The most there are: 32 cards beside 8 devices (EC2 p5)."""


def _within(low: float, high: float, unit: str) -> AfterValidator:
    def check(value: float) -> float:
        if not low <= value <= high:
            where = f"below {low:g}" if value < low else f"above {high:g}"
            raise ValueError(f"is {where}: expected {unit}")
        return value

    return AfterValidator(check)


Seconds = Annotated[float, _within(0, 1, "seconds, such as 5e-6 for 5 microseconds")]
"""Of one message or one kernel call, beside what grows with its size."""
Bytes = Annotated[float, _within(1e6, 1e14, "bytes, such as 80e9 for 80 GB")]
BytesPerSecond = Annotated[float, _within(1e6, 1e14, "bytes per second, such as 25e9 for 25 GB/s or 200 Gb/s")]
FlopsPerSecond = Annotated[float, _within(1e6, 2e16, "FLOP/s, such as 250e12 for 250 TFLOP/s")]
Ranks = Annotated[int, _within(1, 4096, "a number of devices, such as 8")]
Cards = Annotated[int, _within(1, 4096, "a number of network cards, such as 8")]
Processors = Annotated[int, _within(0, 4096, "a number of multiprocessors, such as 132")]
Sharers = Annotated[int, _within(0, 4096, "a number of ranks, 0 where none share")]
Tokens = Annotated[int, _within(1, 65536, "a number of tokens, such as 128")]


class _Profile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Rate(_Profile):
    """How long a kernel call takes: ``seconds``."""

    flops_per_s: FlopsPerSecond
    """In the limit of long sequences."""
    overhead_s: Seconds
    """Of a call, whatever its size."""
    row_s: Seconds = 0.0
    """Of each query token of each head: reading and writing. It is what short sequences cost."""

    def seconds(self, flops: float, rows: float = 0, calls: int = 1) -> float:
        """Of calls with so many FLOPs and rows (query tokens times query heads and batch) together."""
        return calls * self.overhead_s + rows * self.row_s + flops / self.flops_per_s


class Rates(_Profile):
    """Of attention on one device."""

    forward: Rate
    backward: Rate
    source: str = ""


class Kernel(Rates):
    """Attention on one device in one dtype, by the fastest library that is known.

    A forward is ``2 * pairs * heads * (d + e)`` FLOPs, a backward ``2 * pairs * heads * (3 d + 2 e)``; d, e: sizes of a
    query and of a value head; pairs: visible (query, key) pairs rounded up to whole blocks.
    """

    block: Annotated[tuple[Tokens, Tokens], Field(strict=False)] = (128, 128)
    """Queries, keys: what a kernel computes whole or skips whole."""
    head_dim: int = 128
    """Of the heads that the figures were found with."""
    heads: dict[str, Rates] = {}
    """Size of a head -> figures of its own. Of other sizes those of the nearest one are taken."""
    libraries: dict[str, Rates] = {}
    """Name of another library -> its figures, for ``using``."""

    def rate(self, direction: str, head_dim: int) -> Rate:
        """Of a ``forward`` or ``backward`` with heads of that size."""
        near = min((self.head_dim, *map(int, self.heads)), key=lambda size: abs(size - head_dim))
        of = self if near == self.head_dim else self.heads[str(near)]
        return of.forward if direction == "forward" else of.backward


class Device(_Profile):
    """An accelerator, or a CPU."""

    name: str
    memory_bytes: Bytes
    memory_bytes_per_s: BytesPerSecond
    gemm_flops_per_s: dict[Dtype, FlopsPerSecond]
    """Of large matrices. float32 is TF32 on NVIDIA's devices."""
    attention: dict[Dtype, Kernel]
    launch_s: Seconds = 4e-6
    """Of any other kernel: the time below which it does not get, however little it does."""
    host_launch_s: Seconds = 0.0
    """Of the host, for each kernel that it starts: kernels wait for it where they are shorter. 0: not known."""
    host_post_s: Seconds = 0.0
    """Of the host, for each message that it posts."""
    processors: Processors = 0
    """Streaming multiprocessors: none works faster on a kernel's longest block than its share. 0: unknown."""
    shared_by: Sharers = 0
    """Ranks that share one such device, as forked ranks share a CPU; 0: each rank has its own."""
    source: str = ""


class Link(_Profile):
    """A message of n bytes takes ``latency_s + n / bytes_per_s``."""

    latency_s: Seconds
    bytes_per_s: BytesPerSecond
    """In one direction, while as much travels in the other."""
    wire: Wire | None = None
    """What NCCL goes over, which gives the latency of its rings (``protocols``); None: every step of a ring takes
    ``latency_s``, as measured."""
    verbs: dict[Verb, Link] = {}
    """Figures of single verbs, where they differ: sends between nodes reach less than collectives do."""
    source: str = ""

    def of(self, verb: str) -> Link:
        """The figures of that verb."""
        return self.verbs.get(verb, self)  # type: ignore[call-overload]

    @property
    def fastest(self) -> float:
        """Bytes per second that no verb exceeds."""
        return max(link.bytes_per_s for link in (self, *self.verbs.values()))


class _Links(RootModel[dict[str, Link]]):
    """A file of links by name."""


class Cluster(_Profile):
    """Nodes of equal devices."""

    name: str
    device: Device
    per_node: Ranks
    """Devices of a node."""
    intra: Link
    """From one device to all others of its node together."""
    inter: Link
    """Of one network card."""
    nics: Cards
    """Network cards of a node, which its devices share evenly."""
    transport: Literal["nccl", "gloo"] = "nccl"
    """Whose algorithms collectives follow."""
    source: str = ""

    @model_validator(mode="before")
    @classmethod
    def _collectives_of_inter(cls, values: Any) -> Any:
        """Profiles written before links had ``verbs`` keep those between nodes in a table ``collectives``."""
        if not isinstance(values, dict) or "collectives" not in values:
            return values
        inter = values.get("inter", {})
        table = inter.model_dump() if isinstance(inter, Link) else inter
        verbs = {**table.get("verbs", {}), **values["collectives"]}
        return {**{k: v for k, v in values.items() if k != "collectives"}, "inter": {**table, "verbs": verbs}}

    @model_validator(mode="after")
    def _cards_fit(self) -> Cluster:
        if self.nics > CARDS_PER_DEVICE * self.per_node:
            raise ValueError(
                f"nics = {self.nics} for {self.per_node} devices of a node: network cards of one node, at most "
                f"{CARDS_PER_DEVICE} for each device"
            )
        return self


@cache
def devices() -> dict[str, Device]:
    """The packaged devices by name, in alphabetical order."""
    return {d.name: d for d in (profile_files.parse(path, Device) for path in _packaged("devices"))}


@cache
def links() -> dict[str, Link]:
    """The packaged links by name: one generation of NVLink, one network card of some rate."""
    return profile_files.parse(_PROFILES / "links.toml", _Links).root


@cache
def clusters() -> dict[str, Cluster]:
    """The packaged clusters by name, in alphabetical order."""
    return {c.name: c for c in (load(path) for path in _packaged("clusters"))}


def device(name: str) -> Device:
    """The packaged device of that name, whatever its case.

    Raises:
        ValueError: if there is none; the message has the nearest names and all of them.
    """
    return find("device", name, devices())


def link(name: str) -> Link:
    """The packaged link of that name; ValueError as ``device``."""
    return find("link", name, links())


def cluster(name: str) -> Cluster:
    """The packaged cluster of that name, whatever its case, or the one in the ``.toml`` file of that name.

    Raises:
        ValueError: as ``device`` and ``load`` do.
    """
    return load(Path(name)) if name.lower().endswith(".toml") else find("cluster", name, clusters())


def load(path: Path) -> Cluster:
    """A cluster from a TOML file. Its ``device``, ``intra`` and ``inter`` are tables, or names of packaged ones.

    Raises:
        ValueError: for a file that cannot be read, is no TOML, or has missing, unknown or absurd figures: the message
            has the file, the table, the field, the value and the unit expected.
    """
    return profile_files.parse(path, Cluster, _NAMED)


def save(profile: Cluster, path: Path) -> None:
    """Write a profile that ``load`` reads back as it was."""
    path.write_text(profile_files.as_toml(profile), encoding="utf-8")


def override(profile: Cluster, **changes: Any) -> Cluster:
    """The cluster with some figures changed: ``override(c, nics=1, inter={"bytes_per_s": 12e9})``.

    ``device``, ``intra`` and ``inter`` may be names of packaged ones. What is not given stays.

    Raises:
        ValueError: as ``load`` does.
    """
    what = f"cluster {profile.name}"
    new = profile_files.resolved(changes, _NAMED, what)
    return profile_files.validated(Cluster, _merged(profile.model_dump(), new), what)


def using(profile: Cluster, library: str) -> Cluster:
    """The cluster with attention by that library, where its device has the library's figures.

    Raises:
        ValueError: if it has none in any dtype; the message has the libraries that are known.
    """
    kernels = profile.device.attention
    known = sorted({name for kernel in kernels.values() for name in kernel.libraries})
    if library not in known:
        there = f"known beside the fastest: {', '.join(known)}" if known else "none is known beside the fastest"
        raise ValueError(f"no figures of {library!r} on {profile.device.name}{did_you_mean(library, known)} ({there})")
    changed = {
        dtype: kernel.model_copy(update={**dict(kernel.libraries[library]), "heads": {}, "libraries": {}})
        for dtype, kernel in kernels.items()
        if library in kernel.libraries
    }
    device = profile.device.model_copy(update={"attention": {**kernels, **changed}})
    return profile.model_copy(update={"device": device})


_NAMED: profile_files.Named = {"device": device, "intra": link, "inter": link}
_PROFILES = Path(str(files("cp_plugin.planner.machine"))) / "profiles"


def _packaged(folder: str) -> list[Path]:
    return sorted((_PROFILES / folder).glob("*.toml"))


def _merged(old: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A table changes entry by entry, a whole profile at once."""
    new = dict(old)
    for name, change in changes.items():
        both = isinstance(change, dict) and isinstance(old.get(name), dict)
        new[name] = _merged(old[name], change) if both else change
    return new
