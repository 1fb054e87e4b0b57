"""The part of the self-check that concerns attention: a core attention module against the whole sequence on one rank.

The module is called twice, with other numbers of the same shapes, and differentiated in the reverse order: a rank that
attends with what an earlier call left in a buffer is right in the first call, and wrong in the second.

Tolerance: the relative error (norm) may be 1e-5 in float32 (2e-3 on CUDA, where TF32 may be allowed) and 3e-2 in
bfloat16 and float16; a wrong layout gives an error of order 1. Linear attention divides by norms and sums that may be
small: 1e-3 in float32, and the quadratic map, which squares the error of such sums, is checked in float32 only. The
first token's sum has a single term, as small as chance makes it: its output has no gradient there. The random numbers
come from a generator of their own: training sees the states it would have seen without the check.

With ``--cp-fp8`` all this is checked without it, and then once more with it. Rounding to e4m3 (2.6 % of an element in
the mean) makes results 3 % to 7 % wrong, e5m2 in the kernel up to 12 %: that tells but a right result from a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from cp_plugin.megatron import runtime
from cp_plugin.megatron.layers.core_attention import AnyCoreAttention, CoreAttention
from cp_plugin.megatron.layers.linear_attention import LinearCoreAttention
from cp_plugin.megatron.layers.modelopt import unquantized
from cp_plugin.megatron.patches import packing
from cp_plugin.megatron.selfcheck.reference import Reference, linear, softmax

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-2}
TOLERANCE_LINEAR, TOLERANCE_TF32 = 1e-3, 2e-3
TOLERANCE_FP8 = {"comm": 0.15, "compute": 0.25}
_CALLS = 2
_PACKED = 10
"""The seed of the first pack; calls without packing have seeds below."""


class Call(NamedTuple):
    """One call of a core attention, and what it is to give."""

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The module, on this rank's tokens: q, k, v -> ``[s / cp, b, h * d]``."""
    reference: Reference
    whole: Sequence[Tensor]
    """q, k, v and dout of the whole sequence, in the dtype of the check."""
    local: Sequence[Tensor]
    """The same of this rank."""


def attention_problems(
    module: AnyCoreAttention, tokens: int, mine: Tensor, table: Tensor | None, rows: Tensor | None
) -> list[str]:
    """What is wrong with a core attention module.

    Args:
        tokens: length of the whole sequence.
        mine: positions of this rank's tokens.
        table, rows: rotary angles of the whole sequence and of this rank's tokens, None without RoPE.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module(q, k, v, None, attn_mask_type=module.attn_mask_type)

    def call(number: int) -> Call:
        whole = _random_inputs(module, tokens, mine.device, batch=2, seed=number)
        local = [x[mine] for x in whole]
        for i in range(2):  # q and k
            whole[i], local[i] = _rotated(whole[i], table), _rotated(local[i], rows)
        return Call(attend, _reference(module, mine), whole, local)

    return _compare(module, call)


def packed_problems(module: CoreAttention, tokens: int, device: torch.device, table: Tensor | None) -> list[str]:
    """What is wrong with a softmax core attention, or with RoPE, on packs of three documents.

    No two calls have the same pack: what is kept of the bounds of an earlier one must not be used in the next. Args as
    of ``attention_problems``; table: rotary angles from the first position on.
    """

    def call(number: int) -> Call:
        packed = pack_of(tokens, number, device)
        bounds, mine = packed.cu_seqlens_q, _placed(packed, tokens)
        whole = _random_inputs(module, tokens, device, batch=1, seed=_PACKED + number)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return module(q.squeeze(1), k.squeeze(1), v.squeeze(1), None, packed_seq_params=packed).unsqueeze(1)

        return Call(attend, softmax(module, mine, _documents(bounds)), whole, [x[mine] for x in whole])

    problems = [] if table is None else _rotary_problems(pack_of(tokens, 0, device), tokens, table)
    return problems + [f"packed {problem}" for problem in _compare(module, call)]


def _random_inputs(module: AnyCoreAttention, tokens: int, device: torch.device, batch: int, seed: int) -> list[Tensor]:
    """q, k, v and dout of the whole sequence in the dtype of the check, the same on every rank."""
    config = module.config
    tp = config.tensor_model_parallel_size
    heads, groups = config.num_attention_heads // tp, config.num_query_groups // tp
    gated = isinstance(module, LinearCoreAttention) and module.gate is not None
    generator = torch.Generator().manual_seed(20 + seed)
    found = [
        torch.randn(tokens, batch, h, d, generator=generator).to(device, _dtype(module))
        for h, d in (
            (heads, module.head_dim),
            (groups, module.head_dim),
            (groups, module.v_head_dim * (1 + gated)),
            (heads, module.v_head_dim),
        )
    ]
    if module.kind == "linear":
        found[0] += 1
        found[1] += 1
        found[3][0] = 0
    return found


def _compare(module: AnyCoreAttention, call: Callable[[int], Call]) -> list[str]:
    """What of out, dq, dk and dv is further from the reference than it may be, without FP8 and with it.

    call: a call with random numbers of its own for each number it is given.
    """
    with module.context_parallel.without_fp8():
        found = _beyond(module, [call(i) for i in range(_CALLS)])
    fp8 = module.context_parallel.options.fp8
    if fp8 is not None:
        with_it = _beyond(module, [call(_CALLS + i) for i in range(_CALLS)], TOLERANCE_FP8[fp8])
        found += [f"with --cp-fp8 {fp8} {problem}" for problem in with_it]
    return found


def _beyond(module: AnyCoreAttention, calls: Sequence[Call], allowed: float | None = None) -> list[str]:
    leaves = [[x.requires_grad_() for x in call.local[:3]] for call in calls]
    fresh = module.fresh_scaling() if isinstance(module, CoreAttention) else nullcontext()
    with torch.enable_grad(), unquantized(module), fresh:
        outs = [call.attend(*x) for call, x in zip(calls, leaves, strict=True)]
        grads = [
            torch.autograd.grad(out, x, call.local[3].flatten(2))
            for call, x, out in reversed(list(zip(calls, leaves, outs, strict=True)))
        ][::-1]
    kind = "linear " if module.kind == "linear" else ""
    dtype = _dtype(module)
    allowed = allowed or TOLERANCE[dtype]
    if dtype == torch.float32:
        allowed = TOLERANCE_TF32 if outs[0].is_cuda else TOLERANCE_LINEAR if kind else allowed
    found: dict[str, str] = {}
    for number, call in enumerate(calls):
        wanted = call.reference(*call.whole)
        for name, got, want in zip(("out", "dq", "dk", "dv"), (outs[number], *grads[number]), wanted, strict=True):
            error = _error(got, want)
            if name not in found and not error <= allowed:  # nor is an error that is not a number allowed
                when = " in the second call alone" if number else ""
                found[name] = f"{kind}{name} is off by {error:.1e}{when} (relative; allowed {allowed:.0e})"
    return list(found.values())


def pack_of(tokens: int, number: int, device: torch.device) -> PackedSeqParams:
    """A pack of three documents, of which no two have the same.

    document      0 0 0 0 0 1 1 1 1 1 1 1 1 ... 2 2 2        bounds that no layout and no chunk agrees with
    RoPE's place  0 1 2 3 4 0 1 2 3 4 5 6 7 ... 0 1 2
    """
    bounds = [0, 5 + 2 * number, tokens // 2 + 3 + number, tokens]
    where = torch.tensor(bounds, dtype=torch.int32, device=device)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=where, cu_seqlens_kv=where)


def _documents(bounds: Tensor) -> Tensor:
    """The number of each token's document."""
    return torch.repeat_interleave(torch.arange(bounds.numel() - 1, device=bounds.device), bounds.diff())


def _placed(packed: PackedSeqParams, tokens: int) -> Tensor:
    """The positions in the pack of this rank's tokens."""
    where = packing.places(packed)
    assert where is not None
    return packing.on_pack(runtime.context_parallel(), where, tokens).positions(tokens, where.device)


def _rotary_problems(packed: PackedSeqParams, tokens: int, table: Tensor) -> list[str]:
    bounds, group = packed.cu_seqlens_q, parallel_state.get_context_parallel_group()
    mine = _placed(packed, tokens)
    document = _documents(bounds)
    place = torch.arange(tokens, device=mine.device) - bounds[document]
    x = torch.randn(tokens, 2, table.size(1), generator=torch.Generator().manual_seed(0)).to(mine.device)
    longest = int(bounds.diff().max())
    got = rope_utils._apply_rotary_pos_emb_thd(x[mine], bounds, table[:longest, None, None], cp_group=group)
    want = rope_utils._apply_rotary_pos_emb_bshd(x[:, None], table[place][:, None, None]).squeeze(1)
    return [] if torch.allclose(got, want[mine], atol=1e-6) else ["rope of packed documents differs"]


def table_of(embedding: Tensor | tuple[Tensor, float]) -> Tensor:
    """``[s, r]`` from what a rotary embedding returns; YaRN's returns its scale too."""
    table = embedding[0] if isinstance(embedding, tuple) else embedding
    return table.flatten(1)


def _dtype(module: AnyCoreAttention) -> torch.dtype:
    quadratic = isinstance(module, LinearCoreAttention) and module.linear.variant.features.learned_norm
    return torch.float32 if quadratic else module.config.params_dtype


def _reference(module: AnyCoreAttention, mine: Tensor) -> Reference:
    if isinstance(module, LinearCoreAttention):
        return linear(module, mine)
    assert isinstance(module, CoreAttention)
    return softmax(module, mine)


def _rotated(x: Tensor, table: Tensor | None) -> Tensor:
    """Rotate the leading dimensions of x ``[s, b, h, d]`` by the angles ``[s, r]``, in float64; the rest of d stays."""
    if table is None:
        return x
    angles = table[:, None, None].double()
    return torch.cat([_rotate(head.double(), angles).to(x.dtype) for head in x.split(1, 2)], 2)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    turned, rest = x[..., : angles.size(-1)], x[..., angles.size(-1) :]
    a, b = turned.chunk(2, -1)
    return torch.cat((turned * angles.cos() + torch.cat((-b, a), -1) * angles.sin(), rest), -1)


def _error(got: Tensor, want: Tensor) -> float:
    return ((got.flatten().double() - want.flatten()).norm() / want.norm()).item()
