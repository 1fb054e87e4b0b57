"""Loss normalisation: a micro-batch's loss is one rank's, however unevenly unmasked tokens lie on the ranks.

A script's loss function returns (sum, tokens, report), or the older (mean, report), of this rank's tokens:

    --calculate-per-token-loss   Megatron divides sums by all ranks' tokens at the end. Two-part losses are refused:
                                 Megatron would multiply them by the number of ranks, and never divide by tokens
    otherwise                    Megatron averages the ranks' means. Here, each sum is divided by all ranks' tokens
    validation                   reports are summed over the ranks; --sft would average the ranks' means

A loss or a report that weighs tokens otherwise differs between N ranks and one: ``selfcheck.step``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from cp_plugin.megatron import runtime
from cp_plugin.megatron.patches.patching import Call, wraps
from cp_plugin.megatron.state import STATE


@wraps(
    "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
    "token counts of the loss",
    "loss_func config collect_non_loss_data",
    otherwise="the loss would weight tokens by the rank that holds them",
)
def replace_calc_loss(call: Call) -> Any:
    """Replaces ``forward_step_calc_loss``; ValueError for a loss function that is normalised wrongly."""
    compute = call["loss_func"]
    if compute is None or call["collect_non_loss_data"]:
        return call.original()
    return call.original(loss_func=partial(_sum_over_ranks, compute, call["config"].calculate_per_token_loss))


def _sum_over_ranks(compute: Callable[..., Any], per_token: bool, output: Tensor) -> Any:
    parts = compute(output)
    if not isinstance(parts, tuple) or len(parts) not in (2, 3):
        return parts
    if per_token and len(parts) == 2:
        raise ValueError(
            f"{runtime.settings().flag}: the loss function of this script returns two parts, (mean, report), with "
            "--calculate-per-token-loss. It must return three parts: (sum over this rank's tokens, number of these "
            "tokens, report), as that of Megatron's pretrain_gpt.py does"
        )
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return parts
    loss, *tokens, report = parts
    if STATE.slices is not None:
        STATE.slices.lost(loss, output)
    if not torch.is_grad_enabled():
        pairs = {name: x for name, x in report.items() if isinstance(x, Tensor) and x.numel() == 2}  # sum, tokens
        report = report | {name: runtime.sum_ranks(x, group) for name, x in pairs.items()}
    if tokens and not per_token:
        loss *= group.size() / runtime.sum_ranks(tokens[0], group).clamp(min=1)  # in place, as Megatron divides it
        tokens = [torch.ones_like(tokens[0])]
    return loss, *tokens, report
