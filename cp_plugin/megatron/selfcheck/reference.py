"""What the self-check expects of an attention: in float64, with none of the plugin's kernels or methods.

All tokens with all others, of the whole sequence, on every rank: scores are made for one key/value head and as many
queries at a time as ``_ELEMENTS`` allow, so that 64 GPUs with 256 tokens each need no gigabytes for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cp_plugin.linear.variants import LinearAttention
from cp_plugin.megatron.layers.core_attention import CoreAttention
from cp_plugin.megatron.layers.linear_attention import LinearCoreAttention

type Expected = tuple[Tensor, Tensor, Tensor, Tensor]
type Reference = Callable[[Tensor, Tensor, Tensor, Tensor], Expected]
"""q ``[s, b, h, d]``, k ``[s, b, g, d]``, v ``[s, b, g, e]`` and dout ``[s, b, h, e]`` of the whole sequence ->
out, dq, dk and dv in float64, of the tokens that were asked for."""
_ELEMENTS = 1 << 24


def softmax(module: CoreAttention, mine: Tensor, document: Tensor | None = None) -> Reference:
    """Softmax attention as this module is to compute it.

    Args:
        mine: positions of the tokens whose results are wanted.
        document: the number of each token's document, of packed ones.
    """

    def expected(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Expected:
        scale = q.size(3) ** -0.5 if module.softmax_scale is None else module.softmax_scale
        place = torch.arange(q.size(0), device=q.device)
        share = q.size(2) // k.size(2)
        sink = None if module.softmax_offset is None else module.softmax_offset.detach().double().split(share)

        def hidden(rows: slice) -> Tensor:
            found = not_seen(place[rows], place, module.attn_mask_type == AttnMaskType.causal, module.window)
            return found if document is None else found | (document[rows, None] != document)

        heads = zip(q.split(share, 2), k.unbind(2), v.unbind(2), dout.split(share, 2), strict=True)
        by_head = []
        for g, tensors in enumerate(heads):
            attend = partial(_attend, scale=scale, sink=None if sink is None else sink[g])
            by_head.append([x[mine] for x in _differentiated(attend, hidden, *(x.double() for x in tensors))])
        out, dq, dk, dv = zip(*by_head, strict=True)
        return torch.cat(out, 2), torch.cat(dq, 2), torch.stack(dk, 2), torch.stack(dv, 2)

    return expected


def linear(module: LinearCoreAttention, mine: Tensor) -> Reference:
    """Linear attention between the features and the norm of the module itself; args as of ``softmax``."""
    layer, gated = copy.deepcopy(module.linear).double(), module.gate is not None

    def expected(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Expected:
        with torch.enable_grad():
            leaves = [x.double().requires_grad_() for x in (q, k, v)]
            out = _linear(layer, gated, *leaves)
            grads = torch.autograd.grad(out, leaves, dout.double())
        dq, dk, dv = (x[mine] for x in grads)
        return out.detach()[mine], dq, dk, dv

    return expected


def not_seen(queries: Tensor, keys: Tensor, causal: bool, window: tuple[int, int] | None) -> Tensor:
    """Which keys (columns) the queries (rows) at these positions do not see: bool ``[q, k]``."""
    ahead = keys - queries[:, None]
    before, after = window or (-1, -1)
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal or after >= 0:
        hidden |= ahead > (0 if causal else after)
    if before >= 0:
        hidden |= ahead < -before
    return hidden


def _differentiated(
    attend: Callable[..., Tensor], hidden: Callable[[slice], Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> list[Tensor]:
    """out and dq ``[s, b, h, ...]``, dk and dv ``[s, b, ...]`` of the query heads that share one key/value head."""
    outs, dqs, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
    for rows in _chunks(q, k):
        with torch.enable_grad():
            leaves = [x.requires_grad_() for x in (q[rows].detach(), k.detach(), v.detach())]
            out = attend(*leaves, hidden(rows))
            grads = torch.autograd.grad(out, leaves, dout[rows])
        outs.append(out.detach())
        dqs.append(grads[0])
        dk += grads[1]
        dv += grads[2]
    return [torch.cat(outs), torch.cat(dqs), dk, dv]


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, *, scale: float, sink: Tensor | None) -> Tensor:
    """q ``[rows, b, h, d]``, k ``[s, b, d]``, v ``[s, b, e]``, hidden ``[rows, s]``, sink ``[h]``."""
    scores = torch.einsum("qbhd,kbd->bhqk", q, k) * scale
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink[:, None, None].expand(*scores.shape[:3], 1)), -1)
    return torch.einsum("bhqk,kbe->qbhe", scores.softmax(-1)[..., : k.size(0)], v)


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
            for chunk in _chunks(q, k)
        ]
        by_head.append(torch.cat(rows))
    return layer.finish(torch.cat(by_head, 2))


def _linear_rows(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, rows: slice) -> Tensor:
    """Of the query heads that share one key/value head: ``[rows, b, h, e]``.

    decay: a log decay for each token, or the sum ``[s, b, d]`` of those up to and with each token.
    """
    first, end = rows.start, rows.stop
    q, k, v = q[rows], k[:end], v[:end]
    weights: Tensor | float = 1.0
    if decay is not None and decay.dim() == 0:
        place = torch.arange(end, device=q.device)
        weights = ((place[rows, None] - place).clamp(min=0) * decay).exp()
    elif decay is not None:
        before = decay[first]  # of which both are taken relative: the sum alone may be too small for an exp
        q = q * (decay[rows] - before).exp()[:, :, None]
        k = k * (before - decay[:end]).exp()
    scores = torch.einsum("qbhd,kbd->bhqk", q, k) * weights
    return torch.einsum("bhqk,kbe->qbhe", scores.tril(first), v)


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Queries whose scores are made at once."""
    rows = max(1, _ELEMENTS // (k.size(0) * q.size(1) * q.size(2)))
    for first in range(0, q.size(0), rows):
        yield slice(first, min(first + rows, q.size(0)))
