"""Loss normalisation: a micro-batch's loss is one rank's, however unevenly unmasked tokens lie on the ranks.

A script's loss function returns (sum, tokens, report), or the older (mean, report), of this rank's tokens:

    --calculate-per-token-loss   Megatron divides sums by all ranks' tokens at the end. Two-part losses are refused:
                                 Megatron would multiply them by the number of ranks, and never divide by tokens
    otherwise                    Megatron averages the ranks' means. Here, each sum is divided by all ranks' tokens
    validation                   reports are summed over the ranks; --sft would average the ranks' means

In the first micro-batch the loss's gradient tells how much each token weighs. A mean instead of a sum, a mean over this
rank's tokens, and counts already summed over ranks are refused. So are reports that Megatron would log as another loss
than these: it divides the ranks' summed first numbers by their summed second ones, and takes a single number as it is.
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
    if STATE.slices is not None:
        STATE.slices.lost(loss, output)
    if not torch.is_grad_enabled():
        report = _summed_report(report, group)
    elif not STATE.loss_checked:
        STATE.loss_checked = True
        _check_weights(loss, tokens[0] if tokens else None, output, group)
        if isinstance(report, dict):
            _check_report(loss, tokens[0] if tokens else None, report, group)
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


def _check_report(loss: Tensor, tokens: Tensor | None, report: dict[str, Any], group: dist.ProcessGroup) -> None:
    """ValueError, on all ranks of the group, if a logged value would be the loss of other tokens than the loss."""
    logged = {name: x for name, x in report.items() if isinstance(x, Tensor) and x.numel() in (1, 2)}
    count = loss.new_ones(()) if tokens is None else tokens.sum()
    values = [loss.sum(), count, *(x for pair in logged.values() for x in pair.flatten())]
    mine = torch.stack([x.detach().to(loss.device, torch.float64) for x in values])
    everyone = mine.new_empty(group.size() * len(values))
    dist.all_gather_into_tensor(everyone, mine, group=group)
    losses, counts, *others = everyone.view(group.size(), -1).T.tolist()
    counted = None if tokens is None else counts
    for name, x in logged.items():
        pair, others = others[: x.numel()], others[x.numel() :]
        if wrong := _wrong_report(losses, counted, *pair):
            wrong = f"reports {name!r} as {wrong}"
            raise _refusal(wrong)


def _wrong_report(
    losses: list[float], counts: list[float] | None, first: list[float], second: list[float] | None = None
) -> str:
    """What is wrong with a reported number, or a pair (sum, count); empty: nothing, or it is not of the loss.

    All per rank. losses: sums over its tokens, with their counts; None: its summands of the mean.
    """
    size = len(losses)
    mean = sum(losses) / sum(counts) if counts and sum(counts) else sum(losses)
    if mean == 0:
        return ""
    own = [a / n if n else 0.0 for a, n in zip(losses, counts or [1.0] * size, strict=True)]
    of_own = all(isclose(a, b, rel_tol=1e-4, abs_tol=1e-12) for a, b in zip(first, own, strict=True))
    if second is None:
        return "one number, of this rank's tokens alone" if of_own and not _alike(own) else ""
    if sum(second) == 0:
        return ""
    logged = sum(first) / sum(second)
    if isclose(logged, size * mean, rel_tol=1e-4) and _alike(first):
        return f"the sum over all ranks with this rank's own count: {size} times the loss, {mean:.6g}"
    if isclose(logged, mean / size, rel_tol=1e-4) and _alike(second):
        return f"this rank's own sum with the count of all ranks: 1/{size} of the loss, {mean:.6g}"
    if counts and of_own and set(second) == {1.0} and not isclose(logged, mean, rel_tol=1e-4):
        return f"the mean over this rank's tokens, as if all ranks had equally many: {logged:.6g} for {mean:.6g}"
    return ""


def _alike(x: list[float]) -> bool:
    return all(isclose(one, x[0], rel_tol=1e-5) for one in x)


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
        return f"returns a mean instead of a sum over tokens, which Megatron divides by their number, {count:.0f}"
    if weighing and isclose(count, size * weight, rel_tol=1e-3):
        return f"counts all ranks' tokens on every rank: {count:.0f} together, of {weight:.0f}"
    if weighing and isclose(weight, size * count, rel_tol=1e-3):
        return f"sums all ranks' losses on every rank: {weight:.0f} together, of {count:.0f}"
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
