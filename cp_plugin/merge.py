"""Merging attention over disjoint sets of keys.

With out_i normalised over its own keys and lse_i = log(sum(exp(scores_i))),

    lse = logaddexp(lse_a, lse_b)        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

(ATTENTION2D, arXiv 2503.15758, Algorithm 2 "AttnFix", on normalised outputs). Rows that saw no key on either side have
lse -inf and stay 0. NaN on either side stays NaN, as it would on one device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_plugin.dtypes import accumulation_dtype
from cp_plugin.layout import as_slice
from cp_plugin.protocol import Partial


def merge(a: Partial | None, b: Partial | None) -> Partial | None:
    """Attention over the keys of both. May reuse ``a``'s memory; ``a`` must not be used afterwards."""
    if a is None or b is None:
        return b if a is None else a
    out, lse = _merge(_accumulator(a.out), a.lse, b.out, b.lse)
    return Partial(out, lse)


def merge_rows(total: Partial | None, rows: range, part: Partial, q: Tensor) -> Partial:
    """Merge a partial of some query rows into the running partial of all rows of ``q`` (``[s, b, h, d]``)."""
    rows, out, lse = forwards(rows, *part)
    part = Partial(out, lse)
    if len(rows) == q.size(0):
        merged = merge(total, part)
        assert merged is not None
        return merged
    if total is None:
        dtype = accumulation_dtype(q.dtype)
        out = part.out.new_zeros((q.size(0), *part.out.shape[1:]), dtype=dtype)
        lse = part.lse.new_full((q.size(0), *part.lse.shape[1:]), -torch.inf)
        here = as_slice(rows)
        out[here], lse[here] = part.out.to(dtype), part.lse
        return Partial(out, lse)
    out, lse, here = _accumulator(total.out), total.lse, as_slice(rows)
    out[here], lse[here] = _merge(out[here], lse[here], part.out, part.lse)
    return Partial(out, lse)


def add(total: Tensor | None, part: Tensor) -> Tensor:
    """Sum of gradients in the accumulation dtype. May reuse ``total``'s memory; a single part is taken as it is."""
    return part if total is None else _accumulator(total).add_(part)


def add_rows(total: Tensor | None, rows: range, part: Tensor, like: Tensor) -> Tensor:
    """Add a gradient of some rows to the running gradient of all rows of ``like``."""
    rows, part = forwards(rows, part)
    if len(rows) == like.size(0):
        return add(total, part)
    total = widened(total, like)
    total[as_slice(rows)] += part
    return total


def forwards(rows: range, *parts: Tensor) -> tuple[range, *tuple[Tensor, ...]]:
    """Rows that may run from the last to the first, and tensors of them, in increasing order."""
    return (rows, *parts) if rows.step > 0 else (rows[::-1], *(part.flip(0) for part in parts))


def widened(total: Tensor | None, like: Tensor) -> Tensor:
    """The running gradient of ``like`` in the accumulation dtype; zeros if there is none yet."""
    return torch.zeros_like(like, dtype=accumulation_dtype(like.dtype)) if total is None else _accumulator(total)


def _accumulator(t: Tensor) -> Tensor:
    return t.to(accumulation_dtype(t.dtype))


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = _weight(lse_a, lse), _weight(lse_b, lse)
    return out_a.mul_(weight_a).add_(out_b * weight_b), lse


def _weight(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole) as ``[..., 1]``, and 0 where the part saw no key (also where no part did: -inf - -inf)."""
    return torch.where(part == -torch.inf, 0.0, torch.exp(part - whole)).unsqueeze(-1)
