"""Which calls of which providers are checked: backends, layouts, masks, heads and dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from cp_plugin.attention.setups import Setup, settled_or_reason
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.kernels import backends
from cp_plugin.methods import registry as providers

IN_FP8 = ("float8", "te_fp8")
ONLY_A_REFERENCE = "it is what others are compared with: plain torch, one score matrix after the other"
USUAL = Problem(size=1)


class Case(NamedTuple):
    """One call of one provider, forward and backward; the provider by its name, as it is sent to other processes."""

    provider: str
    options: Options
    problem: Problem
    documents: tuple[int, ...]
    mask: str
    """In words, as in ``masked``."""

    @property
    def setup(self) -> Setup:
        return settled_or_reason(providers.get(self.provider), self.problem, self.options)

    @property
    def group(self) -> str:
        fp8 = self.options.fp8
        return f"backend {self.options.backend}" + (f", --cp-fp8 {fp8}" if fp8 else "")

    def __str__(self) -> str:
        return f"{self.provider} on {self.options.layout}, {self.mask}, {heads(self.problem)}"


def heads(problem: Problem) -> str:
    """``heads 16:4 of 192/128, bfloat16``."""
    d, e = problem.head_dim, problem.v_head_dim
    sizes = f"{d}" if d == e else f"{d}/{e}"
    return f"heads {problem.heads}:{problem.kv_heads} of {sizes}, {str(problem.dtype).removeprefix('torch.')}"


def masked(problem: Problem, mask: str) -> tuple[Problem, tuple[int, ...]]:
    """The call with a mask, and the bounds of its documents; windows and documents end anywhere.

    Args:
        mask: ``causal``, ``full``, ``window``, ``documents`` or ``documents and window``.
    """
    s = problem.seq_length
    bounds = (0, s // 9, s // 9 + 1, s // 2 + 3, s) if "documents" in mask else ()
    window = (s // 7, 0) if "window" in mask else None
    return replace(problem, causal=mask != "full", window=window, documents=bool(bounds)), bounds


def lacking(backend: str, device: torch.device, problem: Problem = USUAL) -> str:
    """Why a backend cannot attend with such heads here, or nothing."""
    if backend == "auto":
        return ""
    if backend == "reference":
        return ONLY_A_REFERENCE
    sizes = problem.head_dim, problem.v_head_dim
    return backends.get(backend).unsupported(device, problem.dtype, *sizes) or ""


def possible(device: torch.device) -> dict[str, str]:
    """Backend -> "" if it runs here, or the reason why not."""
    return {name: lacking(name, device) for name in backends.names()}


def cases(device: torch.device, *, smoke: bool) -> list[Case]:
    """All cases for the backends that run here, the most important ones first."""
    if smoke:
        return _for_smoke()
    mha = Problem(size=4, seq_length=1024, heads=16, kv_heads=16)
    gqa, mla = replace(mha, kv_heads=4), replace(mha, head_dim=192)
    found: list[Case] = []
    for backend in (name for name, reason in possible(device).items() if not reason):
        options = Options(backend=backend, fp8="compute" if backend in IN_FP8 else None)
        for problem in (gqa, mha):
            found += _all(problem, options, ("causal", "full", "window", "documents"))
        found += _all(gqa, options, ("causal", "documents"), others=True)
        if backend in ("auto", "triton"):
            found += _all(replace(gqa, dtype=torch.float16), options, ("causal", "documents and window"))
        if not lacking(backend, device, mla):
            found += _all(mla, options, ("causal", "documents"))
    return found + _all(gqa, Options(fp8="comm"), ("causal", "documents"))


def _for_smoke() -> list[Case]:
    tiny = Problem(size=2, seq_length=32, heads=2, head_dim=16, dtype=torch.float32)
    half = replace(tiny, dtype=torch.bfloat16, kv_heads=2, seq_length=64)
    both = ("causal", "documents and window")
    return [
        *_all(tiny, Options(backend="sdpa"), both[:1]),
        *_all(tiny, Options(backend="sdpa"), both[1:], others=True)[:4],
        *_all(tiny, Options(backend="triton"), both, names=("ring", "attention2d")),
        *_all(half, Options(backend="float8", fp8="compute"), both[:1], names=("ring",)),
        *_all(half, Options(fp8="comm"), both[:1], names=("all_gather",)),
    ]


def _all(
    problem: Problem, options: Options, masks: Sequence[str], *, others: bool = False, names: Sequence[str] = ()
) -> list[Case]:
    """Providers, all where none is named, on their default layout, or on the others that balance the work."""
    found = []
    for name in names or providers.names():
        first, *rest = providers.get(name).layouts
        for layout in [x for x in rest if x in ("zigzag", "striped")] if others else [first]:
            found += [Case(name, replace(options, layout=layout), *masked(problem, mask), mask) for mask in masks]
    return found
