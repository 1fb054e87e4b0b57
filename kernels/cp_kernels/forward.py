"""Block attention, forward.

One launch for all pairs of runs. A program holds a block of queries of one head, finds in each run of keys the stretch
that any of them sees, and iterates over it as flash attention does (arXiv 2307.08691, Algorithm 1). Key blocks visible
to all its queries are not masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cp_kernels.checks import check, check_sums
from cp_kernels.parts import (
    LN_2,
    LOG2_E,
    Parts,
    capped,
    held,
    index_ends,
    load_rows,
    passed,
    product,
    scores,
    seen_pairs,
    store_rows,
)
from cp_kernels.sizes import forward_sizes, gpu, precision
from cp_kernels.visible import Runs, View, side, table


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Runs,
    keys: Runs,
    view: View,
    scale: float,
    onto: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over these keys and those that ``onto`` was computed from.

    Args:
        q: ``[s, b, h, d]``; k: ``[t, b, g, d]`` with g dividing h; v: ``[t, b, g, e]``: bfloat16, float16 or float32;
            any strides with a dense last dimension.
        rows, keys: positions of the s queries and the t keys, in storage order.
        view: which positions see which.
        scale: factor on the scores.
        onto: float32 out (dense last dimension) and lse of the same queries over other keys; updated in place.
        softcap: cap c > 0 on the scaled scores s, which become ``c * tanh(s / c)``; a constant of the program.

    Returns:
        out ``[s, b, h, e]`` in q's dtype, or ``onto``'s; lse ``[s, b, h]`` in float32. Rows that see no key have out 0
        and lse -inf.

    ValueError for tensors that do not fit together or that the kernels do not support.
    """
    check(q, k, v, rows, keys)
    (s, b, h, d), (g, e) = q.shape, v.shape[2:]
    if onto is None:
        out = torch.empty((s, b, h, e), dtype=q.dtype, device=q.device)
        lse = torch.empty((s, b, h), dtype=torch.float32, device=q.device)
    else:
        out, lse = onto
        check_sums(out, lse, q, v)
    sizes = forward_sizes(d, e, q.dtype, gpu(q.device))
    queries = side(rows, view, sizes.queries, q.device)
    runs = table(keys, q.device)
    (d0, d1), (e0, e1) = Parts.split(d), Parts.split(e)
    _forward[(queries.blocks.size(0), b * h)](
        *(q, k, v, out, lse, queries.blocks, queries.first, queries.last, runs, runs.size(0)),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride()),
        *(scale, h, h // g),
        D=d, D0=d0, D1=d1, E=e, E0=e0, E1=e1, M=sizes.queries, N=sizes.keys,
        ONTO=onto is not None, UPWARDS=scale >= 0, CAP=softcap or 0.0, PRECISION=precision(q),
        num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return out, lse


@triton.jit
def _forward(
    q, k, v, out, lse, blocks, first, last, runs, n_runs,
    q_s, q_b, q_h, k_s, k_b, k_g, v_s, v_b, v_g, out_s, out_b, out_h, lse_s, lse_b, lse_h,
    scale, heads, repeat,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, ONTO: tl.constexpr, UPWARDS: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1) % heads, tl.program_id(1) // heads
    rows, there, first, last, low, high, inner_low, inner_high = held(blocks, first, last, M)

    q += batch.to(tl.int64) * q_b + head.to(tl.int64) * q_h
    k += batch.to(tl.int64) * k_b + (head // repeat).to(tl.int64) * k_g
    v += batch.to(tl.int64) * v_b + (head // repeat).to(tl.int64) * v_g
    out += batch.to(tl.int64) * out_b + head.to(tl.int64) * out_h
    lse += batch.to(tl.int64) * lse_b + head.to(tl.int64) * lse_h
    lses = lse + rows.to(tl.int64) * lse_s

    q0 = load_rows(q, rows, q_s, there, 0, D0, D)
    q1 = load_rows(q, rows, q_s, there, D0, D1, D) if D1 > 0 else q0
    if ONTO:
        before = tl.load(lses, mask=there, other=-float("inf"))
        m, total = before * LOG2_E, tl.where(before == -float("inf"), 0.0, 1.0)
        acc0 = load_rows(out, rows, out_s, there, 0, E0, E)
        acc1 = load_rows(out, rows, out_s, there, E0, E1, E) if E1 > 0 else acc0
    else:
        m, total = tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32)
        acc0 = tl.zeros([M, E0], tl.float32)
        acc1 = tl.zeros([M, E1], tl.float32) if E1 > 0 else acc0
    visited = 0
    for run in range(n_runs):
        offset, position, step, begin, end, inner, edge = passed(runs, run, low, high, inner_low, inner_high, N)
        visited += tl.maximum(end - begin, 0)
        k_run, v_run = k + offset * k_s, v + offset * v_s
        for start in range(inner, edge, N):
            m, total, acc0, acc1 = _attend(
                *(m, total, acc0, acc1, q0, q1, k_run, v_run, k_s, v_s, scale, start, end),
                *(first, last, position, step, False, UPWARDS, CAP, D, D0, D1, E, E0, E1, N, PRECISION),
            )
        for number in range(0, inner - begin + end - edge, N):
            start = index_ends(number, begin, inner, edge)
            m, total, acc0, acc1 = _attend(
                *(m, total, acc0, acc1, q0, q1, k_run, v_run, k_s, v_s, scale, start, end),
                *(first, last, position, step, True, UPWARDS, CAP, D, D0, D1, E, E0, E1, N, PRECISION),
            )
    if visited > 0 or not ONTO:
        if ONTO:
            tl.debug_barrier()  # all threads have read what is overwritten
        divisor = tl.where(total == 0.0, 1.0, total)
        tl.store(lses, tl.where(total == 0.0, -float("inf"), m * LN_2 + tl.log(divisor)), mask=there)
        store_rows(out, rows, out_s, there, acc0 / divisor[:, None], 0, E0, E)
        if E1 > 0:
            store_rows(out, rows, out_s, there, acc1 / divisor[:, None], E0, E1, E)


@triton.jit
def _attend(
    m, total, acc0, acc1, q0, q1, k, v, k_s, v_s, scale, start, end, first, last, position, step,
    MASKED: tl.constexpr, UPWARDS: tl.constexpr, CAP: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a block of keys of one run: the running maximum (log2), sum and weighted values."""
    keys = start + tl.arange(0, N)
    there = keys < end if MASKED else tl.full([N], True, tl.int1)
    k0 = load_rows(k, keys, k_s, there, 0, D0, D)
    k1 = load_rows(k, keys, k_s, there, D0, D1, D) if D1 > 0 else k0
    s = scores(q0, q1, k0, k1, PRECISION, D1 > 0)
    factor = scale * LOG2_E
    if UPWARDS and CAP == 0 and not MASKED:
        new, s = tl.maximum(m, tl.max(s, 1) * factor), s * factor  # the factor is part of the exponent's subtraction
    else:
        s, _ = capped(s, scale, CAP)
        if MASKED:
            s = tl.where(seen_pairs(first, last, position, step, keys, end), s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1))
    base = tl.where(new == -float("inf"), 0.0, new)
    p, fade = tl.exp2(s - base[:, None]), tl.exp2(m - base)
    v0 = load_rows(v, keys, v_s, there, 0, E0, E)
    acc0 = product(p.to(v0.dtype), v0, acc0 * fade[:, None], PRECISION)
    if E1 > 0:
        v1 = load_rows(v, keys, v_s, there, E0, E1, E)
        acc1 = product(p.to(v0.dtype), v1, acc1 * fade[:, None], PRECISION)
    return new, total * fade + tl.sum(p, 1), acc0, acc1
