"""Batch slicing: every context-parallel rank keeps the tokens that the layout gives it.

Replaces ``megatron.core.utils.get_batch_on_this_cp_rank``, under whatever name scripts have imported it. Its parameters
differ between Megatron versions; they are read by name.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.megatron import runtime
from cp_plugin.megatron.patches.patching import Call, around

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
    layout = runtime.layout_between_layers(cp)
    if call.arguments.get("use_contiguous_cp") and cp.size > 1 and layout.name != "contiguous":
        raise ValueError(
            "the training script slices its batch with use_contiguous_cp=True, and this model computes in the "
            f"{layout.name} layout: pass it only where the configuration has linear_cp_layout 'contiguous'"
        )
    runtime.note_batch_sliced()
    return slice_batch(call["batch"], cp)


def slice_batch(batch: dict[str, Any], cp: ContextParallel) -> dict[str, Any]:
    """Slice a batch in place, and return it.

    ``tokens``, ``labels``, ``loss_mask``, ``position_ids`` and other ``[batch, seq, ...]`` tensors are sliced along the
    sequence, ``attention_mask [batch, 1, seq, seq]`` along its queries. Metadata, None, and what is not a tensor with
    a sequence dimension stay as they are, and so do the ``position_ids [3, batch, seq]`` of multimodal RoPE: the angles
    made from them are sliced.

    Raises:
        ValueError: if the sequence length does not suit the layout.
    """
    layout = runtime.layout_between_layers(cp)
    for key, value in batch.items():
        dim = 2 if key == "attention_mask" else 1
        if key in METADATA or not isinstance(value, Tensor) or (key == "position_ids" and value.dim() == 3):
            continue
        if value.dim() > dim:
            of_attention = cp.layout if key == "attention_mask" else layout
            batch[key] = of_attention.shard(value, dim, cp.size, cp.numbers[cp.index])
    return batch
