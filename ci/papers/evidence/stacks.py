"""Machines and software on which figures were measured (``Stack``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.hardware import Cluster


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


def machine(stack: Stack) -> Machine:
    """The machine of a stack."""
    return _machine(stack.model_dump_json())


@cache
def _machine(stack_json: str) -> Machine:
    stack = Stack.model_validate_json(stack_json)
    cluster, dtype = hardware.override(hardware.cluster(stack.base), **stack.override), stack.attention_dtype
    if stack.tile is None:
        return Machine(cluster, dtype)
    kernel = cluster.device.attention[dtype].model_copy(update={"block": stack.tile, "source": stack.note})
    changes = {  # a program of XLA: no blocks, no host
        "processors": 0, "host_launch_s": 0.0, "host_post_s": 0.0,
        "attention": {**cluster.device.attention, dtype: kernel},
    }  # fmt: skip
    device = cluster.device.model_copy(update=changes)
    return Machine(cluster.model_copy(update={"device": device}), dtype, visits_all_tiles=True)
