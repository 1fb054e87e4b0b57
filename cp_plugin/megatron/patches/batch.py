"""Batch slicing: every context-parallel rank keeps the tokens that the layout gives it.

Replaces ``megatron.core.utils.get_batch_on_this_cp_rank``, under whatever name scripts have imported it, and in newer
versions what calls it for several layouts. Parameters differ between Megatron versions; they are read by name.
``--cp-pad-sequence`` pads a batch before it is sliced.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from cp_plugin.attention.api import ContextParallel
from cp_plugin.megatron import runtime
from cp_plugin.megatron.patches import packing
from cp_plugin.megatron.patches.patching import Call, around

_BEHIND_THE_END = {"tokens": 0, "labels": 0, "loss_mask": 0, "position_ids": 0, "attention_mask": True}
"""What padding consists of; the last dimension of each is the sequence. A mask is True where nothing is seen."""
METADATA = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")


@around
def replace_get_batch(call: Call) -> dict[str, Any]:
    """The replacement for ``get_batch_on_this_cp_rank``."""
    if call.arguments.get("is_hybrid_cp"):
        raise ValueError(
            f"--hybrid-context-parallel is not supported by {runtime.settings().asked}: its groups change from "
            f"batch to batch. Leave it out, or {runtime.settings().instead}"
        )
    cp = runtime.context_parallel(call["cp_group"])
    layout = runtime.between_layers(cp).layout
    if call.arguments.get("use_contiguous_cp") and cp.size > 1 and layout.name != "contiguous":
        raise ValueError(
            "the training script slices its batch with use_contiguous_cp=True, and this model computes in the "
            f"{layout.name} layout: pass it only where the configuration has linear_cp_layout 'contiguous'"
        )
    runtime.note_batch_sliced()
    batch = pad_batch(call["batch"], cp)
    return slice_batch(batch, _on_pack(cp, batch))


def _on_pack(cp: ContextParallel, batch: dict[str, Any]) -> ContextParallel:
    """ValueError for a batch that does not say where its documents begin, in training, if its layout must know."""
    where = batch.get("cu_seqlens") if batch.get("cu_seqlens_padded") is None else batch["cu_seqlens_padded"]
    tokens = next((x.size(1) for key in _BEHIND_THE_END if (x := batch.get(key)) is not None and x.dim() == 2), 0)
    if where is None:
        runtime.require_places(cp)
        return cp
    return packing.on_pack(cp, where, tokens) if tokens else cp


def pad_batch(batch: dict[str, Any], cp: ContextParallel) -> dict[str, Any]:
    """Pad a batch in place to a length that the layout divides, if ``--cp-pad-sequence`` asks for it, and return it.

    Tokens, labels and position ids 0 with a loss mask of 0 come behind the last token. In a pack they are behind the
    last document, which ``packing`` takes for one more; elsewhere no token before them sees them under a causal mask.

    Raises:
        ValueError: for labels without a loss mask, for other entries that have to be padded, and in a model with
            experts for other lengths than that of ``--seq-length``.
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
                f"--cp-pad-sequence: the batch has {key!r} of {length} tokens, and what to put behind their end is not "
                "known: pad the batch in the script, or use a --seq-length that the layout divides"
            )
        if key == "labels" and batch.get("loss_mask") is None:
            raise ValueError(
                "--cp-pad-sequence: the batch has labels and no loss_mask, so the padding would count: return a "
                "loss_mask with the batch, or use a --seq-length that the layout divides"
            )
        both = (0, more, 0, more) if key == "attention_mask" else (0, more)
        batch[key] = pad(value, both, value=_BEHIND_THE_END[key])
    return batch


def _check_experts(length: int, padded: int) -> None:
    """ValueError for what routers would take for a batch of ``--seq-length``; other lengths they refuse themselves."""
    model = runtime.model()
    if model is not None and model.experts and padded == model.problem.seq_length and length != model.tokens:
        raise ValueError(
            f"--cp-pad-sequence: the batch has {length} tokens where --seq-length gives it {model.tokens}, and routers "
            "would not know which are padding: use batches of that length"
        )


@around
def replace_get_batches(call: Call) -> Any:
    """The replacement for ``get_batches_on_this_cp_rank``, which divides each document of a pack by itself, or asks
    ``get_batch_on_this_cp_rank``: here it always asks.

    Raises:
        ValueError: for a batch in several layouts, of which the model has one.
    """
    layouts = {call["boundary_layout"], *call["additional_layouts"]}
    if len(layouts) > 1:
        raise ValueError(
            f"the training script asks for its batch in the layouts {', '.join(sorted(layouts))} at once, and "
            f"{runtime.settings().asked} has one for it: use --linear-cp-layout zigzag"
        )
    return call.original(use_per_sequence_balancing=False)


def slice_batch(batch: dict[str, Any], cp: ContextParallel) -> dict[str, Any]:
    """Slice a batch in place, and return it.

    ``tokens``, ``labels``, ``loss_mask``, ``position_ids`` and other ``[batch, seq, ...]`` tensors are sliced along the
    sequence, ``attention_mask [batch, 1, seq, seq]`` along its queries. Metadata, None, and what is not a tensor with
    a sequence dimension stay as they are, and so do the ``position_ids [3, batch, seq]`` of multimodal RoPE: the angles
    made from them are sliced.

    Raises:
        ValueError: if the sequence length does not suit the layout.
    """
    between = runtime.between_layers(cp)
    for key, value in batch.items():
        dim = 2 if key == "attention_mask" else 1
        if key in METADATA or not isinstance(value, Tensor) or (key == "position_ids" and value.dim() == 3):
            continue
        if value.dim() > dim:
            batch[key] = (cp if key == "attention_mask" else between).shard(value, dim)
    return batch
