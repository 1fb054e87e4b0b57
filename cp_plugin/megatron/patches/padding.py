"""Padded sequences (``--cp-pad-sequence``), beyond the batch: stages of a pipeline, and experts.

batch                 tokens behind the end, which count in no loss: ``batch.pad_batch``
attention, states     are causal, so that no token sees what is behind it; in a pack the padding is one more document
stages of a pipeline  are told the length of what they hand on: the padded one
routers               are told which tokens are padding, as Megatron tells them of its own: they do not count in
                      what a router balances, in its losses and in its statistics
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from cp_plugin.megatron import runtime
from cp_plugin.megatron.patches.patching import Call, around

_LENGTHS = ("seq_length", "decoder_seq_length")


@around
def replace_get_forward_backward_func(call: Call) -> Callable[..., Any]:
    """The replacement for ``get_forward_backward_func``: the schedule, for padded sequences."""
    schedule = call.original()

    @functools.wraps(schedule)
    def padded(**named: Any) -> Any:
        cp = runtime.context_parallel()
        lengths = {name: runtime.padded(cp, named[name]) for name in _LENGTHS if named.get(name) is not None}
        return schedule(**named | lengths)

    return padded


@around
def replace_router_forward(call: Call) -> Any:
    """The replacement for ``TopKRouter.forward``: told which of its tokens are padding, while gradients are computed.

    Its tokens are ``[s/cp, b, h]``, with sequence parallelism a tensor-parallel rank's share of them.

    Raises:
        ValueError: for sequences of another length than that of ``--seq-length``.
    """
    if call["padding_mask"] is not None or not torch.is_grad_enabled():
        return call.original()
    rows, batch = call["input"].shape[:2]
    mask = _padding(rows, call["input"].device)
    return call.original(padding_mask=mask.unsqueeze(1).expand(rows, batch))


def _padding(rows: int, device: torch.device) -> Tensor:
    """Whether each of this rank's tokens is padding: bool ``[rows]``."""
    cp, model = runtime.context_parallel(), runtime.model()
    assert model is not None, "sequences are padded by flags"
    tokens = rows * model.parts * cp.size
    if tokens != model.problem.seq_length:
        raise ValueError(
            f"--cp-pad-sequence: a router has {tokens} tokens on all ranks, and those of --seq-length are "
            f"{model.tokens}, padded to {model.problem.seq_length}: it does not know which are padding. Use batches of "
            "that length"
        )
    first = rows * parallel_state.get_tensor_model_parallel_rank() if model.parts > 1 else 0
    return cp.positions(tokens, device)[first : first + rows] >= tokens - model.padding


@around
def replace_token_counts(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """The replacement for ``get_tokens_per_expert_and_token_count``: as many tokens on each rank as on average.

    Megatron weights each rank's part of a load-balancing loss by the rank's own tokens, which fits where all have as
    many. The padding is not on all of them.
    """
    per_expert, _, total = call.original()
    return per_expert, total / call["reduce_group"].size(), total
