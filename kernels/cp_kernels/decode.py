"""Flash-decoding: attention of decoded tokens to a rank's cache, in two launches for any length.

    part i of n     its slots, for the rows of a (sequence, group of heads)       out_i, lse_i
    merge           lse = log(sum_i exp(lse_i)), out = sum_i exp(lse_i - lse) * out_i

The query heads that share keys, times several tokens, are the rows of one matrix product. A slot is identified by its
position alone, on the device; slots that no row sees, including padding, are not read. Keys and values are read in
their stored dtype; FP8 ones are widened in registers exactly as ``payload.unpack`` does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cp_kernels.checks import DTYPES
from cp_kernels.codes import converts
from cp_kernels.codes import decode as decoded
from cp_kernels.offsets import check_dense, check_like
from cp_kernels.parts import LN_2, Parts, capped, load_rows, product, scores, store_rows
from cp_kernels.sizes import decode_sizes, precision

LARGEST_HEAD = 576
"""Multi-latent attention: 512 compressed elements and 64 rotary ones."""
PROGRAMS = 264
"""Target when dividing the slots: two per multiprocessor of an H100 (132)."""
MOST_PARTS = 128
FEWEST_BLOCKS = 4
"""Per part."""
LAST = 2**31 - 1
ELEMENTS = 4096
"""Held by a program of the merge at a time."""


CachedRows = tuple[Tensor, Tensor | None]
"""Rows in slots, ``[n, b, g, d]``: numbers, or e4m3 bytes with exponents ``[n, b, g]`` (``payload``)."""


def decode(
    q: Tensor,
    keys: CachedRows,
    values: CachedRows | None,
    v_head_dim: int,
    held: Tensor,
    positions: Tensor,
    scale: float,
    left: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention to a cache, in parts.

    Args:
        q: ``[t, b, h, d]``: t consecutive tokens in bfloat16, float16 or float32, the dtype of an unpacked cache.
        keys: ``[n, b, g, d]`` with g dividing h; n may be 0.
        values: ``[n, b, g, e]``; None: the first e elements of the keys, read once for both.
        v_head_dim: e.
        held: positions of the slots, int32 ``[n, b]``; slots later than the queries are not read.
        positions: of the queries, int32 ``[t, b]``.
        scale: factor on the scores.
        left: earlier positions that a query sees; -1: all.
        softcap: as in ``forward``.

    Returns:
        outs ``[parts, t, b, h, e]`` and lses ``[parts, t, b, h]`` in float32; 0 and -inf where a part has no key for a
        query. The division depends on shapes alone.

    ValueError for tensors that do not fit together or that the kernel does not support.
    """
    _check(q, keys, values, v_head_dim, held, positions)
    (k, k_exponents), (v, v_exponents) = keys, keys if values is None else values
    (t, b, h, d), (n, _, g, _), e = q.shape, k.shape, v_head_dim
    sizes = decode_sizes(t * (h // g), d, e, q.dtype)
    blocks = triton.cdiv(t * (h // g), sizes.queries)
    parts, slots = parts_of(n, blocks * b * g, sizes.keys)
    outs = torch.empty((parts, t, b, h, e), dtype=torch.float32, device=q.device)
    lses = torch.empty((parts, t, b, h), dtype=torch.float32, device=q.device)
    (d0, d1), (e0, e1) = Parts.split(d), Parts.split(e)
    _decode[(blocks * b * g, parts)](
        *(q, k, v, k_exponents, v_exponents, held, positions, outs, lses),
        *(n, slots, scale, LAST if left == -1 else left, t, b, g, h // g),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *held.stride(), *positions.stride()),
        D=d, D0=d0, D1=d1, E=e, E0=e0, E1=e1, M=sizes.queries, N=sizes.keys,
        SAME=values is None and d0 == e0 and not e1, PACKED=k_exponents is not None,
        LARGEST=torch.finfo(q.dtype).max, HARDWARE=converts(q), CAP=softcap or 0.0, PRECISION=precision(q),
        num_warps=sizes.warps, num_stages=sizes.stages,
    )  # fmt: skip
    return outs, lses


def merge_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over all parts of ``decode``: ``[t, b, h, e]`` and ``[t, b, h]``."""
    parts, e = outs.size(0), outs.size(-1)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    width = triton.next_power_of_2(e)
    _merge[(lse.numel(),)](
        outs, lses, out, lse, parts, lse.numel(),
        E=e, WIDTH=width, MOST=MOST_PARTS, PARTS=max(1, ELEMENTS // width), num_warps=4,
    )  # fmt: skip
    return out, lse


def parts_of(slots: int, programs: int, block: int) -> tuple[int, int]:
    """Number of parts of a cache, and slots per part (a multiple of ``block``).

    programs: programs per part.
    """
    blocks = triton.cdiv(slots, block)
    parts = max(1, min(MOST_PARTS, PROGRAMS // programs, blocks // FEWEST_BLOCKS))
    each = max(1, triton.cdiv(blocks, parts))
    return max(1, triton.cdiv(blocks, each)), each * block


def _check(q: Tensor, keys: CachedRows, values: CachedRows | None, e: int, held: Tensor, positions: Tensor) -> None:
    (t, b, h, d), (n, _, g, _) = q.shape, keys[0].shape
    kept = {"keys": (keys, d)} | ({} if values is None else {"values": (values, e)})
    if q.dtype not in DTYPES:
        raise ValueError(f"decoding on a GPU takes bfloat16, float16 and float32, not {q.dtype}: use one of these")
    if max(d, e) > LARGEST_HEAD or (values is None and e > d):
        raise ValueError(f"decoding on a GPU takes head sizes up to {LARGEST_HEAD}, got {d} and {e} of values")
    if h % g:
        raise ValueError(f"{h} query heads are not a multiple of {g} key/value heads")
    check_dense(q=q)
    for name, ((rows, exponents), size) in kept.items():
        check_like(name, rows, q, (n, b, g, size), q.dtype if exponents is None else torch.uint8)
        check_dense(**{name: rows})
        if exponents is not None:
            check_like(f"exponents of {name}", exponents, q, (n, b, g), torch.uint8)
            if not exponents.is_contiguous():
                raise ValueError(f"exponents of {name} must be contiguous, got strides {exponents.stride()}")
    if values is not None and (values[1] is None) != (keys[1] is None):
        raise ValueError("keys and values must both be packed, or neither")
    check_like("held", held, q, (n, b), torch.int32)
    check_like("positions", positions, q, (t, b), torch.int32)


@triton.jit(do_not_specialize=["slots"])
def _decode(
    q, k, v, k_exponents, v_exponents, held, positions, outs, lses,
    slots, part, scale, left, tokens, batch, groups, repeat,
    q_t, q_b, q_h, k_n, k_b, k_g, v_n, v_b, v_g, held_n, held_b, positions_t, positions_b,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SAME: tl.constexpr, PACKED: tl.constexpr,
    LARGEST: tl.constexpr, HARDWARE: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(tokens * repeat, M)
    block, group = tl.program_id(0) % blocks, tl.program_id(0) // blocks % groups
    sequence = (tl.program_id(0) // blocks // groups).to(tl.int64)
    row = block * M + tl.arange(0, M)
    there = row < tokens * repeat
    token, head = (row // repeat).to(tl.int64), (group * repeat + row % repeat).to(tl.int64)

    at = tl.load(positions + token * positions_t + sequence * positions_b, mask=there, other=-1)
    first = tl.where(there, at - left, 2147483647)
    low, high = tl.min(first, 0), tl.max(at, 0)
    query = token * q_t + sequence * q_b + head * q_h
    q0 = load_rows(q, query, 1, there, 0, D0, D)
    q1 = load_rows(q, query, 1, there, D0, D1, D) if D1 > 0 else q0
    held += sequence * held_b
    k += sequence * k_b + group.to(tl.int64) * k_g
    v += sequence * v_b + group.to(tl.int64) * v_g

    m, total = tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32)
    acc0 = tl.zeros([M, E0], tl.float32)
    acc1 = tl.zeros([M, E1], tl.float32) if E1 > 0 else acc0
    begin = tl.program_id(1) * part
    for start in range(begin, tl.minimum(begin + part, slots), N):
        slot = start + tl.arange(0, N)
        position = tl.load(held + slot.to(tl.int64) * held_n, mask=slot < slots, other=2147483647)
        used = (position >= low) & (position <= high)
        of_rows = (slot.to(tl.int64) * batch + sequence) * groups + group
        k0 = _kept(k, k_exponents, of_rows, slot, k_n, used, 0, D0, D, q0.dtype, PACKED, LARGEST, HARDWARE)
        k1 = k0
        if D1 > 0:
            k1 = _kept(k, k_exponents, of_rows, slot, k_n, used, D0, D1, D, q0.dtype, PACKED, LARGEST, HARDWARE)
        s, _ = capped(scores(q0, q1, k0, k1, PRECISION, D1 > 0), scale, CAP)
        seen = (position[None, :] >= first[:, None]) & (position[None, :] <= at[:, None])
        s = tl.where(seen, s, -float("inf"))
        new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(new == -float("inf"), 0.0, new)
        p, fade = tl.exp2(s - base[:, None]), tl.exp2(m - base)
        m, total = new, total * fade + tl.sum(p, 1)
        v0 = k0
        if not SAME:
            v0 = _kept(v, v_exponents, of_rows, slot, v_n, used, 0, E0, E, q0.dtype, PACKED, LARGEST, HARDWARE)
        acc0 = product(p.to(v0.dtype), v0, acc0 * fade[:, None], PRECISION)
        if E1 > 0:
            v1 = _kept(v, v_exponents, of_rows, slot, v_n, used, E0, E1, E, q0.dtype, PACKED, LARGEST, HARDWARE)
            acc1 = product(p.to(v0.dtype), v1, acc1 * fade[:, None], PRECISION)

    out = ((tl.program_id(1).to(tl.int64) * tokens + token) * batch + sequence) * (groups * repeat) + head
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(lses + out, tl.where(total == 0.0, -float("inf"), m * LN_2 + tl.log(divisor)), mask=there)
    store_rows(outs, out, E, there, acc0 / divisor[:, None], 0, E0, E)
    if E1 > 0:
        store_rows(outs, out, E, there, acc1 / divisor[:, None], E0, E1, E)


@triton.jit
def _kept(
    base, exponents, of_rows, slot, stride, used,
    FROM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr,
    PACKED: tl.constexpr, LARGEST: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Columns of cached rows as numbers; 0 for unused slots and beyond the last column."""
    stored = load_rows(base, slot, stride, used, FROM, WIDTH, SIZE)
    if PACKED:
        up = (tl.load(exponents + of_rows, mask=used, other=0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
        number = decoded(stored, 3, HARDWARE) * up[:, None]
        number = tl.where(number > LARGEST, LARGEST, tl.where(number < -LARGEST, -LARGEST, number))
        return number.to(DTYPE)
    else:
        return stored


@triton.jit(do_not_specialize=["parts"])
def _merge(
    outs, lses, out, lse, parts, rows,
    E: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program per (token, head)."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)[None, :]
    every = tl.arange(0, MOST)
    of_parts = tl.load(lses + every.to(tl.int64) * rows + row, mask=every < parts, other=-float("inf"))
    top = tl.max(of_parts, 0)
    top = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = tl.sum(tl.exp(of_parts - top), 0)
    divisor = tl.where(total == 0.0, 1.0, total)
    merged = tl.zeros([WIDTH], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        at = part.to(tl.int64) * rows + row
        weight = tl.exp(tl.load(lses + at, mask=part < parts, other=-float("inf")) - top) / divisor
        inside = (part < parts)[:, None] & (column < E)
        merged += tl.sum(tl.load(outs + at[:, None] * E + column, mask=inside, other=0.0) * weight[:, None], 0)
    tl.store(lse + row, tl.where(total == 0.0, -float("inf"), top + tl.log(divisor)))
    tl.store(out + row * E + tl.arange(0, WIDTH), merged, mask=tl.arange(0, WIDTH) < E)
