"""The oracle: plain attention on one device in float64, by torch's autograd, and how far a result is from it.

It uses nothing of this package but the description of a problem and its inputs: no kernel, no tiles, no layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.attention.calls import Inputs, shapes
from cp_plugin.core.problem import Problem
from cp_plugin.methods.protocol import Kind

TENSORS = ("out", "dq", "dk", "dv", "dlog_decay")
"""What is compared; the last where a decay belongs to tokens."""


class Case(NamedTuple):
    """One attention call and the right answer: whole sequences, on the CPU."""

    inputs: Inputs
    """In the problem's dtype; the decay in float64."""
    want: tuple[Tensor, ...]
    """In float64, for the inputs as rounded to that dtype: see ``TENSORS``."""
    problem: Problem
    documents: tuple[int, ...] = ()
    """Where the documents begin, and the length of the sequence; empty: one document."""

    @property
    def cu_seqlens(self) -> Tensor | None:
        """For ``ContextParallel.attention``."""
        return torch.tensor(self.documents) if self.documents else None


def make_case(problem: Problem, kind: Kind = "softmax", documents: tuple[int, ...] = ()) -> Case:
    """Random inputs, the same on every call, and their reference."""
    x = make_inputs(problem)
    if kind == "softmax":
        want = reference(*x[:4], causal=problem.causal, seen=seen(problem, documents))
    else:
        parts = [
            linear_reference(Inputs(*(y if y is None or y.dim() == 1 else y[start:end] for y in x)), problem)
            for start, end in pairwise(documents or (0, problem.seq_length))
        ]
        want = tuple(torch.cat(of_documents) for of_documents in zip(*parts, strict=True))
    return Case(x, want, problem, documents)


def make_inputs(problem: Problem) -> Inputs:
    """Random inputs, the same on every call: in the problem's dtype, the decay in float64."""
    generator = torch.Generator().manual_seed(0)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    q, k, v, dout, decay = (None if y is None else normal(y) for y in shapes(problem, problem.seq_length))
    return Inputs(*(y.to(problem.dtype) for y in (q, k, v, dout)), None if decay is None else -decay.abs())


def seen(problem: Problem, documents: tuple[int, ...] = ()) -> Tensor:
    """Which keys each query sees, by window and documents: bool ``[s, s]``."""
    position = torch.arange(problem.seq_length)
    before = position.unsqueeze(1) - position
    left, right = problem.window or (-1, -1)
    found = torch.ones_like(before, dtype=torch.bool)
    if left >= 0:
        found &= before <= left
    if right >= 0:
        found &= -before <= right
    for start, end in pairwise(documents):
        inside = (position >= start) & (position < end)
        found &= inside.unsqueeze(1) == inside
    return found


def reference(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool, seen: Tensor | None = None
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv ``[s, b, heads, size]`` in float64: whole score matrices, one query head at a time.

    Args:
        q, k, v, dout: the whole sequence; shapes as in ``cp_plugin.methods.protocol``.
        causal: a token sees the tokens up to and including itself; otherwise all.
        seen: bool ``[s, s]``: which keys each query may see besides; None: all.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    hidden = torch.ones(q.size(0), k.size(0), dtype=torch.bool).triu(1) & causal
    if seen is not None:
        hidden |= ~seen
    repeat, outs = q.size(2) // k.size(2), []
    for head in range(q.size(2)):
        scores = torch.einsum("qbd,kbd->bqk", q[:, :, head], k[:, :, head // repeat]) * q.size(3) ** -0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out = torch.einsum("bqk,kbe->qbe", weights, v[:, :, head // repeat])
        out.backward(dout[:, :, head].double())
        outs.append(out.detach())
    return torch.stack(outs, 2), *(x.grad for x in (q, k, v))


def linear_reference(inputs: Inputs, problem: Problem) -> tuple[Tensor, ...]:
    """out, dq, dk, dv and, where the decay belongs to tokens, its gradient: one token after the other in float64.

    Without a causal mask also from the last token back, where each token itself is not counted again.
    """
    q, k, v = (y.detach().double().requires_grad_() for y in inputs[:3])
    decay = torch.zeros(()).double() if inputs.log_decay is None else inputs.log_decay.detach().requires_grad_()
    shape = {"none": (1, 1, 1, 1), "head": (1, 1, -1, 1), "token": (*k.shape[:3], 1), "key": k.shape}[problem.decay]
    kept = decay.reshape(shape).expand(k.shape).exp().unsqueeze(4)
    repeat = q.size(2) // k.size(2)
    added = k.unsqueeze(4) * v.unsqueeze(3)

    def read(state: Tensor, token: int) -> Tensor:
        return torch.einsum("bhd,bhde->bhe", q[token], state.repeat_interleave(repeat, 1))

    outs, state = [], torch.zeros_like(added[0])
    for token in range(q.size(0)):
        state = kept[token] * state + added[token]
        outs.append(read(state, token))
    if not problem.causal:
        state = torch.zeros_like(added[0])
        for token in reversed(range(q.size(0))):
            state = kept[token] * state
            outs[token] = outs[token] + read(state, token)
            state = state + added[token]
    out = torch.stack(outs)
    leaves = (q, k, v, decay) if problem.decay in ("token", "key") else (q, k, v)
    return out.detach(), *torch.autograd.grad(out, leaves, inputs.dout.double())


def relative_errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> dict[str, float]:
    """||got - want|| / ||want|| of each tensor; infinite where ``got`` is not finite, or has another shape."""
    found = {}
    for name, a, b in zip(TENSORS[: len(want)], got, want, strict=True):
        error = ((a.detach().cpu().double() - b).norm() / b.norm()).item() if a.shape == b.shape else torch.inf
        found[name] = error if error == error else torch.inf
    return found
