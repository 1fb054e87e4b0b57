"""Argument checks of the attention kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from cp_kernels.offsets import check_dense, check_like, check_rows_apart
from cp_kernels.visible import Runs

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 256
MOST_HEADS = 65535
"""Heads times batch: the limit of a grid's second axis."""


def check(q: Tensor, k: Tensor, v: Tensor, rows: Runs, keys: Runs, dout: Tensor | None = None) -> None:
    """ValueError for tensors that do not fit together or that the kernels do not support."""
    named = {"q": q, "k": k, "v": v} | ({} if dout is None else {"dout": dout})
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
    if any(x.dtype != q.dtype or x.device != q.device for x in named.values()):
        kinds = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in named.items())
        raise ValueError(f"the tensors must share one dtype and one device: {kinds}")
    if q.dtype not in DTYPES:
        raise ValueError(f"the kernels take bfloat16, float16 and float32, not {q.dtype}")
    (s, b, h, d), (t, g, e) = q.shape, (k.size(0), k.size(2), v.size(3))
    if k.shape != (t, b, g, d) or v.shape != (t, b, g, e) or (dout is not None and dout.shape != (s, b, h, e)):
        raise ValueError(f"the tensors do not fit together: {shapes}")
    if h % g:
        raise ValueError(f"{h} query heads are not a multiple of {g} key/value heads: {shapes}")
    if max(d, e) > LARGEST_HEAD:
        raise ValueError(f"the kernels take head sizes up to {LARGEST_HEAD}: {shapes}")
    if b * h > MOST_HEADS:
        raise ValueError(
            f"the kernels take up to {MOST_HEADS} heads of all sequences together, not {b} x {h}: {shapes}"
        )
    for name, x in named.items():
        if x.stride(3) != 1:
            raise ValueError(f"the last dimension of {name} must be dense: its stride is {x.stride(3)}")
    for word, runs, tokens in (("queries", rows, s), ("keys", keys, t)):
        if sum(map(len, runs)) != tokens:
            raise ValueError(f"{sum(map(len, runs))} positions for {tokens} {word}")


def check_sums(out: Tensor, lse: Tensor, q: Tensor, v: Tensor) -> None:
    """ValueError for a running out and lse that cannot be updated in place."""
    check_like("the running out", out, q, (*q.shape[:3], v.size(3)), torch.float32)
    check_like("the running lse", lse, q, q.shape[:3], torch.float32)
    check_rows_apart(out=out, lse=lse)
    check_dense(out=out)
