"""The start-up self-check: tiny batches, context-parallel against one rank, before training.

    token numbers    --> Megatron's get_batch_on_this_cp_rank           --> tokens, labels, loss_mask, position_ids
    token numbers    --> Megatron's roll_tensor (with --mtp-num-layers) --> the next tokens
    positions        --> Mamba's reordering (models with M or G layers) --> token order, and back
    positions        --> Megatron's layout manager, where it converts   --> the order of attention, and back
    rotary table     --> the model's rotary embedding                   --> rope
    q, k, v, rotated --> the model's core attention, forward, backward  --> out, dq, dk, dv: ``attention_pass``
    projections      --> gated delta net by a provider of ours          --> out, gradient: ``delta_net_pass``
    gradients of 1   --> the optimizer, if it clips                     --> their norm: ``norm_pass``

Each must equal this rank's rows, by the layout, of the same quantity for the whole sequence: a batch, a RoPE table or
an attention module in another layout than the others cannot pass. Batch and RoPE are copies and must be equal. A model
with two kinds of attention layers has one of each checked.

On CUDA a rank has at least 256 tokens, in multiples of 128: some library kernels refuse smaller tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core import utils as megatron_utils
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.core.layout import Layout
from cp_plugin.megatron import compat, runtime
from cp_plugin.megatron.layers.core_attention import CoreAttention
from cp_plugin.megatron.layers.linear_attention import LinearCoreAttention
from cp_plugin.megatron.patches import delta_net, hybrid, mtp, packing, patching
from cp_plugin.megatron.selfcheck.attention_pass import (
    attention_problems,
    own_attention_problems,
    pack_of,
    packed_problems,
    table_of,
    with_own_sink,
)
from cp_plugin.megatron.selfcheck.delta_net_pass import delta_net_problems
from cp_plugin.megatron.selfcheck.norm_pass import norm_problems
from cp_plugin.placement.documents import DOCUMENTS

_TOKENS = 32
_TOKENS_PER_RANK = 2  # under a causal mask the gradient of the first query alone is zero
_TOKENS_PER_GPU, _TILE = 256, 128
_PACKS = 2
_SLICER = "get_batch_on_this_cp_rank"


def run(chunks: Sequence[torch.nn.Module], optimizer: Any = None) -> None:
    """Check this process's model chunks; collective over all ranks.

    Args:
        optimizer: Megatron's; None in other training loops.

    Raises:
        ValueError: on every rank, naming the wrong quantities and their ranks.
    """
    cp = runtime.context_parallel()
    runtime.note_batch_sliced()  # no script has sliced a batch yet
    device = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
    tokens = tokens_for(cp.layout, cp.size, cuda=device.type == "cuda")
    try:
        outside = runtime.between_layers(cp).positions(tokens, device)
        _refuse([*_check_importers(), *_check_tensors(chunks, cp, tokens, outside)], cp)
        _refuse(norm_problems(optimizer, device), cp)  # from here on batches are right
    finally:
        cp.mesh.ledger.reset()
        runtime.note_batch_sliced(False)
    if dist.get_rank() == 0:
        print(
            "cp_plugin: self-check passed: batch, RoPE and attention match a single rank, forward and backward",
            flush=True,
        )


def _refuse(problems: list[str], cp: ContextParallel) -> None:
    """ValueError on every rank, if there are problems on any; collective over all ranks."""
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, problems)
    failed = [f"rank {rank}: {'; '.join(found)}" for rank, found in enumerate(everyone) if found]
    if failed:
        more = f" (and {len(failed) - 4} more ranks)" if len(failed) > 4 else ""
        raise ValueError(
            f"the self-check of {runtime.settings().asked} on the {cp.layout.name} layout failed. "
            f"{' | '.join(failed[:4])}{more}. Batch, RoPE and attention must be sharded in the same layout, with the "
            "gradients of a single rank; training would have gone wrong silently. --cp-selfcheck off skips this check"
        )


def _check_importers() -> list[str]:
    """No loaded module may hold a batch slicer other than Megatron's, which is the plugin's by now."""
    ours = getattr(megatron_utils, _SLICER)
    return [
        f"module {name} holds a {_SLICER} of its own, unaware of the layout"
        for name, module in patching.importers().items()
        if vars(module).get(_SLICER) not in (None, ours)
    ]


def _check_tensors(chunks: Sequence[torch.nn.Module], cp: ContextParallel, tokens: int, outside: Tensor) -> list[str]:
    """outside: positions of this rank's tokens between the layers."""
    device = outside.device
    mine = cp.positions(tokens).to(device)
    problems = [*_check_batch(tokens, outside), *_check_padding(tokens, cp, device)]
    modules = [module for chunk in chunks for module in chunk.modules()]
    typical = runtime.problem()
    packed = typical is not None and typical.documents
    packs = [pack_of(tokens, number, device) for number in range(_PACKS)] if packed else []
    for pack in packs if cp.layout.name == DOCUMENTS.name else ():
        placed = packing.on_pack(cp, packing.places(pack), tokens).positions(tokens, device)
        problems += [f"{problem} in packs" for problem in _check_batch(tokens, placed, pack)]
    if _first(modules, MultiTokenPredictionBlock) is not None:
        problems += mtp.roll_problems(tokens, packs, device)
    if any(hybrid.keeps_layout(module) for module in modules):
        problems += hybrid.order_problems(tokens, packs, device)
    callable_alone = _without_gathered(chunks)
    layer = next(filter(delta_net.replaced, callable_alone), None)
    if layer is not None:
        problems += delta_net_problems(layer, tokens, packs, device)
    for stack in filter(hybrid.converts, modules):
        problems += hybrid.conversion_problems(stack, outside, mine)
    table = rows = None
    rotary = _first(modules, (RotaryEmbedding, YarnRotaryEmbedding, MultimodalRotaryEmbedding))
    if rotary is not None:
        table, rows = map(table_of, _angles(rotary, tokens))
        if rows.shape != table[mine].shape or not torch.equal(rows, table[mine]):
            problems.append("rope differs")
    for kind in (CoreAttention, LinearCoreAttention):
        attention = _first(callable_alone, kind)
        if attention is not None:
            problems += attention_problems(attention, tokens, mine, table, rows)
    attention = _first(callable_alone, CoreAttention)
    if attention is not None:
        problems += own_attention_problems(attention, tokens, device)
    if attention is not None and packed:
        problems += packed_problems(attention, tokens, device, table)
    return problems


def _without_gathered(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules that can be called alone: not those whose weights a wrapper gathers for its own passes (FSDP).

    Of such an attention, one with a sink of its own is among them; the others are checked by the step of the run.
    """
    found: list[torch.nn.Module] = []
    for chunk in chunks:
        gathers = isinstance(chunk, _BaseDataParallel) and type(chunk) is not DistributedDataParallel
        for module in chunk.modules():
            if not gathers or next(module.parameters(), None) is None:
                found.append(module)
            elif isinstance(module, CoreAttention):
                found.append(with_own_sink(module))
    return found


def tokens_for(layout: Layout, size: int, *, cuda: bool) -> int:
    """Length of the self-check's whole sequence."""
    unit = layout.divisor(size) * (_TILE if cuda else 1)
    least = _TOKENS_PER_GPU * size if cuda else max(_TOKENS, _TOKENS_PER_RANK * size)
    return unit * ceil(least / unit)


def _angles(rotary: Any, tokens: int) -> tuple[Any, Any]:
    """Rotary embeddings of the whole sequence and of this rank's tokens."""
    if not isinstance(rotary, MultimodalRotaryEmbedding):
        return rotary.get_emb(tokens), rotary.forward(tokens)
    ids, section = torch.arange(tokens).expand(3, 1, tokens), [rotary.inv_freq.numel()]
    return rotary(ids, section, cp_group=SimpleNamespace(size=lambda: 1)), rotary(ids, section)


def _check_padding(tokens: int, cp: ContextParallel, device: torch.device) -> list[str]:
    """Check a batch with as much padding as the training's."""
    model = runtime.model()
    if model is None or model.padding == 0:
        return []
    padded = runtime.padded(cp, tokens)
    return [
        f"{problem} in padded batches" for problem in _check_batch(padded - model.padding, cp.positions(padded, device))
    ]


def _check_batch(tokens: int, mine: Tensor, pack: PackedSeqParams | None = None) -> list[str]:
    """Slice a batch of so many tokens; positions beyond must be 0."""
    whole = torch.arange(tokens, device=mine.device).unsqueeze(0)
    keys = ("tokens", "labels", "loss_mask", "position_ids")
    batch: dict[str, Any] = {key: whole + i for i, key in enumerate(keys)}
    batch |= dict.fromkeys(("attention_mask", "cu_seqlens_padded", "max_seqlen", "local_cp_size"))
    batch["cu_seqlens"] = None if pack is None else pack.cu_seqlens_q
    slicer = getattr(megatron_utils, _SLICER)
    batch = slicer(batch, cp_group=parallel_state.get_context_parallel_group(), **compat.not_hybrid(slicer))
    expected = [(mine + i).where(mine < tokens, 0).unsqueeze(0) for i in range(len(keys))]
    return [f"{key} differ" for key, rows in zip(keys, expected, strict=True) if not torch.equal(batch[key], rows)]


def _first(modules: Iterable[torch.nn.Module], kind: Any) -> Any:
    return next((module for module in modules if isinstance(module, kind)), None)
