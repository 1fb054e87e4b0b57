"""Self-check of all that is between the tokens' losses and the optimizer: a training step of a model of one weight.

    get_batch_on_this_cp_rank --> loss of a token = weight x token --> train_step, whose schedule has two micro-batches
        --> the gradient that the optimizer of one rank would have, known in advance; the samples by which learning
            rates advance; the loss that is logged

The model is wrapped as the run's is (``DistributedDataParallel``, with its options), and unmasked tokens lie unevenly
on the ranks. So a loss that is averaged or scaled otherwise, a gradient that is scaled twice or reduced over other
ranks cannot pass, wherever in Megatron that is. Context-parallel ranks must begin with the same weights, too.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from math import isclose
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import parallel_state
from megatron.core import utils as megatron_utils
from megatron.core.distributed import DistributedDataParallel
from megatron.core.enums import ModelType
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from cp_plugin.megatron import compat
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.selfcheck.stand_ins import Optimizer, Schedule, train_step
from cp_plugin.megatron.state import STATE

_FINALIZE = "megatron.core.distributed.finalize_model_grads:finalize_model_grads"
_MICRO_BATCHES = 2
_SCALE = "main_loss_backward_scale"
_ALIGNED = 128  # elements of a rank's part of the gradients, with the distributed optimizer
_OFF: dict[str, Any] = dict.fromkeys(
    (
        *("timers", "grad_scale_func", "grad_sync_func", "param_sync_func"),
        "experimental_attention_variant",
    )
) | dict.fromkeys(
    (
        *("overlap_moe_expert_parallel_comm", "deallocate_pipeline_outputs"),
        *("fine_grained_activation_offloading", "enable_autocast", "moe_paged_stash", "flextron"),
    ),
    False,
)
"""Settings of parts that the model does not have."""
_LOGGED = "lm loss"
"""As Megatron's scripts name the loss that they log, with its sum and its number of tokens."""
_OTHER_LOSSES = (("num_moe_experts", MoEAuxLossAutoScaler, 2.0), ("mtp_num_layers", MTPLossAutoScaler, 3.0))
"""Setting -> how its loss is scaled, and its gradient here; every rank has an equal part of it."""
_PLAIN = ("overlap_param_gather", "check_for_nan_in_grad", "nccl_ub", "fp8_param_gather")


class _OneWeight(torch.nn.Module):
    """The loss of a token is the weight times the token; the weight is stored once for each element of a gradient.

    What else a step asks a model for is that of the run's.
    """

    model_type = ModelType.encoder_or_decoder
    pre_process = post_process = True
    share_embeddings_and_output_weights = False

    def __init__(self, config: Any, elements: int, device: torch.device, other: torch.nn.Module) -> None:
        super().__init__()
        vars(self)["other"] = other  # and not one of its modules
        self.config = config
        self.weight = torch.nn.Parameter(torch.ones(elements, device=device))
        self.weight.sequence_parallel = config.sequence_parallel
        if getattr(config, "moe_router_enable_expert_bias", False):
            self.expert_bias = torch.zeros(2, device=device)
            self.local_tokens_per_expert = _counts(device)[parallel_state.get_context_parallel_rank()]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["other"], name)

    def shared_embedding_or_output_weight(self) -> None:
        """Asked for with multi-token prediction in a pipeline: there is none whose gradients stages would share."""

    def set_input_tensor(self, _: Any) -> None:
        """Called by Megatron's pipeline schedules."""

    def forward(self, x: Tensor) -> Tensor:
        """Losses of tokens x, as Megatron's layers attach those of experts and of multi-token prediction."""
        weight = self.weight.sum()
        losses = weight * x
        for setting, scaler, size in _OTHER_LOSSES:
            if getattr(self.config, setting, None):
                losses = scaler.apply(losses, size * weight)
        return losses


def step_problems(chunks: Sequence[torch.nn.Module], tokens: int, optimizer: Any, schedule: Any) -> list[str]:
    """Errors of a step, and of the weights that training begins with; collective over all ranks.

    Args:
        chunks: of the model, as ``setup_model_and_optimizer`` built them; others than ``DistributedDataParallel`` are
            not checked.
        tokens: length of a sequence that the layout can divide.
        optimizer, schedule: the run's, for what a step asks of them besides; or None.
    """
    wrapped = [chunk for chunk in chunks if type(chunk) is DistributedDataParallel]
    if not wrapped:
        return []
    return [*_of_samples(), *_of_weights(wrapped), *_of_gradients(wrapped, tokens, optimizer, schedule)]


def _of_samples() -> list[str]:
    """Context-parallel ranks hold parts of the same samples, and must not count as data-parallel ones."""
    if calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        return []
    sizes = calculator.get_micro_batch_size(), parallel_state.get_data_parallel_world_size()
    batches, want = calculator.get_num_microbatches(), calculator.get_current_running_global_batch_size()
    if batches * sizes[0] * sizes[1] == want:
        return []
    return [f"{batches} micro-batches of {sizes[0]} samples on {sizes[1]} data-parallel ranks are no step of {want}"]


def _of_weights(chunks: Sequence[Any]) -> list[str]:
    group = parallel_state.get_context_parallel_group()
    named = [
        (name, parameter.detach())
        for chunk in chunks
        for name, parameter in chunk.module.named_parameters()
        if getattr(parameter, "allreduce", True) and type(parameter.detach()) is Tensor and parameter.numel()
    ]
    if not named:
        return []
    sums = [torch.stack((x.sum(dtype=torch.float64), x.abs().sum(dtype=torch.float64))) for _, x in named]
    mine = torch.stack(sums)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    apart = torch.stack([(other - mine)[:, 0].abs() > 1e-9 * mine[:, 1] for other in everyone]).any(0)
    wrong = [name for (name, _), differs in zip(named, apart.tolist(), strict=True) if differs]
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return [f"context-parallel ranks start with different weights: {wrong[0]}{more}"] if wrong else []


def _of_gradients(chunks: Sequence[Any], tokens: int, optimizer: Any, schedule: Any) -> list[str]:
    model, config = _tiny(chunks[0])
    optimizer, schedule = Optimizer(optimizer, partial(_own_part, model)), Schedule(schedule)
    sizes = {"num_microbatches": _MICRO_BATCHES, "seq_length": tokens, "micro_batch_size": 1}
    masks = _masks(tokens, model.module.weight.device)
    x = _values(torch.arange(tokens, device=masks[0].device))
    sums, counts = (torch.stack(found) for found in ([(mask * x).sum() for mask in masks], [m.sum() for m in masks]))
    per_token, ranks = config.calculate_per_token_loss, parallel_state.get_context_parallel_group().size()
    want = sums.sum() / counts.sum() if per_token else (sums / counts).mean()
    for setting, scaler, size in _OTHER_LOSSES:
        if getattr(config, setting, None):
            want += size * (_MICRO_BATCHES * ranks / counts.sum() if per_token else 1)
            want += size * (ranks - 1) * (scaler is MoEAuxLossAutoScaler and not per_token)  # parts are summed
    if config.sequence_parallel:
        want *= parallel_state.get_tensor_model_parallel_world_size()  # each with all tokens here
    checked, STATE.loss_checked = STATE.loss_checked, True  # the script's own loss is checked in its first micro-batch
    try:
        with ExitStack() as back:
            for _, scaler, _ in _OTHER_LOSSES:
                back.enter_context(patching.lent(scaler, **{_SCALE: getattr(scaler, _SCALE)}))
            logged = train_step(_forward, iter(masks), model, optimizer, schedule, sizes)
    finally:
        STATE.loss_checked = checked
    found, problems = optimizer.gradient, schedule.problems()
    mean = (sums.sum() / counts.sum() * model.module.weight.numel()).item()
    if _LOGGED in logged and not isclose(float(logged[_LOGGED]), mean, rel_tol=1e-4):
        problems.append(f"the loss that is logged differs: {float(logged[_LOGGED]):.6g}, and {mean:.6g} on one rank")
    if found.numel() and not torch.allclose(found, want.expand_as(found), rtol=1e-4, atol=0):
        given = found[(found - want).abs().argmax()].item()
        problems.append(f"the gradient of a step differs: {given:.6g}, and {want.item():.6g} on one rank")
    if getattr(config, "moe_router_enable_expert_bias", False) and config.moe_router_bias_update_rate:
        problems += _of_biases(model.module.expert_bias)
    mine = _reduction(model.buffers[0])
    for buffer in (buffer for chunk in chunks for buffer in chunk.buffers):
        if _reduction(buffer) != mine:
            problems.append(f"the model's gradients are reduced differently: {_reduction(buffer)}, not {mine}")
    return problems


def _counts(device: torch.device) -> Tensor:
    """Tokens of two experts on each context-parallel rank; those of the first outweigh all others' on other ranks."""
    counts = torch.tensor([0.0, 1.0], device=device).repeat(parallel_state.get_context_parallel_world_size(), 1)
    counts[0] = counts.new_tensor([2.0 * len(counts), 0.0])
    return counts


def _of_biases(found: Tensor) -> list[str]:
    if found[0] < 0 < found[1]:
        return []
    return [f"biases of experts are updated by the tokens of other ranks: {found.tolist()}, where the first has most"]


def _tiny(chunk: Any) -> tuple[Any, Any]:
    """A model of one weight, wrapped like this part of the run's model, and its configuration."""
    config = copy.copy(chunk.config)
    for name, value in _OFF.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if hasattr(config, "cuda_graph_impl"):
        config.cuda_graph_impl = "none"
    config.finalize_model_grads_func = patching.original(_FINALIZE)
    names = {field.name for field in fields(chunk.ddp_config)}
    options = replace(chunk.ddp_config, **{name: False for name in _PLAIN if name in names})
    device = next((parameter.device for parameter in chunk.parameters()), torch.device("cpu"))
    module = _OneWeight(config, _ALIGNED * chunk.intra_dp_cp_group.size(), device, chunk.module)
    logging.disable(logging.WARNING)  # that no layout of parameters was given
    try:
        model = DistributedDataParallel(config=config, ddp_config=options, module=module)
    finally:
        logging.disable(logging.NOTSET)
    config.no_sync_func = model.no_sync if options.overlap_grad_reduce else None
    return model, config


def _masks(tokens: int, device: torch.device) -> list[Tensor]:
    """Of each micro-batch, ``[tokens]``: unmasked tokens lie unevenly on the ranks of any layout."""
    place = torch.arange(tokens, device=device)
    return [(place > tokens // 3).float(), ((place % 5 == 0) | (place < tokens // 4)).float()]


def _values(tokens: Tensor) -> Tensor:
    return (tokens % 7 + 1) / 8


def _forward(masks: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    mask = next(masks)
    tokens = torch.arange(mask.numel(), device=mask.device)[None]
    batch: dict[str, Any] = {"tokens": tokens, "labels": tokens, "position_ids": tokens, "loss_mask": mask[None]}
    batch |= dict.fromkeys(("attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size"))
    slicer = megatron_utils.get_batch_on_this_cp_rank
    batch = slicer(batch, cp_group=parallel_state.get_context_parallel_group(), **compat.not_hybrid(slicer))
    return model(_values(batch["tokens"])), partial(_loss, batch["loss_mask"])


def _loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, count = (losses * mask).sum(), mask.sum()
    return total, count.int(), {_LOGGED: torch.stack((total.detach(), count))}


def _own_part(model: Any) -> Tensor:
    """The gradients that this rank's optimizer would read."""
    buffer = model.buffers[0]
    gradients = buffer.grad_data[: model.module.weight.numel()]
    if not model.ddp_config.use_distributed_optimizer:
        return gradients
    group = model.intra_dp_cp_group
    share = buffer.grad_data.numel() // group.size()
    first = share * group.rank()
    return gradients[first : first + share]


def _reduction(buffer: Any) -> str:
    group = getattr(buffer, "data_parallel_group", None)
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    return f"over the ranks {ranks}, times {getattr(buffer, 'gradient_scaling_factor', 1)}"
