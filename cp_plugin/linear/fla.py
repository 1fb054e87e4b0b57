"""Triton kernels of flash-linear-attention (``fla-core``, arXiv 2312.06635) for CUDA.

Layout ``[b, t, heads, size]``, as many key/value heads as query heads; autograd is fla's own, and the backward
recomputes the forward. Packed documents use the chunked kernel, since fla supports them only for batch size 1.
"""

from __future__ import annotations

import importlib.util
from functools import cache

from torch import Tensor

from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.linear.tokens import Tokens


@cache
def installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def forward(x: Tokens) -> Tensor:
    """Causal linear attention of each segment from a zero state: ``[t, b, h, e]`` in the accumulation dtype."""
    repeat = x.q.size(2) // x.k.size(2)
    k, v = (y.repeat_interleave(repeat, 2) for y in (x.k, x.v))
    q, k, v = (y.transpose(0, 1).contiguous() for y in (x.q, k, v))
    decay, beta = (
        None if y is None else y.float().repeat_interleave(repeat, 2).transpose(0, 1).contiguous()
        for y in (x.log_decay, x.beta)
    )
    return _outputs(q, k, v, decay, beta).transpose(0, 1).to(accumulation_dtype(x.q.dtype))


def _outputs(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None) -> Tensor:
    by_key = decay is not None and decay.size(3) > 1
    of_heads = None if decay is None or by_key else decay[..., 0]
    if beta is None:
        from fla.ops.gla import chunk_gla
        from fla.ops.simple_gla import chunk_simple_gla

        found = chunk_gla(q, k, v, g=decay, scale=1.0) if by_key else chunk_simple_gla(q, k, v, g=of_heads, scale=1.0)
    elif by_key:
        from fla.ops.kda import chunk_kda

        found = chunk_kda(q, k, v, g=decay, beta=beta, scale=1.0)
    elif of_heads is not None:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        found = chunk_gated_delta_rule(q, k, v, g=of_heads, beta=beta, scale=1.0)
    else:
        from fla.ops.delta_rule import chunk_delta_rule

        found = chunk_delta_rule(q, k, v, beta=beta, scale=1.0)
    return found[0]
