"""Short causal convolutions of a shard, each tensor read and written once: forward, and backward.

    y[t] = bias + sum_i  weight[:, w - 1 - i] * x[the token i before t]            i = 0 .. w - 1

Tables say where those tokens are: in this rank's shard, in its halo (rows of other ranks), or nowhere, beyond the start
of a document. The backward gathers too, since a row has at most one token i after it on this rank: nothing is added
atomically, so results are deterministic. Sums are in float32 (float64 for float64 tensors).

A program handles some rows, each one ``(token, batch)``, of some channels. The w rows that it reads for each of them
overlap and come from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cp_kernels.offsets import accumulation_dtype, check_dense, index_type, reach, triton_type
from cp_kernels.rows import bits, read

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ELEMENTS = 4096
"""Of the taps of a block of rows, held in registers: 32 numbers for each of 128 threads."""
CHUNK = 256
"""Rows of one program of the backward pass, which stores one row of sums for each tap."""


def convolve(x: Tensor, halo: Tensor, places: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of ``x [s, b, c]``, contiguous, in its dtype.

    Args:
        x: with a dense last dimension.
        halo: ``[n, b, c]``: the rows of other ranks that are seen.
        places: int32 ``[w, s]``: row of the token i before each token; from s on those of the halo; -1: none.
        weight: ``[c, w]``; its last column is for the token itself.
        bias: ``[c]``; None: none.

    ValueError for tensors that do not fit together, or of other dtypes.
    """
    _check(x, places, weight, halo=halo, bias=bias)
    s, b, c = x.shape
    out = torch.empty((s, b, c), dtype=x.dtype, device=x.device)
    if out.numel():
        sizes = _sizes(x, weight, x, halo, places)
        halo = halo.contiguous()
        _forward_kernel[(triton.cdiv(s * b, sizes["ROWS"]), triton.cdiv(c, sizes["COLUMNS"]))](
            bits(x), bits(halo), places, bits(weight), None if bias is None else bits(bias), out,
            x.stride()[:2], weight.stride(), s, b, c, BIAS=bias is not None, **sizes,
        )  # fmt: skip
    return out


def convolve_back(
    dout: Tensor, x: Tensor, after: Tensor, weight: Tensor, returned: Tensor | None = None, home: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradient of the rows ``x [n, b, c]``, contiguous, in their dtype; and their terms of the gradients of weight and
    bias, ``[w + 1, c]`` in the accumulation dtype: one row for each column of the weight, then the bias.

    Args:
        dout: ``[s, b, c]``, in the dtype of x and with a dense last dimension, like x.
        x: this rank's tokens, or its halo.
        after: int32 ``[w, n]``, dense in its last dimension: the token i after each row; -1: none here.
        weight: ``[c, w]``.
        returned: ``[m, b, c]``: gradients of rows of x, found by other ranks; None: none.
        home: int32 ``[k, n]``: up to k rows of ``returned`` that belong to each row; -1: none.

    ValueError for tensors that do not fit together, or of other dtypes.
    """
    _check(x, after, weight, dout=dout, returned=returned)
    n, b, c = x.shape
    width = weight.size(1)
    dx = torch.empty((n, b, c), dtype=x.dtype, device=x.device)
    programs = triton.cdiv(n * b, CHUNK)
    sums = torch.empty((programs, width + 1, c), dtype=accumulation_dtype(x), device=x.device)
    if not dx.numel():
        return dx, sums.sum(0)
    if returned is None or home is None:
        returned, home = x, after[:0]
    returned = returned.contiguous()
    sizes = _sizes(x, weight, x, dout, returned, after, sums)
    _backward_kernel[(programs, triton.cdiv(c, sizes["COLUMNS"]))](
        bits(dout), bits(x), after, bits(weight), bits(returned), home, dx, sums, dout.stride()[:2], x.stride()[:2],
        weight.stride(), after.stride(0), n, b, c, HOME=len(home), CHUNK=CHUNK, **sizes,
    )  # fmt: skip
    return dx, sums[0] if programs == 1 else sums.sum(0)


def _sizes(x: Tensor, weight: Tensor, *reached: Tensor) -> dict[str, object]:
    """Constants of the kernels. reached: tensors of which offsets are computed."""
    width, (rows, c) = weight.size(1), (x.size(0) * x.size(1), x.size(2))
    taps = triton.next_power_of_2(width)
    columns = min(triton.next_power_of_2(c), 128, max(1, ELEMENTS // taps))
    block = max(1, min(ELEMENTS // (taps * columns), triton.next_power_of_2(rows), CHUNK))
    largest = max(x.numel(), *(reach(t.shape, t.stride()) for t in reached))
    sizes = {"W": width, "TAPS": taps, "ROWS": block, "COLUMNS": columns, "num_warps": 4}
    return sizes | {"SUM": triton_type(accumulation_dtype(x)), "INDEX": index_type(largest)}


def _check(x: Tensor, table: Tensor, weight: Tensor, **others: Tensor | None) -> None:
    named = {"x": x, "weight": weight} | {name: t for name, t in others.items() if t is not None}
    shapes = ", ".join(f"{name} {t.dtype} {tuple(t.shape)} on {t.device}" for name, t in named.items())
    rows = [t for name, t in named.items() if name not in ("weight", "bias")]
    if x.dim() != 3 or any(t.dtype != x.dtype or t.dtype not in DTYPES or t.shape[1:] != x.shape[1:] for t in rows):
        raise ValueError(f"rows must be [s, b, c] of one dtype in {DTYPES}: got {shapes}")
    if weight.dim() != 2 or weight.size(0) != x.size(2) or ("bias" in named and named["bias"].shape != x.shape[2:]):
        raise ValueError(f"weight and bias must be [c, w] and [c]: got {shapes}")
    if any(t.device != x.device for t in named.values()):
        raise ValueError(f"the tensors must be on one device: got {shapes}")
    if table.shape != (weight.size(1), x.size(0)) or table.dtype != torch.int32 or table.stride(1) > 1:
        raise ValueError(f"a table must be int32 [w, rows], got {table.dtype} {tuple(table.shape)} beside {shapes}")
    check_dense(**{name: t for name, t in named.items() if name != "weight"})


@triton.jit
def _forward_kernel(
    x, halo, places, weight, bias, out, x_strides, weight_strides, s, b, c,
    BIAS: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SUM: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    row, known, token, of_batch = _rows(tl.program_id(0).to(INDEX) * ROWS, s, b, ROWS)
    column, inside, taps = _columns(weight, weight_strides, c, W, TAPS, COLUMNS, SUM, INDEX)
    place = _places(places, s, token, known, W, TAPS, INDEX)
    own = x + place * x_strides[0] + of_batch[None, :] * x_strides[1]
    there = halo + ((place - s) * b + of_batch[None, :]) * c
    at = tl.where(place < s, own, there)[:, :, None] + column[None, None, :]
    number = read(at, (place >= 0)[:, :, None] & inside[None, None, :], SUM)
    total = tl.sum(number * taps[:, None, :], 0)
    if BIAS:
        total += read(bias + column, inside, SUM)[None, :]
    to = out + (row * c)[:, None] + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=known[:, None] & inside[None, :])


@triton.jit
def _backward_kernel(
    dout, x, after, weight, returned, home, dx, sums, dout_strides, x_strides, weight_strides, after_apart, n, b, c,
    HOME: tl.constexpr, CHUNK: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SUM: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(INDEX)
    column, inside, taps = _columns(weight, weight_strides, c, W, TAPS, COLUMNS, SUM, INDEX)
    tap = tl.arange(0, TAPS)
    of_taps = tl.zeros([TAPS, ROWS, COLUMNS], SUM)
    of_bias = tl.zeros([ROWS, COLUMNS], SUM)
    for start in range(0, CHUNK, ROWS):
        row, known, token, of_batch = _rows(program * CHUNK + start, n, b, ROWS)
        there = known[:, None] & inside[None, :]
        number = read(x + (token * x_strides[0] + of_batch * x_strides[1])[:, None] + column[None, :], there, SUM)
        place = _places(after, after_apart, token, known, W, TAPS, INDEX)
        at = dout + (place * dout_strides[0] + of_batch[None, :] * dout_strides[1])[:, :, None] + column[None, None, :]
        gradient = read(at, (place >= 0)[:, :, None] & inside[None, None, :], SUM)
        of_taps += gradient * number[None, :, :]
        of_bias += tl.sum(tl.where((tap == 0)[:, None, None], gradient, 0.0), 0)
        total = tl.sum(gradient * taps[:, None, :], 0)
        for i in tl.static_range(HOME):
            back = tl.load(home + i * n + token, mask=known, other=-1).to(INDEX)
            of_others = returned + ((back * b + of_batch) * c)[:, None] + column[None, :]
            total += read(of_others, (back >= 0)[:, None] & inside[None, :], SUM)
        tl.store(dx + (row * c)[:, None] + column[None, :], total.to(dx.dtype.element_ty), mask=there)
    to = sums + program * (W + 1) * c
    each = (tap < W)[:, None] & inside[None, :]
    tl.store(to + ((W - 1 - tap).to(INDEX) * c)[:, None] + column[None, :], tl.sum(of_taps, 1), mask=each)
    tl.store(to + W * c + column, tl.sum(of_bias, 0), mask=inside)


@triton.jit
def _rows(first, tokens, b, ROWS: tl.constexpr):
    """Rows from ``first`` on: number, validity, token, batch."""
    row = first + tl.arange(0, ROWS)
    return row, row < tokens * b, row // b, row % b


@triton.jit
def _columns(
    weight, strides, c, W: tl.constexpr, TAPS: tl.constexpr, COLUMNS: tl.constexpr, SUM: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """Channels of this program, their validity, and their weights ``[TAPS, COLUMNS]``: the i-th is i tokens back."""
    column = tl.program_id(1).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)
    tap = tl.arange(0, TAPS)
    at = weight + (column * strides[0])[None, :] + ((W - 1 - tap) * strides[1])[:, None]
    return column, column < c, read(at, (tap < W)[:, None] & (column < c)[None, :], SUM)


@triton.jit
def _places(table, apart, token, known, W: tl.constexpr, TAPS: tl.constexpr, INDEX: tl.constexpr):
    """``[TAPS, ROWS]``: entries of a table of tokens, -1 outside."""
    tap = tl.arange(0, TAPS)
    at = table + (tap.to(INDEX) * apart)[:, None] + token[None, :]
    return tl.load(at, mask=(tap < W)[:, None] & known[None, :], other=-1).to(INDEX)
