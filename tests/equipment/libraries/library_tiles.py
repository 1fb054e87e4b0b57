"""Tiles as methods pass them to a kernel: also strided, with merged log-sum-exps and row terms."""

from __future__ import annotations

import torch
from oracle import Case, Result, relative_error
from torch import Tensor

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.kernels.backends import Backend
from cp_plugin.engine.kernels.backends.reference import Reference


class OnCuda(Tensor):
    """A tensor of the CPU that claims to be on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def run(kernel: Backend, case: Case, size: float = 1.0, *, strided: bool = False, limit: float | None = None) -> Result:
    """A causal or full tile.

    Args:
        size: factor on dout; gradients are divided by it.
        strided: of every other row, with a log-sum-exp ``[s, b, h]``, dense.
        limit: of the log-sum-exp's error against the reference's.
    """
    q, k, v, dout = case.inputs()
    if strided:
        q, k, v, dout = (torch.stack((x, x.flip(0)), 1).flatten(0, 1)[::2] for x in (q, k, v, dout))
    diagonal, scores = 0 if case.causal else case.seq_length, Scores(case.head_dim**-0.5, case.softcap)
    out, lse = kernel.forward(q, k, v, diagonal, scores)
    wide = accumulation_dtype(case.dtype)
    assert out.dtype == case.dtype and lse.dtype == wide
    assert limit is None or relative_error(lse, Reference().forward(q, k, v, diagonal, scores)[1]) <= limit
    dout = dout * size
    term = kernel.row_term(dout, (dout.to(wide) * out.to(wide)).sum(-1))
    grads = kernel.backward(dout, q, k, v, lse.contiguous() if strided else lse, term, diagonal, scores)
    assert all(x.stride(-1) == 1 for x in (out, *grads))
    return Result(out, *(grad.to(wide) / size for grad in grads))


def run_in_two(kernel: Backend, case: Case) -> Result:
    """Two tiles over every other key, with the log-sum-exp of both: their gradients add up to the whole's."""
    (q, k, v, dout), whole, scale = case.inputs(), case.seq_length, case.head_dim**-0.5
    halves = [(k[i::2], v[i::2]) for i in range(2)]  # strided views
    parts = [kernel.forward(q, *half, whole, Scores(scale)) for half in halves]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(torch.exp(part[1] - lse).unsqueeze(-1) * part[0] for part in parts)
    term = kernel.row_term(dout, (dout.float() * out).sum(-1))
    grads = [kernel.backward(dout, q, *half, lse, term, whole, Scores(scale)) for half in halves]
    dk, dv = (torch.stack((grads[0][i], grads[1][i]), 1).flatten(0, 1) for i in (1, 2))
    return Result(out, grads[0][0].float() + grads[1][0], dk, dv)
