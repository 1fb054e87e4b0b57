"""Kernel backends: attention of one tile or block on one device, unaware of ranks and layouts.

A backend is an object with the ``Backend`` or ``BlockBackend`` interface: ``BACKEND`` of a module here, or a third
party's, registered in its pyproject:

    [project.entry-points."cp_plugin.backends"]
    mykernel = "my_package.my_module:BACKEND"

Optional libraries are imported inside their own backend module, when it is chosen.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from functools import cache
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from cp_plugin.engine.common.names import not_one_of
from cp_plugin.engine.common.plugins import with_entry_points
from cp_plugin.engine.core.block import Block, Scores
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.core.spelling import spelled
from cp_plugin.engine.core.values import NO_SUMS, Gradients, KeyValues, Partial, Queries, Sums
from cp_plugin.engine.kernels.backends import devices


@runtime_checkable
class Backend(Protocol):
    """Attention of one tile. Shapes as in ``methods.protocol``; inputs may be strided views with a dense last
    dimension.

    ``diagonal``: query row m sees the keys 0 .. m + diagonal of the tile (``engine.core.tiles``).
    """

    name: str
    any_diagonal: bool
    """False: only full tiles, and square ones with diagonal 0."""

    def unsupported(self, call: CallInfo) -> str | None:
        """Return why it cannot run such a call here, or None."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, diagonal: int, scores: Scores) -> tuple[Tensor, Tensor]:
        """``out [s, b, h, e]`` in q's dtype and ``lse [s, b, h]`` in float32 (float64 for float64 inputs)."""
        ...

    def row_term(self, dout: Tensor, delta: Tensor) -> Tensor:
        """Return what the backward pass needs besides lse: ``delta``, or an ``out`` that gives the same delta.

        Called once per query block; tiles slice its rows.
        """
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, term: Tensor, diagonal: int, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dq, dk, dv`` of the tile, given each row's lse over *all* its keys."""
        ...


class BlockKernel(Protocol):
    """Attention of one block on one device, as in ``methods.protocol.Attend``."""

    def forward(self, queries: Queries, kv: KeyValues, block: Block, onto: Partial | None = None) -> Partial | None: ...

    def backward(self, queries: Queries, kv: KeyValues, block: Block, onto: Sums = NO_SUMS) -> Gradients | None: ...


class BlockBackend(BlockKernel, Protocol):
    """Attention of a whole block: any positions, any mask but a tree.

    A running ``onto`` has out in the dtype of lse, and both may be updated in place.
    """

    name: str

    def unsupported(self, call: CallInfo) -> str | None:
        """Return why it cannot run such a call here, or None."""
        ...


AnyBackend = Backend | BlockBackend
ENTRY_POINTS = "cp_plugin.backends"
OURS = "triton"
"""The plugin's own kernel, for blocks that are not a few large tiles."""


class Traits(NamedTuple):
    """Optional attributes of a backend."""

    packages: tuple[str, ...] = ()
    """Distributions that provide it."""
    in_fp8: bool = False
    """Whether it computes in FP8 (``--cp-fp8 compute`` only); it then has a field ``scaling``."""
    oracle: bool = False
    """Whether it is a slow reference."""
    caps: bool = False
    """Whether it can cap scores (``Scores.softcap``)."""

    @classmethod
    def from_backend(cls, backend: AnyBackend) -> Traits:
        return cls(**{name: getattr(backend, name) for name in cls._fields if hasattr(backend, name)})


def refusal(backend: AnyBackend, call: CallInfo) -> str | None:
    """Return why the backend cannot run such a call here, or None."""
    if call.softcap and not Traits.from_backend(backend).caps:
        return "it does not cap scores (softcap)"
    return backend.unsupported(call)


def fp8_kernels() -> list[str]:
    """Names of the FP8 backends, the default first."""
    return [name for name, backend in _backends().items() if Traits.from_backend(backend).in_fp8]


def names() -> list[str]:
    """Names accepted by ``--cp-backend``."""
    return ["auto", *_backends()]


def get(name: str) -> AnyBackend:
    """The backend of that name (not ``auto``, see ``choose``); ValueError, which lists the valid ones, for another."""
    if name not in _backends():
        raise ValueError(not_one_of(spelled("backend", name), name, names()))
    return _backends()[name]


def check_name(name: str) -> None:
    """ValueError for a name that ``--cp-backend`` does not accept."""
    if name != "auto":
        get(name)


def choose(name: str, call: CallInfo, *, plans: bool = True) -> tuple[AnyBackend, str]:
    """The backend for such a call, and why it was chosen; ValueError, with those that can, if the one requested cannot
    run them. plans: False: ``auto`` takes none of ``devices.PLANS_EACH_SHAPE``."""
    if name != "auto":
        backend = get(name)
        reason = refusal(backend, call)
        if reason is not None:
            other, _ = choose("auto", call)
            raise ValueError(
                f"{spelled('backend', name)} cannot run here: {reason}; use {spelled('backend', other.name, 'auto')}"
            )
        return backend, "requested"
    reasons: list[str] = []
    where, preferred = _order(call.device)
    for title, backend in preferred:
        reason = refusal(backend, call)
        if reason is None and not plans and backend.name in devices.PLANS_EACH_SHAPE:
            reason = "it would build a plan for each new shape"
        if reason is None:
            first = f"first choice for {call.dtype} on {where}"
            return backend, f"{title} on {where}; not {'; not '.join(reasons)}" if reasons else first
        reasons.append(f"{title}: {reason}")
    what = f"{call.dtype}, head size {call.head_dim}{', capped scores' * call.softcap}, on {call.device}"
    raise ValueError(f"no attention kernel for {what}: {'; '.join(reasons)}")


def _order(device: torch.device) -> tuple[str, list[tuple[str, AnyBackend]]]:
    """A description of the device, and the backends that ``auto`` tries on it, best first, with titles."""
    if device.type != "cuda":
        return device.type, [(name, get(name)) for name in devices.ELSEWHERE]
    capability = torch.cuda.get_device_capability(device)
    family, order = devices.family(capability), []
    for candidate in family.order:
        backend = get(candidate.backend)
        if candidate.generation is not None:
            backend = replace(backend, generation=candidate.generation)  # type: ignore[type-var]
        order.append((candidate.title, backend))
    return f"{family.title} (compute capability {'.'.join(map(str, capability))})", order


@cache
def _backends() -> dict[str, AnyBackend]:
    """name -> backend: modules of this folder (references last), then entry points; ValueError if two share a name, or
    an entry point does not load a backend."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    built_in = [module.BACKEND for module in modules if hasattr(module, "BACKEND")]
    return with_entry_points(
        ENTRY_POINTS,
        sorted(built_in, key=lambda b: (Traits.from_backend(b).oracle, b.name)),
        fits=lambda b: hasattr(b, "unsupported") and hasattr(b, "forward"),
        one="a cp_plugin attention kernel",
        many="attention kernels",
        reserved=("auto",),
    )
