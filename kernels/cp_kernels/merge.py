"""Merging of attention over disjoint key sets: any number of partials in one pass over memory.

    lse = log(sum_i exp(lse_i))        out = sum_i exp(lse_i - lse) * out_i

A partial that saw no key of a row has lse -inf and weight 0; rows that no partial saw become 0 and -inf. NaN propagates
(also 0 * NaN: a partial's ``out`` must be finite where it saw nothing).

A program merges a few rows, each one ``(token, batch, head)``: it reads their log-sum-exps, then every element of every
``out`` once. Rows may be stored where they were read (``merge_into``): no other program reads them, and a barrier
precedes the first store.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cp_kernels.offsets import check_dense, check_rows_apart, triton_type
from cp_kernels.rows import block_of_rows, blocks, offsets

SEPARATE = 8
"""Tensors passed as separate arguments; the kernel is compiled for every number of them."""


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Attention over the keys of all partials.

    Args:
        outs: ``[s, b, h, e]``, each normalised over its own keys; any strides with a dense last dimension. Chunks of
            one tensor, or up to 8 other tensors, are read in place; more are stacked first.
        lses: ``[s, b, h]``, float32 (float64 for float64 outputs).
        dtype: of the output; default: that of the lse, in which sums are kept.

    Returns:
        ``out [s, b, h, e]`` and ``lse [s, b, h]``, contiguous.

    ValueError for no partials, or partials that do not fit together.
    """
    if len(outs) == 0:
        raise ValueError("no partials to merge")
    dtype = lses[0].dtype if dtype is None else dtype
    out = outs[0].new_empty(outs[0].shape, dtype=dtype)
    lse = lses[0].new_empty(lses[0].shape)
    _launch(outs, lses, out, lse)
    return out, lse


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a partial into ``out [s, b, h, e]`` and ``lse [s, b, h]``, of one dtype, in place; any strides.

    The partial must not overlap them, nor may their rows overlap each other. ValueError for partials that do not fit
    together, or an ``out`` with another dtype than lse or overlapping rows.
    """
    if out.dtype != lse.dtype:
        raise ValueError(f"sums are kept in the dtype of the lse, {lse.dtype}: got an out in {out.dtype}")
    check_rows_apart(out=out, lse=lse)
    _launch((out, part_out), (lse, part_lse), out, lse)


def _launch(outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, lse: Tensor) -> None:
    _check(outs, lses)
    check_dense(out=out)
    if not lse.numel():
        return
    parts, apart = _evenly_apart(outs, lses)
    if parts == 1 and len(outs) > SEPARATE:
        outs, lses = torch.stack(tuple(outs)).unbind(), torch.stack(tuple(lses)).unbind()
        parts, apart = _evenly_apart(outs, lses)
    if parts > 1:
        outs, lses = outs[:1], lses[:1]
    programs, rows, sizes = blocks(out, lse, *outs, *lses, further=(parts - 1) * max(map(abs, apart)))
    _merge_kernel[(programs,)](
        tuple(outs), tuple(lses), tuple(t.stride()[:3] for t in outs), tuple(t.stride() for t in lses), out, lse,
        out.stride()[:3], lse.stride(), rows, *out.shape[1:3], parts, *apart,
        SUM=triton_type(lse.dtype), **sizes,
    )  # fmt: skip


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    if len(outs) != len(lses):
        raise ValueError(f"{len(outs)} outputs do not match {len(lses)} log-sum-exps")
    for out, lse in zip(outs, lses, strict=True):
        if out.dim() != 4 or out.shape != outs[0].shape or lse.shape != out.shape[:3]:
            raise ValueError(
                "partials must be [s, b, h, e] and [s, b, h], all of one shape: got "
                f"{tuple(out.shape)} and {tuple(lse.shape)} beside {tuple(outs[0].shape)}"
            )
        if lse.dtype != lses[0].dtype or lse.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"log-sum-exps must all be float32 or all float64, got {lse.dtype} and {lses[0].dtype}")
        check_dense(out=out)


def _evenly_apart(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[int, tuple[int, int]]:
    """Number of partials at even distances from the first output and lse, and the distances in elements."""
    steps = _step(outs), _step(lses)
    return (1, (0, 0)) if steps[0] is None or steps[1] is None else (len(outs), (steps[0], steps[1]))


def _step(tensors: Sequence[Tensor]) -> int | None:
    """The distance between evenly spaced views of one storage, otherwise None."""
    first = tensors[0]
    step = tensors[1].storage_offset() - first.storage_offset() if len(tensors) > 1 else 0
    for i, t in enumerate(tensors):
        alike = t.dtype == first.dtype and t.stride() == first.stride()
        if not alike or t.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        if t.storage_offset() - first.storage_offset() != i * step:
            return None
    return step


@triton.jit
def _merge_kernel(
    outs, lses, outs_strides, lses_strides, out, lse, out_strides, lse_strides, rows, b, h, parts, outs_apart,
    lses_apart,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SUM: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """``outs[t] + i * outs_apart`` is partial (t, i), for every tensor t and i < parts."""
    _, known, s_i, b_i, h_i = block_of_rows(rows, b, h, ROWS, INDEX)
    column = tl.arange(0, WIDTH)[None, :]
    inside = known[:, None] & (column < D)

    top = tl.full([ROWS], float("-inf"), SUM)
    for t in tl.static_range(len(lses)):
        at = lses[t] + offsets(s_i, b_i, h_i, lses_strides[t])
        for _ in range(parts):
            top = tl.maximum(top, tl.load(at, mask=known, other=float("-inf")))
            at += lses_apart
    top = tl.where(tl.abs(top) == float("inf"), 0.0, top)

    total = tl.zeros([ROWS], SUM)
    for t in tl.static_range(len(lses)):
        at = lses[t] + offsets(s_i, b_i, h_i, lses_strides[t])
        for _ in range(parts):
            total += tl.exp(tl.load(at, mask=known, other=float("-inf")) - top)
            at += lses_apart

    merged = tl.zeros([ROWS, WIDTH], SUM)
    for t in tl.static_range(len(outs)):
        at = lses[t] + offsets(s_i, b_i, h_i, lses_strides[t])
        numbers = outs[t] + offsets(s_i, b_i, h_i, outs_strides[t])[:, None] + column
        for _ in range(parts):
            part = tl.load(at, mask=known, other=float("-inf"))
            weight = tl.where(part == float("-inf"), 0.0, tl.exp(part - top) / total)
            merged += tl.load(numbers, mask=inside, other=0.0).to(SUM) * weight[:, None]
            at += lses_apart
            numbers += outs_apart

    tl.debug_barrier()  # in place: every warp reads a row's lse before one stores the new value
    there = out + offsets(s_i, b_i, h_i, out_strides)[:, None] + column
    tl.store(there, merged.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + offsets(s_i, b_i, h_i, lse_strides), top + tl.log(total), mask=known)
