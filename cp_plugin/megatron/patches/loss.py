"""Loss functions of two parts are refused where losses are summed over tokens.

Megatron takes (loss, tokens, report) and the older (mean, report). It multiplies the older one by the number of
context-parallel ranks, and with ``--calculate-per-token-loss``, which most layouts need, then divides by no tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from cp_plugin.megatron import runtime


def replace_calc_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement for ``forward_step_calc_loss``; ValueError, when it is called, for a loss of two parts."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward_step_calc_loss(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        compute, config = call.arguments["loss_func"], call.arguments["config"]
        if compute is not None and config.calculate_per_token_loss:
            call.arguments["loss_func"] = functools.partial(_of_three_parts, compute)
        return original(*call.args, **call.kwargs)

    return forward_step_calc_loss


def _of_three_parts(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = compute(*args, **kwargs)
    if isinstance(found, tuple) and len(found) == 2:
        raise ValueError(
            f"{runtime.settings().asked} with --calculate-per-token-loss: the loss function of this script returns two "
            "parts, (mean, report), and must return three: (sum over this rank's tokens, number of these tokens, "
            "report), as that of Megatron's pretrain_gpt.py does"
        )
    return found
