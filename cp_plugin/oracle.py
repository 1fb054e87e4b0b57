"""The oracle: plain attention on one device in float64, by torch's autograd, and how far a result is from it.

It uses nothing of this package but the description of a problem: no kernel, no tiles, no layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.problem import Problem

TENSORS = ("out", "dq", "dk", "dv")


class Case(NamedTuple):
    """Inputs of one problem and the right answer: whole sequences, on the CPU."""

    inputs: tuple[Tensor, ...]
    """q, k, v, dout in the problem's dtype."""
    want: tuple[Tensor, ...]
    """out, dq, dk, dv in float64, for the inputs as rounded to that dtype."""


def make_case(problem: Problem) -> Case:
    """Random inputs, the same on every call, and their reference."""
    generator = torch.Generator().manual_seed(0)
    q, k = (problem.heads, problem.head_dim), (problem.kv_heads, problem.head_dim)
    v, dout = (problem.kv_heads, problem.v_head_dim), (problem.heads, problem.v_head_dim)
    tokens = (problem.seq_length, problem.batch)
    inputs = tuple(
        torch.randn(*tokens, *heads, generator=generator, dtype=torch.float64).to(problem.dtype)
        for heads in (q, k, v, dout)
    )
    return Case(inputs, reference(*inputs, causal=problem.causal))


def reference(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    """out, dq, dk, dv ``[s, b, heads, size]`` in float64: whole score matrices, one query head at a time.

    Args:
        q, k, v, dout: the whole sequence; shapes as in ``cp_plugin.protocol``.
        causal: a token sees the tokens up to and including itself; otherwise all.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    hidden = torch.ones(q.size(0), k.size(0), dtype=torch.bool).triu(1)
    repeat, outs = q.size(2) // k.size(2), []
    for head in range(q.size(2)):
        scores = torch.einsum("qbd,kbd->bqk", q[:, :, head], k[:, :, head // repeat]) * q.size(3) ** -0.5
        weights = (scores.masked_fill(hidden, -torch.inf) if causal else scores).softmax(-1)
        out = torch.einsum("bqk,kbe->qbe", weights, v[:, :, head // repeat])
        out.backward(dout[:, :, head].double())
        outs.append(out.detach())
    return torch.stack(outs, 2), *(x.grad for x in (q, k, v))


def relative_errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> dict[str, float]:
    """||got - want|| / ||want|| of each tensor; infinite where ``got`` is not finite, or has another shape."""
    found = {}
    for name, a, b in zip(TENSORS, got, want, strict=True):
        error = ((a.detach().cpu().double() - b).norm() / b.norm()).item() if a.shape == b.shape else torch.inf
        found[name] = error if error == error else torch.inf
    return found
