"""The start-up self-check: one tiny batch, context-parallel and on one rank, compared before training.

    token numbers    --> Megatron's get_batch_on_this_cp_rank           --> tokens, labels, loss_mask, position_ids
    rotary table     --> the model's rotary embedding                   --> rope
    q, k, v, rotated --> the model's core attention, forward, backward  --> out, dq, dk, dv

Each must equal the rows that the layout gives this rank of the same quantity for the whole sequence; for attention
those are computed on every rank in float64 and with none of the plugin's kernels or methods. A batch, a RoPE table or
an attention module that is cut in another layout than the others cannot pass.

Tolerance: batch and RoPE are copies and must be equal. For the others the relative error (norm) may be 1e-5 in float32
(2e-3 on CUDA, where TF32 may be allowed) and 3e-2 in bfloat16 and float16; a wrong layout gives an error of order 1.
The random numbers come from a generator of their own: training sees the states it would have seen without the check.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core import utils as megatron_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from cp_plugin.attention import ContextParallel
from cp_plugin.megatron import runtime
from cp_plugin.megatron.attention import CoreAttention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-2}
TOLERANCE_TF32 = 2e-3
_SEED = 20
_TOKENS = 32  # at least so many
_TOKENS_PER_RANK = 2  # and so many: under a causal mask the gradient of the first query alone is zero
_SLICER = "get_batch_on_this_cp_rank"


def run(chunks: Sequence[torch.nn.Module]) -> None:
    """Check this process's model chunks; collective over all ranks.

    Raises:
        ValueError: on every rank, saying which quantities are wrong on which ranks.
    """
    cp = runtime.context_parallel()
    runtime.note_batch_sliced()  # the attention below gets its tokens from here
    problems = [*_check_importers(), *_check_tensors(chunks, cp)]
    cp.mesh.ledger.reset()
    runtime.note_batch_sliced(False)
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, problems)
    failed = [f"rank {rank}: {'; '.join(found)}" for rank, found in enumerate(everyone) if found]
    if failed:
        more = f" (and {len(failed) - 4} more ranks)" if len(failed) > 4 else ""
        raise ValueError(
            f"the self-check of --cp-provider {cp.provider.name} on the {cp.layout.name} layout failed. "
            f"{' | '.join(failed[:4])}{more}. Batch, RoPE and attention must all be cut in the same layout; training "
            "would have gone wrong without an error. --cp-selfcheck off skips this check"
        )
    if dist.get_rank() == 0:
        print(
            "cp_plugin: self-check passed: batch, RoPE and attention, forward and backward, as on one rank", flush=True
        )


def _check_importers() -> list[str]:
    """No loaded module may hold a batch slicer other than Megatron's (which is the plugin's by now)."""
    ours = getattr(megatron_utils, _SLICER)
    modules = [(name, vars(m).get(_SLICER)) for name, m in list(sys.modules.items()) if hasattr(m, "__dict__")]
    return [
        f"module {name} holds a {_SLICER} of its own, which does not know the layout"
        for name, function in modules
        if function is not None and function is not ours
    ]


def _check_tensors(chunks: Sequence[torch.nn.Module], cp: ContextParallel) -> list[str]:
    device = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
    divisor = cp.layout.divisor(cp.size)
    tokens = divisor * ceil(max(_TOKENS, _TOKENS_PER_RANK * cp.size) / divisor)
    mine = cp.positions(tokens).to(device)
    problems = _check_batch(tokens, mine)
    modules = [module for chunk in chunks for module in chunk.modules()]
    table = rows = None
    rotary = _first(modules, (RotaryEmbedding, YarnRotaryEmbedding))
    if rotary is not None:
        table, rows = _table(rotary.get_emb(tokens)), _table(rotary(tokens))
        if rows.shape != table[mine].shape or not torch.equal(rows, table[mine]):
            problems.append("rope differs")
    attention = _first(modules, CoreAttention)
    if attention is not None:
        problems += _check_attention(attention, tokens, mine, table, rows)
    return problems


def _check_batch(tokens: int, mine: Tensor) -> list[str]:
    whole = torch.arange(tokens, device=mine.device).unsqueeze(0)
    keys = ("tokens", "labels", "loss_mask", "position_ids")
    batch: dict[str, Any] = {key: whole + i for i, key in enumerate(keys)}
    batch |= dict.fromkeys(("attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size"))
    slicer = getattr(megatron_utils, _SLICER)
    wanted = inspect.signature(slicer).parameters
    extra = {"is_hybrid_cp": False, "cp_group": parallel_state.get_context_parallel_group()}
    batch = slicer(batch, **{name: value for name, value in extra.items() if name in wanted})
    return [f"{key} differ" for i, key in enumerate(keys) if not torch.equal(batch[key], mine.unsqueeze(0) + i)]


def _check_attention(
    module: CoreAttention, tokens: int, mine: Tensor, table: Tensor | None, rows: Tensor | None
) -> list[str]:
    config = module.config
    tp = config.tensor_model_parallel_size
    heads, groups, size = config.num_attention_heads // tp, config.num_query_groups // tp, config.kv_channels
    dtype, causal = config.params_dtype, module.attn_mask_type == AttnMaskType.causal
    generator = torch.Generator().manual_seed(_SEED)
    whole = [
        torch.randn(tokens, 2, h, size, generator=generator, dtype=torch.float64).to(mine.device)
        for h in (heads, groups, groups, heads)
    ]
    local = [x[mine] for x in whole]
    for i in range(2):  # q and k
        whole[i], local[i] = _rotate(whole[i], table), _rotate(local[i], rows)
    q, k, v, dout = (x.to(dtype) for x in local)
    with torch.enable_grad():
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = module(q, k, v, None, attn_mask_type=module.attn_mask_type)
        grads = torch.autograd.grad(out, leaves, dout.flatten(2))
    scale = size**-0.5 if module.softmax_scale is None else module.softmax_scale
    wanted = _reference(*(x.to(dtype).double() for x in whole), causal=causal, scale=scale)
    names = ("out", "dq", "dk", "dv")
    errors = {name: _error(got, want[mine]) for name, got, want in zip(names, (out, *grads), wanted, strict=True)}
    allowed = TOLERANCE_TF32 if dtype == torch.float32 and mine.is_cuda else TOLERANCE[dtype]
    return [
        f"{name} is off by {error:.1e} (relative; allowed {allowed:.0e})"
        for name, error in errors.items()
        if not error <= allowed  # and so is an error that is not a number
    ]


def _reference(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of plain attention. q, dout ``[s, b, h, d]``; k, v ``[s, b, g, d]``; out ``[s, b, h * d]``."""
    share = q.size(2) // k.size(2)
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        scores = torch.einsum("qbhd,kbhd->bhqk", q, k.repeat_interleave(share, 2)) * scale
        if causal:
            scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        out = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), v.repeat_interleave(share, 2))
        grads = torch.autograd.grad(out, (q, k, v), dout)
    return out.detach().flatten(2), *grads


def _rotate(x: Tensor, table: Tensor | None) -> Tensor:
    """Rotate the leading dimensions of x ``[s, b, h, d]`` by the angles ``[s, r]``; the rest of d stays."""
    if table is None:
        return x
    angles = table[:, None, None].double()
    turned, rest = x[..., : angles.size(-1)], x[..., angles.size(-1) :]
    a, b = turned.chunk(2, -1)
    return torch.cat((turned * angles.cos() + torch.cat((-b, a), -1) * angles.sin(), rest), -1)


def _table(embedding: Tensor | tuple[Tensor, float]) -> Tensor:
    """``[s, r]`` from what a rotary embedding returns; YaRN's returns its scale too."""
    table = embedding[0] if isinstance(embedding, tuple) else embedding
    return table.flatten(1)


def _error(got: Tensor, want: Tensor) -> float:
    return ((got.flatten().double() - want.flatten()).norm() / want.norm()).item()


def _first(modules: Iterable[torch.nn.Module], kind: Any) -> Any:
    return next((module for module in modules if isinstance(module, kind)), None)
