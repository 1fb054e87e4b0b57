"""The oracle: plain attention on one device in float64 by torch's autograd, and distances from it.

It shares no kernel, tile or layout with the package, only the description of a problem and its inputs. Scores are
computed in chunks, so that long sequences need no gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_plugin.engine.attention.calls import Inputs, shapes
from cp_plugin.engine.core.mask import Window
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods.protocol import Kind

TENSORS = ("out", "dq", "dk", "dv")
"""What is compared; under linear attention more, see ``tensors``."""
ELEMENTS = 1 << 24
"""Scores per chunk."""


class Case(NamedTuple):
    """An attention call and its right answer: whole sequences, on the CPU."""

    inputs: Inputs
    """In the problem's dtype; the decay in float64."""
    want: tuple[Tensor, ...]
    """In float64, for the rounded inputs: see ``tensors``."""
    problem: Problem


def make_case(problem: Problem, kind: Kind = "softmax") -> Case:
    """Deterministic random inputs and their answer."""
    inputs = make_inputs(problem)
    return Case(inputs, answer(inputs, problem, kind), problem)


def answer(inputs: Inputs, problem: Problem, kind: Kind = "softmax") -> tuple[Tensor, ...]:
    """The right answer, ``tensors``, for whole sequences; on their device."""
    if kind == "softmax":
        return softmax_reference(*inputs[:4], lambda rows: hidden_keys(problem, rows, inputs.q.device))
    documents = [
        linear_reference(Inputs(*(y if y is None or y.dim() == 1 else y[start:end] for y in inputs)), problem)
        for start, end in pairwise(problem.bounds or (0, problem.seq_length))
    ]
    return tuple(map(torch.cat, zip(*documents, strict=True)))


def make_inputs(problem: Problem) -> Inputs:
    """Deterministic random inputs in the problem's dtype, the decay in float64.

    Under the delta rule keys have a norm of 1, and beta is from 0 to 1.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    q, k, v, dout, decay, beta = (None if y is None else normal(y) for y in shapes(problem, problem.seq_length))
    if beta is not None:
        k, beta = torch.nn.functional.normalize(k, dim=3), beta.sigmoid().to(problem.dtype)
    return Inputs(*(y.to(problem.dtype) for y in (q, k, v, dout)), None if decay is None else -decay.abs(), beta)


def tensors(problem: Problem) -> tuple[str, ...]:
    """The names of ``Case.want``."""
    decay = ("dlog_decay",) if problem.decay in ("token", "key") else ()
    return (*TENSORS, *decay, *(("dbeta",) if problem.delta else ()))


def hidden_keys(problem: Problem, rows: slice, device: torch.device) -> Tensor:
    """Return True for keys that these queries do not see, by mask, window and documents: bool ``[rows, s]``."""
    position = torch.arange(problem.seq_length, device=device)
    hidden = not_seen(position[rows], position, problem.causal, problem.window)
    for start, end in pairwise(problem.bounds):
        inside = (position >= start) & (position < end)
        hidden |= inside[rows].unsqueeze(1) != inside
    return hidden


def not_seen(queries: Tensor, keys: Tensor, causal: bool, window: Window | None) -> Tensor:
    """Return True for keys (columns) that queries (rows) at these positions do not see: bool ``[q, k]``."""
    ahead = keys - queries[:, None]
    before, after = window or (-1, -1)
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal or after >= 0:
        hidden |= ahead > (0 if causal else after)
    if before >= 0:
        hidden |= ahead < -before
    return hidden


def softmax_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    hidden: Callable[[slice], Tensor],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, dq, dk, dv in float64, one key/value head and one chunk of queries at a time.

    Args:
        q, k, v, dout: the whole sequence; shapes as in ``engine.methods.protocol``.
        hidden: queries -> the keys that they do not see: bool ``[queries, s]``.
        scale: of the scores; default: 1 / sqrt(d).
        softcap: cap c of the scaled scores s, which become ``c * tanh(s / c)``.
        sink: ``[h]``: a score per query head that takes part in the softmax and has no value.
    """
    scale = q.size(3) ** -0.5 if scale is None else scale
    share = q.size(2) // k.size(2)
    sinks = [None] * k.size(2) if sink is None else sink.detach().double().split(share)
    heads = zip(q.split(share, 2), k.unbind(2), v.unbind(2), dout.split(share, 2), sinks, strict=True)
    by_head = (
        _differentiate(hidden, *(x.double() for x in tensors), scale=scale, softcap=softcap, sink=its_sink)
        for *tensors, its_sink in heads
    )
    out, dq, dk, dv = zip(*by_head, strict=True)
    return torch.cat(out, 2), torch.cat(dq, 2), torch.stack(dk, 2), torch.stack(dv, 2)


def _differentiate(
    hidden: Callable[[slice], Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **scores: Any
) -> list[Tensor]:
    """out and dq ``[s, b, h, ...]``, dk and dv ``[s, b, ...]`` of the query heads that share one key/value head."""
    outs, dqs, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
    size = max(1, ELEMENTS // (k.size(0) * q.size(1) * q.size(2)))
    for rows in (slice(first, first + size) for first in range(0, q.size(0), size)):
        with torch.enable_grad():
            leaves = [x.requires_grad_() for x in (q[rows].detach(), k.detach(), v.detach())]
            out = _attend(*leaves, hidden(rows), **scores)
            grads = torch.autograd.grad(out, leaves, dout[rows])
        outs.append(out.detach())
        dqs.append(grads[0])
        dk += grads[1]
        dv += grads[2]
    return [torch.cat(outs), torch.cat(dqs), dk, dv]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, *, scale: float, softcap: float | None, sink: Tensor | None
) -> Tensor:
    """q ``[rows, b, h, d]``, k ``[s, b, d]``, v ``[s, b, e]``, hidden ``[rows, s]``, sink ``[h]``."""
    scores = torch.einsum("qbhd,kbd->bhqk", q, k) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink[:, None, None].expand(*scores.shape[:3], 1)), -1)
    return torch.einsum("bhqk,kbe->qbhe", scores.softmax(-1)[..., : k.size(0)], v)


def linear_reference(inputs: Inputs, problem: Problem) -> tuple[Tensor, ...]:
    """out, dq, dk, dv and the gradients of a per-token decay and of beta: token by token in float64.

    Without a causal mask also from the last token back, not counting each token itself again.
    """
    q, k, v = (y.detach().double().requires_grad_() for y in inputs[:3])
    decay = torch.zeros(()).double() if inputs.log_decay is None else inputs.log_decay.detach().requires_grad_()
    shape = {"none": (1, 1, 1, 1), "head": (1, 1, -1, 1), "token": (*k.shape[:3], 1), "key": k.shape}[problem.decay]
    kept = decay.reshape(shape).expand(k.shape).exp().unsqueeze(4)
    repeat = q.size(2) // k.size(2)
    beta = None if inputs.beta is None else inputs.beta.detach().double().requires_grad_()
    added = (k.unsqueeze(4) * v.unsqueeze(3)).unbind()  # the gradient of an index would be a tensor of this size, each

    def read(state: Tensor, token: int) -> Tensor:
        return torch.einsum("bhd,bhde->bhe", q[token], state.repeat_interleave(repeat, 1))

    outs, state = [], torch.zeros_like(added[0])
    for token in range(q.size(0)):
        state = kept[token] * state
        if beta is None:
            state = state + added[token]
        else:
            lacking = v[token] - torch.einsum("bgd,bgde->bge", k[token], state)
            state = state + k[token].unsqueeze(3) * (beta[token].unsqueeze(2) * lacking).unsqueeze(2)
        outs.append(read(state, token))
    if not problem.causal:
        state = torch.zeros_like(added[0])
        for token in reversed(range(q.size(0))):
            state = kept[token] * state
            outs[token] = outs[token] + read(state, token)
            state = state + added[token]
    out = torch.stack(outs)
    leaves = [q, k, v, *([decay] if problem.decay in ("token", "key") else []), *([] if beta is None else [beta])]
    return out.detach(), *torch.autograd.grad(out, leaves, inputs.dout.double())


def relative_errors(got: Sequence[Tensor], want: Sequence[Tensor], names: Sequence[str] = TENSORS) -> dict[str, float]:
    """||got - want|| / ||want|| of each tensor; infinite if ``got`` is not finite or has another shape."""
    errors = {}
    for name, a, b in zip(names[: len(want)], got, want, strict=True):
        error = ((a.detach().cpu().double() - b).norm() / b.norm()).item() if a.shape == b.shape else torch.inf
        errors[name] = error if error == error else torch.inf
    return errors
