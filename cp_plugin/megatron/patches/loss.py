"""Loss functions of two parts are refused where losses are summed over tokens.

Megatron takes (loss, tokens, report) and the older (mean, report). It multiplies the older one by the number of
context-parallel ranks, and with ``--calculate-per-token-loss``, which most layouts need, then divides by no tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cp_plugin.megatron import runtime
from cp_plugin.megatron.patches.patching import Call, around


@around
def replace_calc_loss(call: Call) -> Any:
    """The replacement for ``forward_step_calc_loss``; ValueError, when it is called, for a loss of two parts."""
    compute = call["loss_func"]
    if compute is None or not call["config"].calculate_per_token_loss:
        return call.original()
    return call.original(loss_func=partial(_of_three_parts, compute))


def _of_three_parts(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = compute(*args, **kwargs)
    if isinstance(found, tuple) and len(found) == 2:
        raise ValueError(
            f"{runtime.settings().asked} with --calculate-per-token-loss: the loss function of this script returns two "
            "parts, (mean, report), and must return three: (sum over this rank's tokens, number of these tokens, "
            "report), as that of Megatron's pretrain_gpt.py does"
        )
    return found
