"""``--cp-log-traffic``: what context-parallel attention sent, printed beside Megatron's own log lines."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from cp_plugin.megatron import runtime
from cp_plugin.mesh import Ledger


def replace_training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's ``training_log``, which is called after every iteration."""
    signature = inspect.signature(original)
    since = 0  # iterations since the ledger was emptied

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        nonlocal since
        result = original(*args, **kwargs)
        if runtime.settings().log_traffic:
            from megatron.training import get_args

            since += 1
            iteration = signature.bind(*args, **kwargs).arguments["iteration"]
            if iteration % get_args().log_interval == 0:
                ledger = runtime.context_parallel().mesh.ledger
                if dist.get_rank() == 0:
                    print(describe(ledger, iteration, since), flush=True)
                ledger.reset()
                since = 0
        return result

    return training_log


def describe(ledger: Ledger, iteration: int, iterations: int) -> str:
    """One line: the bytes rank 0 sent per iteration, by phase, verb and mesh axis, with any evaluation in between."""
    total = sum(line.bytes for line in ledger.entries()) / iterations
    parts = [f"{t.phase} {t.op} on {t.axis}: {t.bytes / iterations:,.0f}" for t in ledger.entries()]
    return (
        f"cp_plugin: iteration {iteration}: bytes sent by rank 0 per iteration: {total:,.0f}"
        f"{' (' + ', '.join(parts) + ')' if parts else ''}"
    )
