"""One case on rank threads of one device, one call of the same kernel on one rank, and the answer in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from cases import IN_FP8, Case, Shape, Sort, sorts
from cp_kernels.visible import View
from torch import Tensor

from cp_plugin import ContextParallel
from cp_plugin.attention import calls
from cp_plugin.comm import Mesh, run_threads
from cp_plugin.kernels.backends.triton import Triton
from cp_plugin.methods import fp8
from cp_plugin.methods import registry as providers

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/kernels"))
import brute
from brute import Inputs
from interpreter import one_at_a_time

TENSORS = ("out", "dq", "dk", "dv")
EXACT = 1e-5
"""The largest relative error in float32."""
TWICE = 2.0
"""In half precision: over the error of one call of the same kernel on one rank."""


class Refused(Exception):
    """A provider says that it does not do this."""


def errors(case: Case, device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """Relative error (norm) of out, dq, dk and dv, and how large each may be.

    Raises:
        Refused: for what the provider does not do; the message says why.
    """
    settled = providers.settle(case.provider, case.problem, case.options)
    reason = providers.unsupported(settled.provider, case.problem, settled.options)
    if reason is not None:
        raise Refused(reason)
    x, sort = inputs(case.shape, device), sorts(case.shape.tokens)[case.sort]
    options = {"layout": case.layout, "backend": case.backend, "fp8": case.fp8}

    def rank(mesh: Mesh) -> tuple[Tensor, ...]:
        cp = ContextParallel(case.provider, mesh=mesh, problem=case.problem, **options)
        shards = Inputs(*(cp.shard(y) for y in x))
        return tuple(cp.unshard(y) for y in attend(cp, shards, sort))

    got = run_threads(rank, settled.axes, patience=100)[0]
    return relative(got, answer(case.shape, sort, device)), limits(case.shape, sort, case.backend, case.fp8, device)


def attend(cp: ContextParallel, x: Inputs, sort: Sort) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of this rank's tokens, without autograd, which has one thread for a device."""
    q, k, v, dout = x
    problem = cp.problem(q, k, v, causal=sort.causal)
    problem = replace(problem, window=sort.window, documents=bool(sort.documents))
    method = cp.method(problem, q.device, q.size(3) ** -0.5, sort.mask)
    return calls.of_method(method, q, k, v, dout)


@lru_cache(maxsize=8)
def inputs(shape: Shape, device: torch.device) -> Inputs:
    """q, k, v and dout of the whole sequence."""
    whole = ((range(shape.tokens),),) * 2
    sizes, heads = (shape.head_dim, shape.v_head_dim), (shape.heads, shape.kv_heads)
    x = Inputs.random(*whole, sizes=sizes, heads=heads, dtype=shape.dtype)
    return Inputs(*(y.to(device) for y in x))


@lru_cache(maxsize=32)
def answer(shape: Shape, sort: Sort, device: torch.device) -> tuple[Tensor, ...]:
    """out, dq, dk, dv in float64, by the definition."""
    rows, mask = (range(shape.tokens),), sort.mask
    view = View(*mask)
    found = brute.answer(inputs(shape, device), rows, rows, view, shape.head_dim**-0.5)
    return found.out, found.dq, found.dk, found.dv


@lru_cache(maxsize=64)
def limits(shape: Shape, sort: Sort, backend: str, sent: str | None, device: torch.device) -> dict[str, float]:
    """The largest error allowed of each tensor; with FP8 payloads, that of a call on what has been sent once."""
    if shape.dtype == torch.float32:
        return dict.fromkeys(TENSORS, EXACT)
    rounded: Callable[[Tensor], Tensor] = fp8.four_bits if sent else torch.clone
    x = Inputs(*map(rounded, inputs(shape, device)))
    one = ContextParallel("ring", backend=backend, fp8=sent if backend in IN_FP8 else None)
    got = attend(one, x, sort)
    found = relative(tuple(map(rounded, got)), answer(shape, sort, device))
    return {name: TWICE * error for name, error in found.items()}


def relative(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> dict[str, float]:
    """||got - want|| / ||want|| of each tensor; infinite where it is not finite, or has another shape."""
    found = {}
    for name, a, b in zip(TENSORS, got, want, strict=True):
        error = ((a.double() - b).norm() / b.norm()).item() if a.shape == b.shape else torch.inf
        found[name] = error if error == error else torch.inf
    return found


def interpret_one_at_a_time() -> None:
    """For ranks that are threads under TRITON_INTERPRET=1: Triton's interpreter knows one thread."""
    one_at_a_time(Triton, ("attend", "gradients"))
