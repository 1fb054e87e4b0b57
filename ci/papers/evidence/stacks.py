"""Machines and software on which figures were measured (``Stack``), and their fittable parameters.

A parameter is a physical quantity in SI units, restricted to the range that hardware and software allow. ``PARAMETERS``
belong to one machine; ``SHARED`` are common to all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from cp_plugin.common.names import find
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.hardware import Cluster

MOST_FITTED = 2
"""Maximum number of fitted parameters per machine."""


class Fit(BaseModel):
    """A fitted parameter of a machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameter: str
    """A key of ``PARAMETERS``."""
    plausible: tuple[float, float]
    """Search range: what hardware and software allow."""
    why: str
    """Reason for the range."""

    @model_validator(mode="after")
    def _known(self) -> Fit:
        find("parameter", self.parameter, PARAMETERS)
        if not 0 < self.plausible[0] < self.plausible[1]:
            raise ValueError(f"{self.parameter}: {self.plausible} is no range of positive figures")
        return self


class Stack(BaseModel):
    """A cluster and its software, as far as known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str
    """A packaged cluster."""
    override: dict[str, Any] = {}
    """Changes to it."""
    note: str
    """What is known and what is assumed."""
    attention_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of attention's products and payloads."""
    tile: tuple[int, int] | None = None
    """Tile of queries and keys for attention that visits all tiles and skips masked ones."""
    training: dict[str, Any] = {}
    """Fields of ``cp_plugin.planner.training.parallel.Parallel``."""
    fit: tuple[Fit, ...] = ()

    @model_validator(mode="after")
    def _few(self) -> Stack:
        if len(self.fit) > MOST_FITTED:
            raise ValueError(f"{len(self.fit)} parameters to fit on {self.base}: at most {MOST_FITTED}")
        return self


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster with what its software adds to the planner's iteration."""

    cluster: Cluster
    dtype: str = "bfloat16"
    """Of attention."""
    visits_all_tiles: bool = False
    """Whether attention loops over all tiles and skips masked ones."""
    host_bytes_per_s: float = 100e9
    """Memory bandwidth of a node (assumption: a quarter of two sockets' 410 GB/s)."""

    @property
    def kernel(self) -> hardware.Kernel:
        return self.cluster.device.attention[self.dtype]  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A quantity that can be fitted."""

    label: str
    scale: float
    unit: str
    """Displayed value = value / scale, in this unit."""
    of: Callable[[Machine], float]
    """Value before fitting."""
    put: Callable[[Machine, float], Machine]

    def shown(self, value: float) -> str:
        """Format with unit."""
        number = value / self.scale
        return f"{number:,.0f} {self.unit}" if number >= 1000 else f"{number:.3g} {self.unit}".strip()


@dataclass(frozen=True, slots=True)
class Shared:
    """A quantity common to all machines, as a multiple of its assumed value."""

    label: str
    parameters: tuple[str, ...]
    """Keys of ``PARAMETERS``."""
    plausible: tuple[float, float]
    why: str


def machine(stack: Stack, values: tuple[float, ...] = (), shared: tuple[float, ...] = ()) -> Machine:
    """The machine of a stack, with values for ``stack.fit`` or for ``SHARED`` if given."""
    found = _assumed(stack.model_dump_json())
    for fit, value in zip(stack.fit, values, strict=bool(values)):
        found = PARAMETERS[fit.parameter].put(found, value)
    for one, factor in zip(SHARED, shared, strict=bool(shared)):
        scaled = {name: PARAMETERS[name].of(found) * factor for name in one.parameters}
        for name, value in scaled.items():
            found = PARAMETERS[name].put(found, value)
    return found


def assumed(stack: Stack) -> tuple[float, ...]:
    """Assumed values of ``stack.fit``."""
    return tuple(PARAMETERS[fit.parameter].of(machine(stack)) for fit in stack.fit)


@cache
def _assumed(stack_json: str) -> Machine:
    stack = Stack.model_validate_json(stack_json)
    cluster = hardware.override(hardware.cluster(stack.base), **stack.override)
    found = Machine(cluster, dtype=stack.attention_dtype, visits_all_tiles=stack.tile is not None)
    if stack.tile is None:
        return found
    compiled = {"processors": 0, "host_launch_s": 0.0, "host_post_s": 0.0}  # a program of XLA: no blocks, no host
    device = cluster.device.model_copy(update=compiled)
    found = replace(found, cluster=cluster.model_copy(update={"device": device}))
    return _with_kernel(found, found.kernel.model_copy(update={"block": stack.tile, "source": stack.note}))


def _with_kernel(m: Machine, kernel: hardware.Kernel) -> Machine:
    device = m.cluster.device.model_copy(update={"attention": {**m.cluster.device.attention, m.dtype: kernel}})
    return replace(m, cluster=m.cluster.model_copy(update={"device": device}))


def _with_attention(m: Machine, flops_per_s: float) -> Machine:
    ratio = flops_per_s / m.kernel.forward.flops_per_s
    rates = {"forward": m.kernel.forward, "backward": m.kernel.backward}
    scaled = {name: rate.model_copy(update={"flops_per_s": rate.flops_per_s * ratio}) for name, rate in rates.items()}
    return _with_kernel(m, m.kernel.model_copy(update=scaled))


def _on(m: Machine, **changes: Any) -> Machine:
    return replace(m, cluster=hardware.override(m.cluster, **changes))


def _exchange(m: Machine) -> hardware.Link:
    return m.cluster.inter.of("exchange")


def _with_exchange(m: Machine, bytes_per_s: float) -> Machine:
    link = _exchange(m).model_dump() | {"bytes_per_s": bytes_per_s, "verbs": {}}
    return _on(m, inter={"verbs": {"exchange": link}})


def _link(name: Literal["intra", "inter"], label: str) -> Parameter:
    return Parameter(
        label=f"{label}, one direction",
        scale=1e9,
        unit="GB/s",
        of=lambda m: getattr(m.cluster, name).bytes_per_s,
        put=lambda m, x: _on(m, **{name: {"bytes_per_s": x}}),
    )


PARAMETERS: dict[str, Parameter] = {
    "intra.bytes_per_s": _link("intra", "a device inside a node"),
    "inter.bytes_per_s": _link("inter", "a network card"),
    "exchange": Parameter(
        "a network card, sends and receives alone", 1e9, "GB/s", lambda m: _exchange(m).bytes_per_s, _with_exchange
    ),
    "attention": Parameter(
        label="attention's forward, and its backward in proportion",
        scale=1e12,
        unit="TFLOP/s",
        of=lambda m: m.kernel.forward.flops_per_s,
        put=_with_attention,
    ),
    "device.memory_bytes_per_s": Parameter(
        label="memory, as the operations beside kernels use it",
        scale=1e9,
        unit="GB/s",
        of=lambda m: m.cluster.device.memory_bytes_per_s,
        put=lambda m, x: _on(m, device={"memory_bytes_per_s": x}),
    ),
}
SHARED = (
    Shared(
        "all links",
        ("intra.bytes_per_s", "inter.bytes_per_s", "exchange"),
        (0.5, 1.0),
        "of what benchmarks of one kind of message at a time reach; half of it beside kernels and other messages",
    ),
    Shared(
        "memory, as the operations beside kernels use it",
        ("device.memory_bytes_per_s",),
        (0.25, 1.0),
        "torch operations take up to four passes where ours take one",
    ),
)
