"""Padded sequences beyond the batch: pipeline stages and experts, whoever pads (``--cp-pad-sequence`` or the script).

batch               ``batch.pad_batch`` appends tokens that count in no loss
attention, states   are causal, so no token sees the padding; in a pack it is one more document
pipeline stages     are told the padded length
routers             get a padding mask, so padding counts neither in balancing nor in losses and statistics
losses of experts   with a padding mask are those of all ranks' tokens. Megatron averages the ranks' z-losses, though
                    some have fewer tokens, and takes the tokens of all ranks for those of each
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from cp_plugin.megatron import compat, runtime
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.patches.patching import Call, Run, wraps
from cp_plugin.megatron.rules.cuda_graphs import captures_experts
from cp_plugin.megatron.rules.experts import balancing
from cp_plugin.megatron.rules.rule import nonzero


def _needed(run: Run) -> bool:
    captured = not run.settings.pad_sequence and captures_experts(run.args)  # a graph of Megatron's takes no mask
    return run.settings.active and run.has("num_experts", "num_moe_experts") and not captured


@wraps(
    "megatron.core.transformer.moe.router:TopKRouter.forward",
    "padding, excluded from expert load balancing; z-loss by tokens",
    "input padding_mask",
    otherwise="padding would count in expert load balancing, or a z-loss weight tokens by the rank that holds them",
    when=_needed,
)
def replace_router_forward(call: Call) -> Any:
    """Give ``TopKRouter.forward`` a padding mask in training, if it needs one, and weigh its z-loss by tokens.

    Its input is ``[s/cp, b, h]``, with sequence parallelism ``[s/cp/tp, b, h]``. A script may have masks on some ranks
    only, where something is padded there: the other ranks count all of their tokens, as with a mask of zeros. With a
    z-loss, collective over the context- and tensor-parallel ranks, mask or none.

    Raises:
        ValueError: for padded sequences of another length than ``--seq-length``.
    """
    router, padding = call["self"], call["padding_mask"]
    if not torch.is_grad_enabled():
        return call.original()
    if padding is None and runtime.settings().pad_sequence:
        padding = _padding_of(call["input"])
    config: Any = getattr(router, "config", None)
    if config is None or router.tp_cp_group.size() == 1:
        return call.original(padding_mask=padding)
    tokens, coefficient = call["input"].shape[:2], getattr(config, "moe_z_loss_coeff", None)
    if padding is None and _balances_by_mask(config):
        padding = call["input"].new_zeros(tokens, dtype=torch.bool)
    if coefficient is None:
        return call.original(padding_mask=padding)
    own = torch.full((), prod(tokens), device=call["input"].device) if padding is None else (~padding).sum()
    own = own.float()
    weight = own * router.tp_cp_group.size() / runtime.sum_ranks(own, router.tp_cp_group).clamp(min=1)
    before = 0 if (logged := compat.logged_of_experts("z_loss")) is None else logged.clone()
    scaled = coefficient if config.calculate_per_token_loss else coefficient * weight  # or else it is a sum already
    with patching.lent(config, moe_z_loss_coeff=scaled):
        scores = call.original(padding_mask=padding)
    if (logged := compat.logged_of_experts("z_loss")) is not None:
        logged.sub_(before).mul_(weight).add_(before)
    return scores


def _balances_by_mask(config: Any) -> bool:
    """Return whether routers have a balancing loss that takes a mask: neither fused nor by quantiles."""
    kinds, coefficient = balancing(config), getattr(config, "moe_aux_loss_coeff", None) or 0.0
    able = not getattr(config, "moe_router_fusion", False) and "quantile_balancing" not in kinds
    return able and nonzero(coefficient) and any(kind.endswith("aux_loss") for kind in kinds)


def _padding_of(hidden: Tensor) -> Tensor:
    """Return True for padding of ``--cp-pad-sequence`` in a router's input: ``[s/cp, b]``, or ``[s/cp/tp, b]``."""
    rows, batch = hidden.shape[:2]
    cp, model = runtime.context_parallel(), runtime.model()
    assert model is not None, "padding is asked for by a flag"
    tokens = rows * model.parts * cp.size
    if tokens != model.problem.seq_length:
        raise ValueError(
            f"--cp-pad-sequence: a router has {tokens} tokens on all ranks, but --seq-length has {model.tokens}, "
            f"padded to {model.problem.seq_length}: it cannot tell which are padding. Use batches of that length"
        )
    first = rows * parallel_state.get_tensor_model_parallel_rank() if model.parts > 1 else 0
    padding = cp.positions(tokens, hidden.device)[first : first + rows] >= tokens - model.padding
    return padding.unsqueeze(1).expand(rows, batch)


@wraps(
    "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
    "token counts of experts in padded sequences",
    "reduce_group",
    otherwise="losses of experts would weight tokens by the rank that holds them",
    when=_needed,
)
def replace_token_counts(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces ``get_tokens_per_expert_and_token_count``: with padding, every rank counts the ranks' mean of tokens.

    Megatron weights a rank's load-balancing loss by its own tokens, of which padding leaves ranks unequally many; and
    since it adds up in place, it takes those of all ranks for its own.
    """
    if not call.arguments.get("with_padding_mask"):
        return call.original()
    per_expert, _, total = call.original()
    groups = call.arguments.get("reduce_groups") or (call["reduce_group"],)
    return per_expert, total / prod(group.size() for group in groups), total
