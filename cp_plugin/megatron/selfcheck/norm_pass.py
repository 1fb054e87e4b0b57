"""Self-check of the norm by which gradients are clipped: every element of the model counts once, on however many ranks.

    gradients of 1 for every element --> the optimizer's norm --> the root of their number

Checked are optimizers with one group of ranks for all parameters: those of models without experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose, sqrt
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

_GRADIENTS = ("get_grads_for_grad_norm", "get_main_grads_for_grad_norm")
"""Names of the method for the gradients that this rank counts; the second before 0.19."""
_REPLICATED, _SHARDED = ("FP32Optimizer", "Float16OptimizerWithFloat16Params"), ("DistributedOptimizer",)


def norm_problems(optimizer: Any, device: torch.device) -> list[str]:
    """Errors of the norm; collective over all ranks.

    Args:
        optimizer: Megatron's; None, and those that are not known: not checked.
        device: of this rank's collectives.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    checked = torch.tensor(_is_known(parts), device=device).int()
    dist.all_reduce(checked, dist.ReduceOp.MIN)  # pipeline stages may have others
    if not checked:
        return []
    parameters = parts[0].get_parameters()
    kept = [parameter.grad for parameter in parameters]
    _give_ones(parameters)
    try:
        mine = sum(x.numel() for x in _counted(parts[0])())
        found = float(optimizer.get_grad_norm())
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
    count = torch.tensor(float(mine), dtype=torch.float64, device=device)
    dist.all_reduce(count)
    copies = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if type(parts[0]).__name__ in _SHARDED:
        copies = getattr(parts[0].ddp_config, "num_distributed_optimizer_instances", 1)
    want = sqrt(count.item() / copies)
    if isclose(found, want, rel_tol=1e-3):
        return []
    return [
        f"the norm of gradients is that of other ranks: {found:.6g} for {want:.6g}, so they would be clipped otherwise"
    ]


def _give_ones(parameters: Sequence[Any]) -> None:
    """Gradients of 1, in one buffer of the largest parameter's size: they are only read."""
    for kind in {(parameter.dtype, parameter.device) for parameter in parameters}:
        alike = [parameter for parameter in parameters if (parameter.dtype, parameter.device) == kind]
        ones = torch.ones(max(parameter.numel() for parameter in alike), dtype=kind[0], device=kind[1])
        for parameter in alike:
            parameter.grad = ones[: parameter.numel()].view(parameter.shape)


def _is_known(parts: Sequence[Any]) -> bool:
    if len(parts) != 1 or type(parts[0]).__name__ not in (*_REPLICATED, *_SHARDED) or _counted(parts[0]) is None:
        return False
    config = parts[0].config
    others = ("use_precision_aware_optimizer", "optimizer_cpu_offload")
    return config.clip_grad > 0 and not any(getattr(config, name, False) for name in others)


def _counted(optimizer: Any) -> Any:
    return next((found for name in _GRADIENTS if (found := getattr(optimizer, name, None)) is not None), None)
