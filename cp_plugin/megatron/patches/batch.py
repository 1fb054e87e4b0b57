"""Batch slicing: every context-parallel rank keeps the tokens that the layout assigns to it.

Replaces ``megatron.core.utils.get_batch_on_this_cp_rank`` and, in newer versions, its caller for several layouts. Their
parameters differ between Megatron versions and are read by name. ``--cp-pad-sequence`` pads batches before slicing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.functional import pad

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.placement.documents import get_layout
from cp_plugin.megatron import runtime
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.micro_batch import MicroBatch
from cp_plugin.megatron.patches.patching import Call, Run, replaces, wraps
from cp_plugin.megatron.rules.run import packed_by
from cp_plugin.megatron.state import STATE

_BEHIND_THE_END = {
    "tokens": 0,
    "labels": 0,
    "loss_mask": 0,
    "position_ids": 0,
    "attention_mask": True,
    "padding_mask": True,
}
"""Padding value of each entry; its last dimension is the sequence. Masks are True where they hide."""
METADATA = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")


@replaces(
    "megatron.core.utils:get_batch_on_this_cp_rank",
    "layout of the batch",
    "batch",
    optional="cp_group is_hybrid_cp hybrid_cp_group_func use_per_sequence_balancing use_contiguous_cp",
    otherwise="ranks would train on tokens that do not match their angles and masks",
)
def replace_get_batch(call: Call) -> dict[str, Any]:
    """Replaces ``get_batch_on_this_cp_rank``."""
    if call.arguments.get("is_hybrid_cp"):
        raise ValueError(
            f"--hybrid-context-parallel is not supported by {runtime.settings().flag}: its groups change from "
            f"batch to batch. Leave it out, or {runtime.settings().instead}"
        )
    cp = runtime.context_parallel(call["cp_group"])
    layout = runtime.batch_layout(cp).layout
    if call.arguments.get("use_contiguous_cp") and cp.size > 1 and layout.name != "contiguous":
        raise ValueError(
            "the training script slices its batch with use_contiguous_cp=True, but this model computes in the "
            f"{layout.name} layout: pass it only if the configuration has linear_cp_layout 'contiguous'"
        )
    return _slice(call["batch"], cp, call["cp_group"])


@wraps(
    "megatron.core.utils:get_thd_batch_on_this_cp_rank",
    "layout of packed batches, which some versions slice by a function of their own",
    "batch cu_seqlens cu_seqlens_padded max_seqlen cp_size",
    otherwise="ranks would train on tokens of a pack that do not match their angles and masks",
    required=False,
)
def replace_get_thd_batch(call: Call) -> tuple[dict[str, Any], Any]:
    """Slice a packed batch by the layout after ``get_thd_batch_on_this_cp_rank`` has made its ``PackedSeqParams``.

    Raises:
        ValueError: for another number of ranks than the context-parallel group's.
    """
    group = parallel_state.get_context_parallel_group()
    cp = runtime.context_parallel(group)
    if call["cp_size"] not in (None, cp.size):
        raise ValueError(
            f"the training script slices a packed batch for {call['cp_size']} ranks, but there are {cp.size} "
            "context-parallel ranks: groups that change from batch to batch are not supported"
        )
    bounds = {name: call[name] for name in ("cu_seqlens", "cu_seqlens_padded")}
    batch, packed = call.original(cp_size=1, cp_rank=0)
    sliced = _slice({**batch, **bounds}, cp, group)
    return {name: value for name, value in sliced.items() if name in batch}, packed


def _slice(batch: dict[str, Any], cp: ContextParallel, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Pad and slice a batch, in place."""
    batch = pad_batch(batch, cp)
    bounds = batch.get("cu_seqlens") if batch.get("cu_seqlens_padded") is None else batch["cu_seqlens_padded"]
    tokens = next((x.size(1) for key in _BEHIND_THE_END if (x := batch.get(key)) is not None and x.dim() == 2), 0)
    cp = MicroBatch.cut(cp, bounds, tokens).cp
    if STATE.first_batch is not None:
        compare, STATE.first_batch = STATE.first_batch, None
        compare(batch, group)
    if STATE.slices is not None:
        STATE.slices.sliced(batch, runtime.batch_layout(cp), group)
    return slice_batch(batch, cp)


def pad_batch(batch: dict[str, Any], cp: ContextParallel) -> dict[str, Any]:
    """Pad a batch in place to a length that the layout divides, with ``--cp-pad-sequence``; return the batch.

    Tokens, labels and position ids are padded with 0, with a loss mask of 0. In a pack the padding is one more
    document; elsewhere the causal mask hides it.

    Raises:
        ValueError: for labels without a loss mask, for unknown entries that need padding, and, in a model with
            experts, for another length than ``--seq-length``.
    """
    for key, value in batch.items():
        if key in METADATA or not isinstance(value, Tensor) or value.dim() < 2:
            continue
        length = value.size(-1 if key in _BEHIND_THE_END else 1)
        more = runtime.padded(cp, length) - length
        if more == 0:
            continue
        _check_experts(length, length + more)
        if key not in _BEHIND_THE_END:
            raise ValueError(
                f"--cp-pad-sequence: the batch has {key!r} of {length} tokens, which the plugin cannot pad: pad the "
                "batch in the script, or use a --seq-length that needs no padding"
            )
        if key == "labels" and batch.get("loss_mask") is None:
            raise ValueError(
                "--cp-pad-sequence: the batch has labels and no loss_mask, so padding would count in the loss: return "
                "a loss_mask with the batch, or use a --seq-length that needs no padding"
            )
        both = (0, more, 0, more) if key == "attention_mask" else (0, more)
        batch[key] = pad(value, both, value=_BEHIND_THE_END[key])
    return batch


def _check_experts(length: int, padded: int) -> None:
    """ValueError if routers would mistake the batch for one of ``--seq-length``; they refuse other lengths."""
    model = runtime.model()
    if model is not None and model.experts and padded == model.problem.seq_length and length != model.tokens:
        raise ValueError(
            f"--cp-pad-sequence: the batch has {length} tokens instead of the {model.tokens} of --seq-length, so "
            "routers would not know which are padding: use batches of that length"
        )


@wraps(
    "megatron.core.context_parallel.utils:get_batches_on_this_cp_rank",
    "layout of the batch, if a script may request several",
    "batch cp_group boundary_layout additional_layouts use_per_sequence_balancing",
    otherwise="ranks would train on tokens that do not match their angles and masks",
    required=False,
)
def replace_get_batches(call: Call) -> Any:
    """Replaces ``get_batches_on_this_cp_rank``: the batch in the model's layout, never divided per document.

    Megatron's name for this layout is "zigzag"; a script may also use the layout's own. Additional views have the
    layout that their names say: the model's, zigzag or contiguous. ValueError for others, and for packs in several.
    """
    cp, boundary = runtime.context_parallel(call["cp_group"]), call["boundary_layout"]
    views = [name for name in dict.fromkeys(call["additional_layouts"]) if name != boundary]
    if cp.size > 1:
        _check_layouts(cp, boundary, views, packed=call["batch"].get("cu_seqlens") is not None)
    whole = dict(call["batch"])
    sliced = call.original(additional_layouts=(), use_per_sequence_balancing=False)
    for name in views:
        view = cp if name in (cp.layout.name, boundary) or cp.size == 1 else cp.with_layout(get_layout(name))
        sliced.batches_by_layout[name] = slice_batch(pad_batch(dict(whole), cp), cp, view)
        sliced.packed_seq_params_by_layout[name] = sliced.get_packed_seq_params()
    return sliced


def _check_layouts(cp: ContextParallel, boundary: str, views: Sequence[str], *, packed: bool) -> None:
    own = {cp.layout.name, runtime.batch_layout(cp).layout.name}
    between = {"contiguous"} if runtime.converted() else {"zigzag", *own}
    in_order = cp.numbers == tuple(range(cp.size))  # a grid numbers its ranks otherwise than Megatron
    others = own | ({"zigzag", "contiguous"} if in_order else set())
    if boundary not in between:
        wrong, right = boundary, between
    else:
        wrong, right = next((name for name in views if name not in others), None), others
    if wrong is not None:
        raise ValueError(
            f"the training script requests its batch in the {wrong} layout, but {runtime.settings().flag} computes in "
            f"the {cp.layout.name} layout: request {' or '.join(sorted(right))}"
        )
    if views and packed:
        raise ValueError(
            f"the training script requests packed documents in the layouts {', '.join((boundary, *views))}, and "
            f"{runtime.settings().flag} shards a pack in only one of them: request {boundary} alone"
        )


def slice_batch(batch: dict[str, Any], cp: ContextParallel, between: ContextParallel | None = None) -> dict[str, Any]:
    """Slice a batch in place; returns the batch.

    Args:
        cp: with attention's layout, for the mask.
        between: with the layout of everything else; None: that between the model's layers.

    ``[batch, seq, ...]`` tensors are sliced along the sequence, ``attention_mask [batch, 1, seq, seq]`` along its
    queries. Metadata and everything without a sequence dimension stay, as do the ``position_ids [3, batch, seq]`` of
    multimodal RoPE, whose angles are sliced instead.

    Raises:
        ValueError: if the layout cannot divide the sequence.
    """
    between = between or runtime.batch_layout(cp)
    for key, value in batch.items():
        dim = 2 if key == "attention_mask" else 1
        if key in METADATA or not isinstance(value, Tensor) or (key == "position_ids" and value.dim() == 3):
            continue
        if value.dim() > dim:
            batch[key] = (cp if key == "attention_mask" else between).shard(value, dim)
    return batch


def _packs_in_a_pipeline(run: Run) -> bool:
    packed = run.args is not None and packed_by(run.args) and run.args.pipeline_model_parallel_size > 1
    return bool(packed) and (run.settings.active or cpu.active())


@wraps(
    "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.__init__",
    "data of packed documents on every pipeline stage",
    "is_built_on_rank",
    otherwise="pipeline stages between the first and the last would have no data",
    when=_packs_in_a_pipeline,
)
def replace_dataset_builder(call: Call) -> None:
    """Replacement for ``BlendedMegatronDatasetBuilder.__init__``: build on the first tensor-parallel rank."""
    call.original(is_built_on_rank=lambda: parallel_state.get_tensor_model_parallel_rank() == 0)
