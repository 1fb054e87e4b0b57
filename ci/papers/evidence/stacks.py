"""The machines and the software that figures were measured on (``Stack``), and what may be fitted there.

A fitted parameter is a physical quantity of the machine or of its software, in SI units; it holds for all rows of that
machine. Outside of what is plausible, its value is printed with a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from cp_plugin.planner import hardware
from cp_plugin.planner.hardware import Cluster
from cp_plugin.planner.names import find

MOST_FITTED = 2
"""Parameters of one machine."""
HOST_BYTES_PER_S = 100e9
"""An assumption: a quarter of two sockets' 410 GB/s."""


class Fit(BaseModel):
    """A parameter that is fitted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameter: str
    """A name in ``PARAMETERS``."""
    range: tuple[float, float]
    """Where it is looked for."""
    plausible: tuple[float, float]
    """What the hardware and the software allow."""
    why: str
    """What the plausible range follows from."""

    @model_validator(mode="after")
    def _known(self) -> Fit:
        find("parameter", self.parameter, PARAMETERS)
        return self


class Stack(BaseModel):
    """A cluster and the software on it, as far as they are known."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str
    """A packaged cluster."""
    override: dict[str, Any] = {}
    """What differs from it."""
    note: str
    """What is known, and what is assumed."""
    attention_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of attention's products and of the keys and values that travel."""
    tile: tuple[int, int] | None = None
    """Queries and keys of the tiles of an attention that visits all tiles, and skips what is masked whole."""
    training: dict[str, Any] = {}
    """Fields of ``cp_plugin.planner.parallel.Parallel``."""
    fit: tuple[Fit, ...] = ()

    @model_validator(mode="after")
    def _few(self) -> Stack:
        if len(self.fit) > MOST_FITTED:
            raise ValueError(f"{len(self.fit)} parameters to fit on {self.base}: at most {MOST_FITTED}")
        return self


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster with values for the fitted parameters, and those of the software."""

    cluster: Cluster
    step_s: float = 0.0
    """Seconds of a training step that nothing else accounts for."""
    skipped_tile: float = 0.0
    """Time of a tile that is skipped, over that of one that is computed."""
    host_bytes_per_s: float = HOST_BYTES_PER_S
    """Of a node's own memory, where its optimizer runs."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """What can be fitted."""

    label: str
    scale: float
    unit: str
    """Shown value = value / scale, in this unit."""
    of: Callable[[Machine, str], float]
    """Its value before fitting; the string is attention's dtype."""
    put: Callable[[Machine, str, float], Machine]

    def shown(self, value: float) -> str:
        """With its unit."""
        number = value / self.scale
        return f"{number:,.0f} {self.unit}" if number >= 1000 else f"{number:.3g} {self.unit}".strip()


def machine(stack: Stack, values: tuple[float, ...] = ()) -> Machine:
    """The stack with these values for its fitted parameters; without any, as it was assumed."""
    found = _unfitted(stack.model_dump_json())
    for fit, value in zip(stack.fit, values, strict=bool(values)):
        found = PARAMETERS[fit.parameter].put(found, stack.attention_dtype, value)
    return found


def assumed(stack: Stack) -> tuple[float, ...]:
    """The values of the fitted parameters before fitting, moved into their ranges."""
    before = machine(stack)
    values = (PARAMETERS[fit.parameter].of(before, stack.attention_dtype) for fit in stack.fit)
    return tuple(min(max(value, fit.range[0]), fit.range[1]) for fit, value in zip(stack.fit, values, strict=True))


@cache
def _unfitted(stack_json: str) -> Machine:
    stack = Stack.model_validate_json(stack_json)
    cluster = hardware.override(hardware.cluster(stack.base), **stack.override)
    if stack.tile is not None:
        kernel = cluster.device.attention[stack.attention_dtype]
        fused = kernel.model_copy(update={"block": stack.tile, "source": stack.note})
        cluster = _with_kernel(cluster, stack.attention_dtype, fused)
        compiled = {"processors": 0, "host_launch_s": 0.0, "host_post_s": 0.0}  # a program of XLA: no blocks, no host
        cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update=compiled)})
    return Machine(cluster)


def _link(name: Literal["intra", "inter"]) -> Parameter:
    return Parameter(
        label=f"{'a device inside a node' if name == 'intra' else 'a network card'}, one direction",
        scale=1e9,
        unit="GB/s",
        of=lambda m, dtype: getattr(m.cluster, name).bytes_per_s,
        put=lambda m, dtype, x: _on(m, **{name: {"bytes_per_s": x}}),
    )


def _with_attention(m: Machine, dtype: str, flops_per_s: float) -> Machine:
    kernel = m.cluster.device.attention[dtype]
    ratio = flops_per_s / kernel.forward.flops_per_s
    scaled = {
        "forward": kernel.forward.model_copy(update={"flops_per_s": flops_per_s}),
        "backward": kernel.backward.model_copy(update={"flops_per_s": kernel.backward.flops_per_s * ratio}),
    }
    return replace(m, cluster=_with_kernel(m.cluster, dtype, kernel.model_copy(update=scaled)))


def _with_kernel(cluster: Cluster, dtype: str, kernel: hardware.Kernel) -> Cluster:
    device = cluster.device.model_copy(update={"attention": {**cluster.device.attention, dtype: kernel}})
    return cluster.model_copy(update={"device": device})


def _on(m: Machine, **changes: Any) -> Machine:
    return replace(m, cluster=hardware.override(m.cluster, **changes))


def _own(name: str, label: str, scale: float, unit: str, assumed: float) -> Parameter:
    """A field of ``Machine``."""
    return Parameter(label, scale, unit, lambda m, dtype: assumed, lambda m, dtype, x: replace(m, **{name: x}))


PARAMETERS: dict[str, Parameter] = {
    "intra.bytes_per_s": _link("intra"),
    "inter.bytes_per_s": _link("inter"),
    "attention": Parameter(
        label="attention's forward, and its backward in proportion",
        scale=1e12,
        unit="TFLOP/s",
        of=lambda m, dtype: m.cluster.device.attention[dtype].forward.flops_per_s,
        put=_with_attention,
    ),
    "gemm": Parameter(
        label="products of matrices",
        scale=1e12,
        unit="TFLOP/s",
        of=lambda m, dtype: m.cluster.device.gemm_flops_per_s["bfloat16"],
        put=lambda m, dtype, x: _on(m, device={"gemm_flops_per_s": {"bfloat16": x}}),
    ),
    "device.memory_bytes_per_s": Parameter(
        label="memory, as the operations beside kernels use it",
        scale=1e9,
        unit="GB/s",
        of=lambda m, dtype: m.cluster.device.memory_bytes_per_s,
        put=lambda m, dtype, x: _on(m, device={"memory_bytes_per_s": x}),
    ),
    "step_s": _own("step_s", "every step, beside everything else", 1, "s", 0.1),
    "skipped_tile": _own("skipped_tile", "a skipped tile, over a computed one", 1, "", 0.1),
    "host_bytes_per_s": _own(
        "host_bytes_per_s", "a node's own memory, in Adam on the host", 1e9, "GB/s", HOST_BYTES_PER_S
    ),
}
