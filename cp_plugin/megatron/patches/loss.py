"""Loss normalisation: a micro-batch's loss is one rank's, however unevenly unmasked tokens lie on the ranks.

A script's loss function returns (sum, tokens, report), or the older (mean, report), of this rank's tokens:

    --calculate-per-token-loss   Megatron divides sums by all ranks' tokens at the end. Two-part losses are refused:
                                 Megatron would multiply them by the number of ranks, and never divide by tokens
    otherwise                    Megatron averages the ranks' means. Here, each sum is divided by all ranks' tokens
    validation                   reports are summed over the ranks; --sft would average the ranks' means

In the first micro-batch the loss's gradient tells how much each token weighs. A mean instead of a sum, a mean over this
rank's tokens, and counts already summed over ranks are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isclose
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from cp_plugin.megatron import runtime
from cp_plugin.megatron.patches.patching import Call, around
from cp_plugin.megatron.state import STATE

_TWO_PARTS = "returns two parts, (mean, report), with --calculate-per-token-loss"


@around
def replace_calc_loss(call: Call) -> Any:
    """Replaces ``forward_step_calc_loss``; ValueError for a loss function that is normalised wrongly."""
    compute = call["loss_func"]
    if compute is None or call["collect_non_loss_data"]:
        return call.original()
    return call.original(loss_func=partial(_of_all_ranks, compute, call["config"].calculate_per_token_loss))


def _of_all_ranks(compute: Callable[..., Any], per_token: bool, output: Tensor) -> Any:
    found = compute(output)
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        return found
    if per_token and len(found) == 2:
        raise _refusal(_TWO_PARTS)
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return found
    loss, *tokens, report = found
    if not torch.is_grad_enabled():
        report = _summed_report(report, group)
    elif not STATE.loss_checked:
        STATE.loss_checked = True
        _check_weights(loss, tokens[0] if tokens else None, output, group)
    if tokens and not per_token:
        loss *= group.size() / _summed(tokens[0], group).clamp(min=1)  # in place, as Megatron divides it
        tokens = [torch.ones_like(tokens[0])]
    return loss, *tokens, report


def _check_weights(loss: Tensor, tokens: Tensor | None, output: Tensor, group: dist.ProcessGroup) -> None:
    """ValueError, on all ranks of the group, if the weights of tokens in the losses do not fit the token counts."""
    if not (isinstance(output, Tensor) and output.requires_grad and loss.requires_grad):
        return
    (gradient,) = torch.autograd.grad(loss.sum(), output, retain_graph=True, allow_unused=True)
    weight = torch.zeros((), device=output.device) if gradient is None else gradient.float().sum()
    mine = torch.stack((weight, weight.new_zeros(()) if tokens is None else tokens.detach().sum().to(weight)))
    everyone = mine.new_empty(group.size() * 2)
    dist.all_gather_into_tensor(everyone, mine, group=group)
    weights, counts = everyone.view(-1, 2).T.tolist()
    if wrong := _wrong_weights(weights, None if tokens is None else counts):
        raise _refusal(wrong)


def _wrong_weights(weights: list[float], counts: list[float] | None) -> str:
    """What is wrong with a loss; empty: nothing.

    weights: per rank, the total weight of its tokens in its loss; counts: its token count; None for a two-part loss.
    """
    weighing, size = [w for w in weights if w], len(weights)
    means = bool(weighing) and all(isclose(w, 1, rel_tol=1e-3) for w in weighing)
    if counts is None:
        return "returns two parts, with the mean over this rank's own tokens" if means and len(weighing) > 1 else ""
    weight, count = sum(weights), sum(counts)
    if count > size and (means or isclose(weight, 1, rel_tol=1e-3)):
        return f"returns a mean, where Megatron wants a sum over tokens to divide by their number, {count:.0f}"
    if weighing and isclose(count, size * weight, rel_tol=1e-3):
        return f"counts the tokens of all ranks on each of them: {count:.0f} together, of {weight:.0f}"
    if weighing and isclose(weight, size * count, rel_tol=1e-3):
        return f"sums the losses of all ranks on each of them: {weight:.0f} together, of {count:.0f}"
    return ""


def _refusal(what: str) -> ValueError:
    return ValueError(
        f"{runtime.settings().asked}: the loss function of this script {what}. It must return three parts: (sum over "
        "this rank's tokens, number of these tokens, report), as that of Megatron's pretrain_gpt.py does"
    )


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x, group=group)
    return x


def _summed_report(report: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Pairs (sum, number of tokens) summed over the ranks."""
    return {name: _summed(x, group) if isinstance(x, Tensor) and x.numel() == 2 else x for name, x in report.items()}
