"""Self-check of experts' losses: the gradient of a router's weight by load balancing and z-losses, as on one rank.

Their counts and means are over the tokens of all ranks, by groups and factors of Megatron's that no other check sees:

    this rank's tokens     --> router --> losses, scaled as in training --> gradient, added up over the ranks
    the whole sequence     --> router, with groups of one rank          --> the same gradient

Tolerance (relative error of the norm): 1e-3 in float32, 0.1 in half precision, where near ties may be routed otherwise;
losses of other tokens, or scaled by the number of ranks, are off by far more.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from cp_plugin.megatron import compat, runtime
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.rules.experts import BALANCED, RANDOM, balancing

_TOLERANCE, _TOLERANCE_HALF = 1e-3, 0.1
_GROUPS = ("tp_group", "cp_group", "tp_cp_group", "tp_dp_cp_group")
_LOGS = {
    "get_moe_metrics_tracker": lambda: SimpleNamespace(record=lambda *_, **__: None),
    "save_to_aux_losses_tracker": lambda *_, **__: None,  # before 0.19
}


def router_problems(modules: Sequence[torch.nn.Module], tokens: int, mine: Tensor) -> list[str]:
    """Errors of a router's losses; collective over the context-parallel ranks.

    Args:
        tokens: length of the whole sequence.
        mine: positions of this rank's tokens.
    """
    router: Any = next((module for module in modules if has_losses(module)), None)
    group = parallel_state.get_context_parallel_group()
    if router is None or group.size() == 1:
        return []
    weight = router.weight
    generator = torch.Generator().manual_seed(30)
    whole = torch.randn(tokens, 1, weight.size(1), generator=generator).to(weight.device, router.config.params_dtype)
    scale = 1 if router.config.calculate_per_token_loss else group.size()
    got = _gradient(router, whole[mine], scale) / scale
    dist.all_reduce(got, group=group)
    alone = copy.copy(router)
    for name in _GROUPS:
        if hasattr(router, name):
            setattr(alone, name, SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    want = _gradient(alone, whole, 1)
    error = ((got - want).norm() / want.norm()).item()
    allowed = _TOLERANCE if router.config.params_dtype == torch.float32 else _TOLERANCE_HALF
    if error <= allowed or not want.any():
        return []
    return [f"the gradient of experts' losses is off by {error:.1e} (relative; allowed {allowed:.0e})"]


def has_losses(module: torch.nn.Module) -> bool:
    """Whether a router has losses that this check can compare."""
    if not isinstance(module, megatron_router.TopKRouter):
        return False
    config: Any = module.config
    losses = config.moe_z_loss_coeff is not None or module.is_aux_loss_enabled()
    plain = not any(getattr(config, name, None) for name in RANDOM) and config.moe_expert_capacity_factor is None
    weak = config.calculate_per_token_loss and compat.weakens_expert_losses(compat.megatron_version())
    alone = config.tensor_model_parallel_size == 1 and module.weight.requires_grad
    one_batch = "global_aux_loss" not in balancing(config) or parallel_state.get_data_parallel_world_size() == 1
    return losses and plain and alone and not weak and one_batch and {*balancing(config)} <= BALANCED


def _gradient(router: Any, hidden: Tensor, scale: int) -> Tensor:
    """float32, like the weight; nothing of the router changes."""
    twin = copy.copy(router)
    twin._buffers = {name: None if x is None else x.clone() for name, x in router._buffers.items()}
    twin.training = True
    scaled = patching.lent(MoEAuxLossAutoScaler, main_loss_backward_scale=hidden.new_full((1,), scale).float())
    logs = {name: log for name, log in _LOGS.items() if name in vars(megatron_router)}
    padding = None
    if runtime.settings().pad_sequence:  # as in training, with none of it here
        padding = torch.zeros(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    with scaled, patching.lent(megatron_router, **logs), torch.enable_grad():
        probs, *_ = twin(hidden, padding_mask=padding)
        (found,) = torch.autograd.grad(0 * probs.sum(), router.weight)
    return found.float()
