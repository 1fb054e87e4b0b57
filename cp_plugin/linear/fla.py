"""Triton kernels of flash-linear-attention (``fla-core``, arXiv 2312.06635) for CUDA.

Layout ``[b, t, heads, size]``, as many key/value heads as query heads; autograd is fla's own, and the backward
recomputes the forward. Packed documents use the chunked kernel, since fla supports them only for batch size 1.
"""

from __future__ import annotations

import importlib.util
from functools import cache

from torch import Tensor

from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.linear.segment import Tokens


@cache
def installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def forward(x: Tokens) -> Tensor:
    """Causal linear attention of each segment from a zero state: ``[t, b, h, e]`` in the accumulation dtype."""
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    repeat = x.q.size(2) // x.k.size(2)
    k, v = (y.repeat_interleave(repeat, 2) for y in (x.k, x.v))
    q, k, v = (y.transpose(0, 1).contiguous() for y in (x.q, k, v))
    if x.log_decay is None:
        out, _ = chunk_simple_gla(q, k, v, scale=1.0)
    else:
        decay = x.log_decay.float().repeat_interleave(repeat, 2).transpose(0, 1).contiguous()
        if decay.size(3) == 1:
            out, _ = chunk_simple_gla(q, k, v, g=decay[..., 0], scale=1.0)
        else:
            out, _ = chunk_gla(q, k, v, g=decay, scale=1.0)
    return out.transpose(0, 1).to(accumulation_dtype(x.q.dtype))
