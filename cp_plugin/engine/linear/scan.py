r"""Parallel prefix scans along the first dimension: sums of log decays and chunk states.

    sums       y_0 + ... + y_t                                    blocks of 64, then their totals, recursively
    states     S_(t+1) = factor_t * S_t + left_t                  binary tree: log2(n) levels up and down

    left 0   left 1   left 2   left 3      a pair is one map:   factor = factor_1 * factor_0
       \_____/           \_____/                                left   = factor_1 * left_0 + left_1
           \_________________/
       the level above yields every other state; the ones in between follow by one step

Both take a few kernels for any length. A loop takes two per step, and ``torch.cumsum`` along the first dimension of a
CUDA tensor uses one thread per column. The order of additions is deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

_BLOCK = 64


def sums(y: Tensor) -> Tensor:
    """Inclusive prefix sums along the first dimension in the dtype of y; differentiable.

    No addend takes part in more than 64 additions at each of log64(n) levels, so for numbers of one sign the error is
    at most 192 roundings for 128k numbers (float32: 1.2e-5), against 128k for a running sum.
    """
    n = y.size(0)
    if n <= _BLOCK:
        return y.cumsum(0)
    blocks = -(-n // _BLOCK)
    inside = _padded(y, (0, blocks * _BLOCK - n)).unflatten(0, (blocks, _BLOCK)).cumsum(1)
    before = _padded(sums(inside[:-1, -1]), (1, 0))
    return (inside + before.unsqueeze(1)).flatten(0, 1)[:n]


def states(left: Tensor, factor: Tensor | None = None, initial: Tensor | None = None) -> Tensor:
    """States before each of n consecutive segments and after the last: ``[n + 1, b, g, d, e]``; differentiable.

    Args:
        left: chunk states, the contribution of each segment: ``[n, b, g, d, e]``.
        factor: what becomes of a state across each segment, in the dtype of ``left``: a decay ``[n, b, g, x, 1]`` or
            a matrix ``[n, b, g, d, d]``; None: it stays.
        initial: state before the first segment, ``[b, g, d, e]``; None: zero.
    """
    return _States.apply(left, factor, left.new_zeros(left.shape[1:]) if initial is None else initial)


def times(factor: Tensor, state: Tensor) -> Tensor:
    """A decay ``[..., x, 1]`` or a matrix ``[..., d, d]``, times a state ``[..., d, e]`` or times another like it."""
    return factor * state if factor.size(-1) == 1 else factor @ state


def transposed(factor: Tensor | None) -> Tensor | None:
    """Return what becomes of a gradient on its way back."""
    return factor if factor is None or factor.size(-1) == 1 else factor.mT


class _States(torch.autograd.Function):
    """Saves only the states; the backward pass is the same scan in reverse."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, factor: Tensor | None, initial: Tensor) -> Tensor:
        filled = left.new_empty((left.size(0) + 1, *left.shape[1:]))
        _fill(filled, left, factor, initial)
        ctx.save_for_backward(factor, filled)
        return filled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor, filled = ctx.saved_tensors
        outgoing = torch.empty_like(filled)
        back = None if factor is None else transposed(factor.flip(0))
        _fill(outgoing, grad[:-1].flip(0), back, grad[-1])
        outgoing = outgoing.flip(0)
        of_factor = None
        if factor is not None and ctx.needs_input_grad[1]:
            dense = factor.size(-1) > 1
            of_factor = outgoing[1:] @ filled[:-1].mT if dense else (outgoing[1:] * filled[:-1]).sum(-1, keepdim=True)
            of_factor = of_factor.sum_to_size(factor.shape)
        return outgoing[1:], of_factor, outgoing[0]


def _fill(out: Tensor, left: Tensor, factor: Tensor | None, initial: Tensor) -> None:
    """Write the n + 1 states to ``out``: pairs recursively to every other place, the rest by one step."""
    n = left.size(0)
    if n == 0:
        out[0] = initial
        return
    first, second = left[: n - 1 : 2], left[1::2]
    if factor is None:
        _fill(out[::2], first + second, None, initial)
        torch.add(out[:n:2], left[::2], out=out[1::2])
    else:
        of_first, of_second = factor[: n - 1 : 2], factor[1::2]
        _fill(out[::2], step(second, of_second, first), times(of_second, of_first), initial)
        step(left[::2], factor[::2], out[:n:2], out=out[1::2])


def step(left: Tensor, factor: Tensor, state: Tensor, out: Tensor | None = None) -> Tensor:
    """``left + factor * state``; in one kernel, unless matrices are multiplied."""
    if factor.size(-1) == 1:
        return torch.addcmul(left, factor, state, out=out)
    return torch.add(left, factor @ state, out=out)


def _padded(y: Tensor, rows: tuple[int, int]) -> Tensor:
    """Add rows of zeros before and after."""
    return pad(y, (0, 0) * (y.dim() - 1) + rows) if any(rows) else y
