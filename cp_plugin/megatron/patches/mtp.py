"""Multi-token prediction (``--mtp-num-layers``) in any token layout.

Its layers get the plugin's attention by the same spec. Two further functions are replaced:

    ``roll_tensor``        next token of every token: assumes zigzag; here ``engine.attention.shift``. The last
                           token of a packed document has no next one. Some versions roll several tensors in one call
    ``process_mtp_loss``   divides by this rank's unmasked tokens, whose number differs between ranks; here by the
                           tokens of all ranks
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.shift import shift
from cp_plugin.megatron import runtime
from cp_plugin.megatron.micro_batch import MicroBatch
from cp_plugin.megatron.patches.patching import Call, Run, replaces, wraps

_FOLLOWING = "_cp_plugin_following"
"""Attribute of a loss mask: the mask of the next depth."""


def _rolled(
    cp: ContextParallel, x: Tensor, dim: int, by: int, packed: PackedSeqParams | None, fill: float = 0
) -> Tensor:
    """``x`` shifted along the sequence, or within each document of a pack, and filled at the ends."""
    batch = MicroBatch.find(cp, packed, x.size(dim) * cp.size)
    shifted, documents = shift(batch.cp, x, dim, by), batch.documents
    if documents is None and not fill:
        return shifted
    places = batch.positions(x.device)
    within = places + by < batch.tokens
    if documents is not None:
        within &= documents.number_of(places) == documents.number_of(places + by)
    return shifted.movedim(dim, -1).where(within, fill).movedim(-1, dim)


def _with_following(mask: Tensor, depths: int, cp: ContextParallel, packed: PackedSeqParams | None) -> Tensor:
    """The mask for ``process_mtp_loss``, which sums it, and then rolls it once for each depth and sums that.

    Its sum is the ranks' mean number of tokens, those of the rolled masks are the ranks' total. The weights of these
    are multiplied by the number of ranks, since Megatron averages the quotients over the ranks.
    """
    masks = [mask]
    for _ in range(depths):
        masks.append(_rolled(cp, masks[-1], -1, 1, packed))
    counts = torch.stack([m.sum() for m in masks])
    for axis in cp.mesh.axes:
        counts = cp.mesh.all_gather(axis, (counts.unsqueeze(0),)).wait()[0].sum(0)
    following = None
    for weights, count in zip(reversed(masks[1:]), reversed(counts[1:].unbind()), strict=True):
        following = _counted(weights * cp.size, count, following)
    return _counted(mask, counts[0] / cp.size, following)


def _counted(mask: Tensor, count: Tensor, following: Tensor | None) -> Tensor:
    """The mask, with this sum, and the mask of the next depth."""
    mask = mask.view_as(mask)  # the caller's keeps its own sum
    vars(mask).update({"sum": lambda: count, _FOLLOWING: following})
    return mask


def _needed(run: Run) -> bool:
    return run.settings.active and run.has("mtp_num_layers")


@replaces(
    "megatron.core.transformer.multi_token_prediction:roll_tensor",
    "layout of multi-token prediction",
    "shifts dims cp_group packed_seq_params",
    optional="tensor return_sum tensors fill_values sequence_fields roll_depth",
    otherwise="multi-token prediction would learn the wrong next tokens",
    when=_needed,
)
def replace_roll_tensor(call: Call) -> Any:
    """Replaces ``roll_tensor``: the tensor shifted along the whole sequence, and its sum on this rank.

    Of several tensors, the list of the shifted ones.
    """
    several, group, packed = "tensors" in call.arguments, call["cp_group"], call["packed_seq_params"]
    tensors = call["tensors"] if several else [call["tensor"]]
    if _alone(group) or any(x is None for x in tensors):
        _require_alone(group)
        return call.original()
    cp, fills = runtime.context_parallel(group), call.arguments.get("fill_values") or [0] * len(tensors)
    rolled = []
    for x, fill in zip(tensors, fills, strict=True):
        following = getattr(x, _FOLLOWING, None)
        rolled.append(_rolled(cp, x, call["dims"], -call["shifts"], packed, fill) if following is None else following)
    if several:
        return rolled
    return rolled[0], rolled[0].sum() if call.arguments.get("return_sum", True) else None


@wraps(
    "megatron.core.transformer.multi_token_prediction:process_mtp_loss",
    "token counts of multi-token prediction",
    "labels loss_mask cp_group packed_seq_params config",
    otherwise="the loss of multi-token prediction would weight tokens by the rank that holds them",
    when=_needed,
)
def replace_process_mtp_loss(call: Call) -> Tensor:
    """Call ``process_mtp_loss`` with masks and counts over all ranks."""
    labels, mask, group = call["labels"], call["loss_mask"], call["cp_group"]
    tokens, packed = call.arguments.get("input_ids"), call["packed_seq_params"]
    if _alone(group) or (labels is None and tokens is None):
        return call.original()
    cp = runtime.context_parallel(group)
    mask = torch.ones_like(tokens if labels is None else labels, dtype=torch.float32) if mask is None else mask
    if labels is None:  # as in reinforcement learning: labels are the next tokens
        labels, mask = (_rolled(cp, x, -1, 1, packed) for x in (tokens, mask))
    return call.original(labels=labels, loss_mask=_with_following(mask, call["config"].mtp_num_layers, cp, packed))


def _require_alone(group: dist.ProcessGroup | None) -> None:
    """ValueError if a caller leaves out the group of tokens that are divided."""
    size = parallel_state.get_context_parallel_world_size() or 1
    if _alone(group) and size > 1:
        passed = "no group" if group is None else "a group of one rank"
        raise ValueError(
            f"multi-token prediction of this Megatron calls roll_tensor with {passed}, though tokens are split over "
            f"{size} context-parallel ranks: each would take the next tokens from its own part. Use a Megatron without "
            "this change, or --cp-provider upstream"
        )


def _alone(group: dist.ProcessGroup | None) -> bool:
    return group is None or group.size() == 1
