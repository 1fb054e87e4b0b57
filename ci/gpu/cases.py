"""Which calls of which providers are checked: backends, layouts, masks, heads and dtypes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from cp_plugin.core.mask import Mask, Window
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.kernels import backends
from cp_plugin.methods import registry as providers

IN_FP8 = ("float8", "te_fp8")
ONLY_A_REFERENCE = "it is what others are compared with: plain torch, one score matrix after the other"


class Sort(NamedTuple):
    """A mask, as callers give it."""

    causal: bool = True
    window: Window | None = None
    documents: tuple[int, ...] = ()

    @property
    def mask(self) -> Mask:
        return Mask.of(self.causal, self.window, self.documents)


class Shape(NamedTuple):
    """Of one call, over all ranks."""

    size: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        sizes = f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"
        return f"heads {self.heads}:{self.kv_heads} of {sizes}, {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of one provider, forward and backward."""

    provider: str
    layout: str
    sort: str
    shape: Shape
    backend: str
    fp8: str | None = None

    @property
    def group(self) -> str:
        return f"backend {self.backend}" + (f", --cp-fp8 {self.fp8}" if self.fp8 else "")

    def __str__(self) -> str:
        return f"{self.provider} on {self.layout}, {self.sort}, {self.shape}"

    @property
    def options(self) -> Options:
        return Options(layout=self.layout, backend=self.backend, fp8=self.fp8)

    @property
    def problem(self) -> Problem:
        shape, sort = self.shape, sorts(self.shape.tokens)[self.sort]
        return problem_of(shape, sort)


def problem_of(shape: Shape, sort: Sort) -> Problem:
    """The attention call."""
    return Problem(
        size=shape.size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        seq_length=shape.tokens,
        dtype=shape.dtype,
        causal=sort.causal,
        window=sort.window,
        documents=bool(sort.documents),
    )


def sorts(tokens: int) -> dict[str, Sort]:
    """The masks; windows and documents end anywhere."""
    cuts = (0, tokens // 9, tokens // 9 + 1, tokens // 2 + 3, tokens)
    return {
        "causal": Sort(),
        "documents": Sort(documents=cuts),
        "full": Sort(causal=False),
        "window": Sort(window=(tokens // 7, 0)),
        "documents and window": Sort(window=(tokens // 7, 0), documents=cuts),
    }


def possible(device: torch.device) -> dict[str, str]:
    """Backend -> "" if it runs here, or the reason why not."""
    found = {"auto": ""}
    for name in backends.names()[1:]:
        reason = backends.get(name).unsupported(device, torch.bfloat16, 128, 128)
        found[name] = ONLY_A_REFERENCE if name == "reference" else reason or ""
    return found


def cases(device: torch.device, *, smoke: bool) -> list[Case]:
    """All cases for the backends that run here, the most important ones first."""
    names = [name for name, reason in possible(device).items() if not reason]
    if smoke:
        return _for_smoke()
    mha = Shape(4, 1024, 16, 16, 128, 128, torch.bfloat16)
    gqa, mla = mha._replace(kv_heads=4), mha._replace(head_dim=192)
    found: list[Case] = []
    for backend in names:
        fp8 = "compute" if backend in IN_FP8 else None
        for shape in (gqa, mha):
            found += _all(backend, shape, ("causal", "full", "window", "documents"), fp8=fp8)
        found += _all(backend, gqa, ("causal", "documents"), fp8=fp8, others=True)
        if backend in ("auto", "triton"):
            found += _all(backend, gqa._replace(dtype=torch.float16), ("causal", "documents and window"))
        if backends_take(backend, device, mla):
            found += _all(backend, mla, ("causal", "documents"), fp8=fp8)
    found += _all("auto", gqa, ("causal", "documents"), fp8="comm")
    return found


def backends_take(name: str, device: torch.device, shape: Shape) -> bool:
    """Whether a backend has kernels for these heads."""
    if name == "auto":
        return True
    return backends.get(name).unsupported(device, shape.dtype, shape.head_dim, shape.v_head_dim) is None


def _for_smoke() -> list[Case]:
    tiny = Shape(2, 32, 2, 1, 16, 16, torch.float32)
    found = _all("sdpa", tiny, ("causal",)) + _all("sdpa", tiny, ("documents and window",), others=True)[:4]
    both = ("causal", "documents and window")
    found += [case for case in _all("triton", tiny, both) if case.provider in ("ring", "attention2d")]
    half = tiny._replace(dtype=torch.bfloat16, kv_heads=2, tokens=64)
    found += [case for case in _all("float8", half, ("causal",), fp8="compute") if case.provider == "ring"]
    return found + [case for case in _all("auto", half, ("causal",), fp8="comm") if case.provider == "all_gather"]


def _all(
    backend: str, shape: Shape, masks: tuple[str, ...], *, fp8: str | None = None, others: bool = False
) -> list[Case]:
    """Every provider on its default layout, or on the others that balance the work."""
    found = []
    for name in providers.names():
        first, *rest = providers.get(name).layouts
        for layout in [x for x in rest if x in ("zigzag", "striped")] if others else [first]:
            one = Case(provider=name, layout=layout, sort="", shape=shape, backend=backend, fp8=fp8)
            found += [replace(one, sort=sort) for sort in masks]
    return found
