"""Block attention, backward.

Two launches without atomics, hence deterministic: one program per block of queries accumulates dq over the keys they
see; one per block of keys accumulates dk and dv over the queries, of all heads of the group, that see them. Both
recompute the probabilities from the scores and each query's lse over *all* its keys (arXiv 2307.08691, Algorithm 2).
The first writes a record per query and head, lse to base 2 and delta side by side, which the second reads: one load
for both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cp_kernels.checks import check
from cp_kernels.parts import (
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
from cp_kernels.sizes import dkv_sizes, dq_sizes, gpu, precision
from cp_kernels.visible import Runs, View, side, table


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    rows: Runs,
    keys: Runs,
    view: View,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The share of these keys in ``dq``, and of these queries in ``dk`` and ``dv``; shapes and dtypes of q, k and v.

    Args:
        dout: ``[s, b, h, e]`` in q's dtype.
        lse: of each query over all its keys, ``[s, b, h]``, float32, natural logarithm.
        delta: ``rowsum(dout * out)`` of each query, ``[s, b, h]``, float32.
        q, k, v, rows, keys, view, scale, softcap: as in the forward.

    ValueError for tensors that do not fit together or that the kernels do not support.
    """
    check(q, k, v, rows, keys, dout)
    (s, b, h, d), (t, _, g, e) = q.shape, v.shape
    dq = torch.empty((s, b, h, d), dtype=q.dtype, device=q.device)
    dk = torch.empty((t, b, g, d), dtype=k.dtype, device=k.device)
    dv = torch.empty((t, b, g, e), dtype=v.dtype, device=v.device)
    (d0, d1), (e0, e1) = Parts.split(d), Parts.split(e)
    records = torch.empty((b, h, s, 2), dtype=torch.float32, device=q.device)  # written by _dq
    common = (q, k, v, dout, *(n for x in (q, k, v, dout) for n in x.stride()[:3]))
    common += (records, *records.stride()[:2], scale, h // g)
    parts = dict(D=d, D0=d0, D1=d1, E=e, E0=e0, E1=e1, CAP=softcap or 0.0, PRECISION=precision(q))

    sizes = dq_sizes(d, e, q.dtype, gpu(q.device))
    queries = side(rows, view, sizes.queries, q.device)
    runs = table(keys, q.device)
    _dq[(queries.blocks.size(0), b * h)](
        *common, lse, *lse.stride(), delta, *delta.stride(), dq, *dq.stride()[:3],
        queries.blocks, queries.first, queries.last, runs, runs.size(0), h,
        M=sizes.queries, N=sizes.keys, num_warps=sizes.warps, num_stages=sizes.stages, **parts,
    )  # fmt: skip
    sizes = dkv_sizes(d, e, q.dtype, gpu(q.device))
    held = side(keys, view.transposed, sizes.keys, q.device)
    runs = table(rows, q.device)
    _dkv[(held.blocks.size(0), b * g)](
        *common, dk, *dk.stride()[:3], dv, *dv.stride()[:3],
        *(held.blocks, held.first, held.last, runs, runs.size(0), g),
        M=sizes.queries, N=sizes.keys, num_warps=sizes.warps, num_stages=sizes.stages,
        WIDTH=max(2, min(8, 32 * sizes.warps // sizes.queries)), **parts,
    )  # fmt: skip
    return dq, dk, dv


@triton.jit
def _dq(
    q, k, v, dout, q_s, q_b, q_h, k_s, k_b, k_g, v_s, v_b, v_g, dout_s, dout_b, dout_h,
    records, records_b, records_h, scale, repeat,
    lse, lse_s, lse_b, lse_h, delta, delta_s, delta_b, delta_h,
    dq, dq_s, dq_b, dq_h, blocks, first, last, runs, n_runs, heads,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, batch = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    rows, there, first, last, low, high, inner_low, inner_high = held(blocks, first, last, M)

    group = (head // repeat).to(tl.int64)
    head = head.to(tl.int64)
    q += batch * q_b + head * q_h
    k += batch * k_b + group * k_g
    v += batch * v_b + group * v_g
    dout += batch * dout_b + head * dout_h
    q0 = load_rows(q, rows, q_s, there, 0, D0, D)
    q1 = load_rows(q, rows, q_s, there, D0, D1, D) if D1 > 0 else q0
    do0 = load_rows(dout, rows, dout_s, there, 0, E0, E)
    do1 = load_rows(dout, rows, dout_s, there, E0, E1, E) if E1 > 0 else do0
    at = rows.to(tl.int64)
    lses = _log2(tl.load(lse + batch * lse_b + head * lse_h + at * lse_s, mask=there, other=0.0))
    deltas = tl.load(delta + batch * delta_b + head * delta_h + at * delta_s, mask=there, other=0.0)
    of_rows = records + batch * records_b + head * records_h + 2 * at
    tl.store(of_rows[:, None] + tl.arange(0, 2)[None, :], tl.join(lses, deltas), mask=there[:, None])
    acc0 = tl.zeros([M, D0], tl.float32)
    acc1 = tl.zeros([M, D1], tl.float32) if D1 > 0 else acc0
    for run in range(n_runs):
        offset, position, step, begin, end, inner, edge = passed(runs, run, low, high, inner_low, inner_high, N)
        k_run, v_run = k + offset * k_s, v + offset * v_s
        for start in range(inner, edge, N):
            acc0, acc1 = _add_dq(
                *(acc0, acc1, q0, q1, do0, do1, lses, deltas, k_run, v_run, k_s, v_s, scale, start, end),
                *(first, last, position, step, False, D, D0, D1, E, E0, E1, N, CAP, PRECISION),
            )
        for number in range(0, inner - begin + end - edge, N):
            start = index_ends(number, begin, inner, edge)
            acc0, acc1 = _add_dq(
                *(acc0, acc1, q0, q1, do0, do1, lses, deltas, k_run, v_run, k_s, v_s, scale, start, end),
                *(first, last, position, step, True, D, D0, D1, E, E0, E1, N, CAP, PRECISION),
            )
    dq += batch * dq_b + head * dq_h
    store_rows(dq, rows, dq_s, there, acc0 * scale, 0, D0, D)
    if D1 > 0:
        store_rows(dq, rows, dq_s, there, acc1 * scale, D0, D1, D)


@triton.jit
def _add_dq(
    acc0, acc1, q0, q1, do0, do1, lses, deltas, k, v, k_s, v_s, scale, start, end, first, last, position, step,
    MASKED: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, N: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the share of a block of keys of one run."""
    keys = start + tl.arange(0, N)
    there = keys < end if MASKED else tl.full([N], True, tl.int1)
    k0 = load_rows(k, keys, k_s, there, 0, D0, D)
    k1 = load_rows(k, keys, k_s, there, D0, D1, D) if D1 > 0 else k0
    v0 = load_rows(v, keys, v_s, there, 0, E0, E)
    v1 = load_rows(v, keys, v_s, there, E0, E1, E) if E1 > 0 else v0
    s, tangent = capped(scores(q0, q1, k0, k1, PRECISION, D1 > 0), scale, CAP)
    p = tl.exp2(s - lses[:, None])
    if MASKED:
        p = tl.where(seen_pairs(first, last, position, step, keys, end), p, 0.0)
    ds = p * (scores(do0, do1, v0, v1, PRECISION, E1 > 0) - deltas[:, None])
    if CAP > 0:
        ds = ds * (1 - tangent * tangent)
    ds = ds.to(k0.dtype)
    acc0 = product(ds, k0, acc0, PRECISION)
    if D1 > 0:
        acc1 = product(ds, k1, acc1, PRECISION)
    return acc0, acc1


@triton.jit
def _dkv(
    q, k, v, dout, q_s, q_b, q_h, k_s, k_b, k_g, v_s, v_b, v_g, dout_s, dout_b, dout_h,
    records, records_b, records_h, scale, repeat,
    dk, dk_s, dk_b, dk_g, dv, dv_s, dv_b, dv_g, blocks, first, last, runs, n_runs, groups,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    WIDTH: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group, batch = (tl.program_id(1) % groups).to(tl.int64), (tl.program_id(1) // groups).to(tl.int64)
    keys, there, first, last, low, high, inner_low, inner_high = held(blocks, first, last, N)

    k += batch * k_b + group * k_g
    v += batch * v_b + group * v_g
    k0 = load_rows(k, keys, k_s, there, 0, D0, D)
    k1 = load_rows(k, keys, k_s, there, D0, D1, D) if D1 > 0 else k0
    v0 = load_rows(v, keys, v_s, there, 0, E0, E)
    v1 = load_rows(v, keys, v_s, there, E0, E1, E) if E1 > 0 else v0
    dk0 = tl.zeros([N, D0], tl.float32)
    dk1 = tl.zeros([N, D1], tl.float32) if D1 > 0 else dk0
    dv0 = tl.zeros([N, E0], tl.float32)
    dv1 = tl.zeros([N, E1], tl.float32) if E1 > 0 else dv0
    for turn in range(repeat * n_runs):  # all runs of one query head, then the next head
        run, head = turn % n_runs, group * repeat + turn // n_runs
        offset, position, step, begin, end, inner, edge = passed(runs, run, low, high, inner_low, inner_high, M)
        q_run = q + batch * q_b + head * q_h + offset * q_s
        dout_run = dout + batch * dout_b + head * dout_h + offset * dout_s
        records_run = records + batch * records_b + head * records_h + 2 * offset
        for start in range(inner, edge, M):
            dk0, dk1, dv0, dv1 = _add_dkv(
                *(dk0, dk1, dv0, dv1, k0, k1, v0, v1, q_run, dout_run, records_run, q_s, dout_s),
                *(scale, start, end, first, last, position, step, False),
                *(D, D0, D1, E, E0, E1, M, WIDTH, CAP, PRECISION),
            )
        for number in range(0, inner - begin + end - edge, M):
            start = index_ends(number, begin, inner, edge)
            dk0, dk1, dv0, dv1 = _add_dkv(
                *(dk0, dk1, dv0, dv1, k0, k1, v0, v1, q_run, dout_run, records_run, q_s, dout_s),
                *(scale, start, end, first, last, position, step, True),
                *(D, D0, D1, E, E0, E1, M, WIDTH, CAP, PRECISION),
            )
    dk += batch * dk_b + group * dk_g
    dv += batch * dv_b + group * dv_g
    store_rows(dk, keys, dk_s, there, dk0 * scale, 0, D0, D)
    store_rows(dv, keys, dv_s, there, dv0, 0, E0, E)
    if D1 > 0:
        store_rows(dk, keys, dk_s, there, dk1 * scale, D0, D1, D)
    if E1 > 0:
        store_rows(dv, keys, dv_s, there, dv1, E0, E1, E)


@triton.jit
def _add_dkv(
    dk0, dk1, dv0, dv1, k0, k1, v0, v1, q, dout, records, q_s, dout_s, scale, start, end,
    first, last, position, step,
    MASKED: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, M: tl.constexpr,
    WIDTH: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the share of a block of queries of one run and head."""
    rows = start + tl.arange(0, M)
    there = rows < end if MASKED else tl.full([M], True, tl.int1)
    q0 = load_rows(q, rows, q_s, there, 0, D0, D)
    q1 = load_rows(q, rows, q_s, there, D0, D1, D) if D1 > 0 else q0
    do0 = load_rows(dout, rows, dout_s, there, 0, E0, E)
    do1 = load_rows(dout, rows, dout_s, there, E0, E1, E) if E1 > 0 else do0
    lses, deltas = _load_records(records, rows, there, WIDTH)
    s, tangent = capped(scores(k0, k1, q0, q1, PRECISION, D1 > 0), scale, CAP)
    p = tl.exp2(s - lses[None, :])
    if MASKED:
        p = tl.where(seen_pairs(first, last, position, step, rows, end), p, 0.0)
    p_low = p.to(do0.dtype)
    dv0 = product(p_low, do0, dv0, PRECISION)
    if E1 > 0:
        dv1 = product(p_low, do1, dv1, PRECISION)
    ds = p * (scores(v0, v1, do0, do1, PRECISION, E1 > 0) - deltas[None, :])
    if CAP > 0:
        ds = ds * (1 - tangent * tangent)
    ds = ds.to(q0.dtype)
    dk0 = product(ds, q0, dk0, PRECISION)
    if D1 > 0:
        dk1 = product(ds, q1, dk1, PRECISION)
    return dk0, dk1, dv0, dv1


@triton.jit
def _load_records(records, rows, there, WIDTH: tl.constexpr):
    """lse (base 2) and delta of rows. A record is loaded ``WIDTH / 2`` times: a load with fewer elements than the
    program has threads is repeated by every warp, an element at a time, in the layout of the scores.
    """
    at = records + 2 * rows.to(tl.int64)[:, None] + (tl.arange(0, WIDTH) % 2)[None, :]
    pairs = tl.load(at, mask=there[:, None], other=0.0)
    M: tl.constexpr = rows.shape[0]
    lses, deltas = tl.split(tl.reshape(pairs, [M, WIDTH // 2, 2]))
    if WIDTH >= 8:
        lses, _ = tl.split(tl.reshape(lses, [M, WIDTH // 4, 2]))
        deltas, _ = tl.split(tl.reshape(deltas, [M, WIDTH // 4, 2]))
    if WIDTH >= 4:
        lses, _ = tl.split(tl.reshape(lses, [M, 2]))
        deltas, _ = tl.split(tl.reshape(deltas, [M, 2]))
    return tl.reshape(lses, [M]), tl.reshape(deltas, [M])


@triton.jit
def _log2(lse):
    """Convert to base 2; +inf where all scores were -inf, so that every probability is 0."""
    return tl.where(lse == -float("inf"), float("inf"), lse) * LOG2_E
