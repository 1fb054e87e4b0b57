"""The self-check's reference: attention of the whole sequence in float64, without the plugin's kernels and methods."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cp_plugin.linear.variants import LinearAttention
from cp_plugin.megatron.layers.core_attention import CoreAttention
from cp_plugin.megatron.layers.linear_attention import LinearCoreAttention
from cp_plugin.testing import oracle

type Expected = tuple[Tensor, Tensor, Tensor, Tensor]
type Reference = Callable[[Tensor, Tensor, Tensor, Tensor], Expected]
"""q ``[s, b, h, d]``, k ``[s, b, g, d]``, v ``[s, b, g, e]`` and dout ``[s, b, h, e]`` of the whole sequence ->
out, dq, dk and dv of the requested tokens in float64."""


def softmax(module: CoreAttention, mine: Tensor, document: Tensor | None = None) -> Reference:
    """The oracle's softmax attention for this module.

    Args:
        mine: positions of the requested tokens.
        document: each token's document index if packed.
    """

    def expected(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Expected:
        place = torch.arange(q.size(0), device=q.device)

        def hidden(rows: slice) -> Tensor:
            causal = module.attn_mask_type == AttnMaskType.causal
            found = oracle.not_seen(place[rows], place, causal, module.window)
            return found if document is None else found | (document[rows, None] != document)

        scale, sink = module.softmax_scale, module.softmax_offset
        return oracle.softmax_reference(q, k, v, dout, hidden, scale=scale, sink=sink, wanted=mine)

    return expected


def linear(module: LinearCoreAttention, mine: Tensor) -> Reference:
    """Linear attention with the module's own features and norm; args as in ``softmax``."""
    layer, gated = copy.deepcopy(module.linear).double(), module.gate is not None

    def expected(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Expected:
        with torch.enable_grad():
            leaves = [x.double().requires_grad_() for x in (q, k, v)]
            out = _linear(layer, gated, *leaves)
            grads = torch.autograd.grad(out, leaves, dout.double())
        dq, dk, dv = (x[mine] for x in grads)
        return out.detach()[mine], dq, dk, dv

    return expected


def _linear(layer: LinearAttention, gated: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gate = None
    if gated:
        v, gate = v.chunk(2, 3)
    x = layer.prepare(q, k, v, gate)
    share = x.q.size(2) // x.k.size(2)
    heads = zip((x.q * x.scale).split(share, 2), x.k.unbind(2), x.v.unbind(2), strict=True)
    by_head = []
    for g, (q, k, v) in enumerate(heads):
        decay = x.log_decay
        if decay is not None:
            decay = decay[g] if decay.dim() == 1 else decay[:, :, g].cumsum(0)
        rows = [
            checkpoint(_linear_rows, q, k, v, decay, chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in oracle.chunks(q, k)
        ]
        by_head.append(torch.cat(rows))
    return layer.finish(torch.cat(by_head, 2))


def _linear_rows(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, rows: slice) -> Tensor:
    """Rows ``[rows, b, h, e]`` of the query heads that share one key/value head.

    decay: a log decay per token (scalar), or the inclusive sums ``[s, b, d]``.
    """
    first, end = rows.start, rows.stop
    q, k, v = q[rows], k[:end], v[:end]
    weights: Tensor | float = 1.0
    if decay is not None and decay.dim() == 0:
        place = torch.arange(end, device=q.device)
        weights = ((place[rows, None] - place).clamp(min=0) * decay).exp()
    elif decay is not None:
        before = decay[first]  # both exponents are relative to this one: sums alone may underflow
        q = q * (decay[rows] - before).exp()[:, :, None]
        k = k * (before - decay[:end]).exp()
    scores = torch.einsum("qbhd,kbd->bhqk", q, k) * weights
    return torch.einsum("bhqk,kbe->qbhe", scores.tril(first), v)
