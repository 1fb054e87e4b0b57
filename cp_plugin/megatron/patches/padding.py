"""Padded sequences (``--cp-pad-sequence``) beyond the batch: pipeline stages and experts.

batch               ``batch.pad_batch`` appends tokens that count in no loss
attention, states   are causal, so no token sees the padding; in a pack it is one more document
pipeline stages     are told the padded length
routers             get a padding mask, so padding counts neither in balancing nor in losses and statistics. Their
                    logged z-loss is that of all tokens, where Megatron averages the means of ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from cp_plugin.megatron import compat, runtime
from cp_plugin.megatron.patches.patching import Call, around

_LENGTHS = ("seq_length", "decoder_seq_length")


def padded_lengths(named: Mapping[str, Any]) -> dict[str, int]:
    """Return the lengths that a schedule is told for padded sequences.

    named: its arguments.
    """
    cp = runtime.context_parallel()
    return {name: runtime.padded(cp, named[name]) for name in _LENGTHS if named.get(name) is not None}


@around
def replace_router_forward(call: Call) -> Any:
    """In training, give ``TopKRouter.forward`` a padding mask.

    Its input is ``[s/cp, b, h]``, with sequence parallelism ``[s/cp/tp, b, h]``.

    Raises:
        ValueError: for sequences of another length than ``--seq-length``.
    """
    if call["padding_mask"] is not None or not torch.is_grad_enabled():
        return call.original()
    rows, batch = call["input"].shape[:2]
    cp, model = runtime.context_parallel(), runtime.model()
    assert model is not None, "padding is asked for by a flag"
    tokens = rows * model.parts * cp.size
    if tokens != model.problem.seq_length:
        raise ValueError(
            f"--cp-pad-sequence: a router has {tokens} tokens on all ranks, but --seq-length has {model.tokens}, "
            f"padded to {model.problem.seq_length}: it cannot tell which are padding. Use batches of that length"
        )
    first = rows * parallel_state.get_tensor_model_parallel_rank() if model.parts > 1 else 0
    padding = cp.positions(tokens, call["input"].device)[first : first + rows] >= tokens - model.padding
    logged = compat.logged_of_experts("z_loss")
    before = 0 if logged is None else logged.clone()
    found = call.original(padding_mask=padding.unsqueeze(1).expand(rows, batch))
    logged = compat.logged_of_experts("z_loss")
    if logged is not None:
        weight = (~padding).sum() * (tokens / rows / (tokens - model.padding))  # of this rank in the mean over ranks
        logged.sub_(before).mul_(weight).add_(before)
    return found


@around
def replace_token_counts(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces ``get_tokens_per_expert_and_token_count``: every rank counts the ranks' mean number of tokens.

    Megatron weights a rank's load-balancing loss by its own tokens, of which padding leaves ranks unequally many.
    """
    per_expert, _, total = call.original()
    groups = call.arguments.get("reduce_groups") or (call["reduce_group"],)
    return per_expert, total / prod(group.size() for group in groups), total
