"""The part of the self-check that concerns attention: a core attention module against the whole sequence on one rank.

What is expected is computed on every rank in float64 and with none of the plugin's kernels or methods: all tokens with
all others, for linear attention between the features and the norm of the module itself.

Tolerance: the relative error (norm) may be 1e-5 in float32 (2e-3 on CUDA, where TF32 may be allowed) and 3e-2 in
bfloat16 and float16; a wrong layout gives an error of order 1. Linear attention divides by norms and sums that may be
small: 1e-3 in float32, and the quadratic map, which squares the error of such sums, is checked in float32 only. The
random numbers come from a generator of their own: training sees the states it would have seen without the check.

With ``--cp-fp8`` all this is checked without it, and then once more with it. Rounding to e4m3 (2.6 % of an element in
the mean) makes results 3 % to 7 % wrong, e5m2 in the kernel up to 12 %: that tells but a right result from a wrong one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from cp_plugin.linear.variants import LinearAttention
from cp_plugin.megatron.attention import AnyCoreAttention, CoreAttention
from cp_plugin.megatron.linear_attention import LinearCoreAttention
from cp_plugin.megatron.modelopt import unquantized

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-2}
TOLERANCE_LINEAR, TOLERANCE_TF32 = 1e-3, 2e-3
TOLERANCE_FP8 = {"comm": 0.15, "compute": 0.25}
_SEED = 20


def attention_problems(
    module: AnyCoreAttention, tokens: int, mine: Tensor, table: Tensor | None, rows: Tensor | None
) -> list[str]:
    """What is wrong with a core attention module.

    Args:
        tokens: length of the whole sequence.
        mine: positions of this rank's tokens.
        table, rows: rotary angles of the whole sequence and of this rank's tokens, None without RoPE.
    """
    whole = random_inputs(module, tokens, mine.device, batch=2)
    local = [x[mine] for x in whole]
    for i in range(2):  # q and k
        whole[i], local[i] = _rotate(whole[i], table), _rotate(local[i], rows)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module(q, k, v, None, attn_mask_type=module.attn_mask_type)

    return compare(module, attend, _reference(module), whole, mine, local)


def random_inputs(module: AnyCoreAttention, tokens: int, device: torch.device, batch: int) -> list[Tensor]:
    """q, k, v and dout of the whole sequence in float64, the same on every rank."""
    config = module.config
    tp = config.tensor_model_parallel_size
    heads, groups, size = config.num_attention_heads // tp, config.num_query_groups // tp, config.kv_channels
    gated = isinstance(module, LinearCoreAttention) and module.gate is not None
    generator = torch.Generator().manual_seed(_SEED)
    return [
        torch.randn(tokens, batch, h, d, generator=generator, dtype=torch.float64).to(device)
        for h, d in ((heads, size), (groups, size), (groups, size * (1 + gated)), (heads, size))
    ]


def compare(
    module: AnyCoreAttention,
    attend: Attention,
    reference: Attention,
    whole: Sequence[Tensor],
    mine: Tensor,
    local: Sequence[Tensor] | None = None,
) -> list[str]:
    """What of out, dq, dk and dv is further from the reference than it may be, without FP8 and with it.

    Args:
        attend: the module, on this rank's tokens: q, k, v -> ``[s / cp, b, h * d]``.
        reference: on the whole sequence.
        whole, local: q, k, v and dout; local ones only where they are not ``whole[mine]``.
    """
    local = local or [x[mine] for x in whole]
    with module.context_parallel.without_fp8():
        found = _beyond(module, attend, reference, whole, mine, local)
    fp8 = module.context_parallel.options.fp8
    if fp8 is not None:
        with_it = _beyond(module, attend, reference, whole, mine, local, TOLERANCE_FP8[fp8])
        found += [f"with --cp-fp8 {fp8} {problem}" for problem in with_it]
    return found


def _beyond(
    module: AnyCoreAttention,
    attend: Attention,
    reference: Attention,
    whole: Sequence[Tensor],
    mine: Tensor,
    local: Sequence[Tensor],
    allowed: float | None = None,
) -> list[str]:
    dtype = _dtype(module)
    q, k, v, dout = (x.to(dtype) for x in local)
    with torch.enable_grad():
        leaves = [x.requires_grad_() for x in (q, k, v)]
        fresh = module.fresh_scaling() if isinstance(module, CoreAttention) else nullcontext()
        with unquantized(module), fresh:
            out = attend(q, k, v)
        grads = torch.autograd.grad(out, leaves, dout.flatten(2))
    wanted = _differentiated(reference, *(x.to(dtype).double() for x in whole))
    kind = "linear " if module.kind == "linear" else ""
    names = [f"{kind}{name}" for name in ("out", "dq", "dk", "dv")]
    errors = {name: _error(got, want[mine]) for name, got, want in zip(names, (out, *grads), wanted, strict=True)}
    allowed = allowed or TOLERANCE[dtype]
    if dtype == torch.float32:
        allowed = TOLERANCE_TF32 if mine.is_cuda else TOLERANCE_LINEAR if kind else allowed
    return [
        f"{name} is off by {error:.1e} (relative; allowed {allowed:.0e})"
        for name, error in errors.items()
        if not error <= allowed  # and so is an error that is not a number
    ]


def table_of(embedding: Tensor | tuple[Tensor, float]) -> Tensor:
    """``[s, r]`` from what a rotary embedding returns; YaRN's returns its scale too."""
    table = embedding[0] if isinstance(embedding, tuple) else embedding
    return table.flatten(1)


def _dtype(module: AnyCoreAttention) -> torch.dtype:
    quadratic = isinstance(module, LinearCoreAttention) and module.linear.variant.features == "quadratic"
    return torch.float32 if quadratic else module.config.params_dtype


def _reference(module: AnyCoreAttention) -> Attention:
    if isinstance(module, LinearCoreAttention):
        return partial(_linear, copy.deepcopy(module.linear).double(), module.gate is not None)
    assert isinstance(module, CoreAttention)
    return softmax(module)


def softmax(module: CoreAttention, document: Tensor | None = None) -> Attention:
    """Attention of the whole sequence as this module is to compute it; ``document``: the number of each token's."""
    scale = module.config.kv_channels**-0.5 if module.softmax_scale is None else module.softmax_scale

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.size(0), device=q.device)
        hidden = _hidden(place, module.attn_mask_type == AttnMaskType.causal, module.window)
        if document is not None:
            hidden |= document[:, None] != document
        return _softmax(q, k, v, scale, hidden, module.softmax_offset)

    return attend


def _differentiated(attend: Attention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """out ``[s, b, h * d]``, dq, dk, dv."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = attend(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), dout)
    return out.detach().flatten(2), *grads


def _hidden(place: Tensor, causal: bool, window: tuple[int, int] | None) -> Tensor:
    """Which keys (columns) a query at a place does not see."""
    ahead = place - place[:, None]
    before, after = window or (-1, -1)
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal or after >= 0:
        hidden |= ahead > (0 if causal else after)
    if before >= 0:
        hidden |= ahead < -before
    return hidden


def _softmax(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor, sink: Tensor | None) -> Tensor:
    share = q.size(2) // k.size(2)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k.repeat_interleave(share, 2)) * scale
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        beside = sink.detach().double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, beside), -1)
    weights = scores.softmax(-1)[..., : k.size(0)]
    return torch.einsum("bhqk,kbhd->qbhd", weights, v.repeat_interleave(share, 2))


def _linear(layer: LinearAttention, gated: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gate = None
    if gated:
        v, gate = v.chunk(2, 3)
    x = layer.prepare(q, k, v, gate)
    share = x.q.size(2) // x.k.size(2)
    q, k, v = x.q * x.scale, x.k.repeat_interleave(share, 2), x.v.repeat_interleave(share, 2)
    weights: Tensor | float = 1.0
    if x.log_decay is not None and x.log_decay.dim() == 1:
        place = torch.arange(q.size(0), device=q.device)
        distance = (place[:, None] - place).clamp(min=0)
        weights = (distance * x.log_decay.repeat_interleave(share)[:, None, None]).exp()
    elif x.log_decay is not None:
        total = x.log_decay.cumsum(0).repeat_interleave(share, 2)
        q, k = q * total.exp(), k * (-total).exp()
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * weights
    return layer.finish(torch.einsum("bhqk,kbhd->qbhd", scores.tril(), v))


def _rotate(x: Tensor, table: Tensor | None) -> Tensor:
    """Rotate the leading dimensions of x ``[s, b, h, d]`` by the angles ``[s, r]``; the rest of d stays."""
    if table is None:
        return x
    angles = table[:, None, None].double()
    turned, rest = x[..., : angles.size(-1)], x[..., angles.size(-1) :]
    a, b = turned.chunk(2, -1)
    return torch.cat((turned * angles.cos() + torch.cat((-b, a), -1) * angles.sin(), rest), -1)


def _error(got: Tensor, want: Tensor) -> float:
    return ((got.flatten().double() - want.flatten()).norm() / want.norm()).item()
