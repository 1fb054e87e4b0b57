"""The probe of ``get_batches_on_this_cp_rank``, which newer scripts call for a batch in one layout or in several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cp_plugin.megatron.patches import stock
from cp_plugin.megatron.patches.probing import TOKENS

_ENTRIES = ("tokens", "labels", "loss_mask", "position_ids")
_SLICER = "get_batch_on_this_cp_rank"
_OF_ANY_PACK = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "seq_idx")


def batches(original: Callable[..., Any], replacement: Callable[..., Any]) -> str | None:
    """In one layout it leaves the tokens to ``get_batch_on_this_cp_rank``, and describes the whole pack."""
    from megatron.core import utils

    row = torch.arange(TOKENS, device=stock.device()).unsqueeze(0)
    bounds, longest = (torch.tensor(x, dtype=torch.int32, device=row.device) for x in ([[0, 5, TOKENS]], [11]))
    batch = {**dict.fromkeys(_ENTRIES, row), "cu_seqlens": bounds, "max_seqlen": longest}
    sliced = row[:, :3]  # as no layout would have it

    def slicer(given: dict[str, Any], **_: Any) -> dict[str, Any]:
        return given | dict.fromkeys(_ENTRIES, sliced)

    holders = [names for names in (vars(utils), getattr(original, "__globals__", {})) if _SLICER in names]
    before = [names[_SLICER] for names in holders]
    try:
        for names in holders:
            names[_SLICER] = slicer
        with stock.rank(0, 2) as group:
            found = original(batch, boundary_layout="zigzag", is_hybrid_cp=False, cp_group=group)
    finally:
        for names, function in zip(holders, before, strict=True):
            names[_SLICER] = function
    if not all(torch.equal(found.get_batch()[name], sliced) for name in _ENTRIES):
        return "it slices the batch itself instead of calling get_batch_on_this_cp_rank"
    packed = found.get_packed_seq_params()
    if made := [name for name, x in vars(packed).items() if isinstance(x, Tensor) and name not in _OF_ANY_PACK]:
        return f"its PackedSeqParams have {', '.join(made)}, made for Megatron's own layout"
    if not torch.equal(packed.cu_seqlens_q, bounds[0]):
        return f"the documents of a pack begin at {packed.cu_seqlens_q.tolist()}, not at {bounds[0].tolist()}"
    return None
