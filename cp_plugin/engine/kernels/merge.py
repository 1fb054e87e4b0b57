"""Merging of attention over disjoint key sets.

With out_i normalised over its own keys and lse_i = log(sum(exp(scores_i))),

    lse = logaddexp(lse_a, lse_b)        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

(ATTENTION2D, arXiv 2503.15758, Algorithm 2 "AttnFix", on normalised outputs). Rows that saw no key on either side keep
lse -inf and out 0. NaN propagates.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.core.layout import as_slice
from cp_plugin.engine.core.values import Gradients, Partial, Sums
from cp_plugin.engine.kernels import fused


def merge(a: Partial | None, b: Partial | None) -> Partial | None:
    """Attention over the keys of both. May reuse the memory of ``a``."""
    if a is None or b is None:
        return b if a is None else a
    if a.out.dtype != a.lse.dtype:
        return Partial(*fused.merge((a.out, b.out), (a.lse, b.lse)))
    fused.merge_into(*a, *b)
    return a


def merge_all(partials: Iterable[Partial | None]) -> Partial | None:
    """Attention over the keys of all, merged in one pass into new memory."""
    seen = [partial for partial in partials if partial is not None]
    if len(seen) < 2:
        return seen[0] if seen else None
    outs, lses = zip(*seen, strict=True)
    return Partial(*fused.merge(outs, lses))


def merge_rows(total: Partial | None, rows: range, part: Partial, q: Tensor) -> Partial:
    """Merge a partial of some query rows into the running partial of all rows of ``q`` (``[s, b, h, d]``)."""
    rows, *tensors = forwards(rows, *part)
    if len(rows) == q.size(0):
        return merge(total, Partial(*tensors)) or Partial(*tensors)
    place = as_slice(rows)
    if total is None:
        out = part.out.new_zeros((q.size(0), *part.out.shape[1:]), dtype=accumulation_dtype(q.dtype))
        lse = part.lse.new_full((q.size(0), *part.lse.shape[1:]), -torch.inf)
        out[place], lse[place] = tensors
    else:
        out, lse = accumulator(total.out), total.lse
        fused.merge_into(out[place], lse[place], *tensors)
    return Partial(out, lse)


def add(total: Tensor | None, part: Tensor) -> Tensor:
    """Sum of gradients in the accumulation dtype. May reuse the memory of ``total``; a single part is returned as
    is."""
    return part if total is None else accumulator(total).add_(part)


def add_sums(onto: Sums, grads: Gradients) -> Gradients:
    """Add gradients to running sums. May reuse their memory."""
    return Gradients(*(add(total, part) for total, part in zip(onto, grads, strict=True)))


def add_rows(total: Tensor | None, rows: range, part: Tensor, like: Tensor) -> Tensor:
    """Add a gradient of some rows to the running gradient of all rows of ``like``."""
    rows, part = forwards(rows, part)
    if len(rows) == like.size(0):
        return add(total, part)
    if total is not None:
        total = accumulator(total)
        total[as_slice(rows)] += part
        return total
    total = torch.empty_like(like, dtype=accumulation_dtype(like.dtype))
    first, last = (rows[0], rows[-1] + 1) if rows.step == 1 else (like.size(0), like.size(0))
    for untouched in (total[:first], total[last:]):
        untouched.zero_()
    total[as_slice(rows)] = part
    return total


def forwards(rows: range, *parts: Tensor) -> tuple[range, *tuple[Tensor, ...]]:
    """Reverse decreasing rows, and the tensors with them."""
    return (rows, *parts) if rows.step > 0 else (rows[::-1], *(part.flip(0) for part in parts))


def widened(total: Tensor | None, like: Tensor) -> Tensor:
    """The running gradient of ``like`` in the accumulation dtype; zeros if there is none."""
    return torch.zeros_like(like, dtype=accumulation_dtype(like.dtype)) if total is None else accumulator(total)


def accumulator(t: Tensor) -> Tensor:
    return t.to(accumulation_dtype(t.dtype))
