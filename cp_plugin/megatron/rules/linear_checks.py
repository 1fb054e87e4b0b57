"""The checks of a training run with linear attention, beside those of ``checks``."""

from __future__ import annotations

import argparse

import torch

from cp_plugin.core.problem import Problem
from cp_plugin.linear import kernels
from cp_plugin.megatron.flags.linear_flags import Linear
from cp_plugin.methods import registry as providers


def after(args: argparse.Namespace, linear: Linear, problem: Problem, device: torch.device | None) -> None:
    """Check the namespace once Megatron has filled it in.

    problem: a softmax attention call of the model.

    Raises:
        ValueError: for a pattern that does not fit the layers, heads that cannot be divided, or a problem that the
            provider or the kernel cannot do.
    """
    layers, length = args.num_layers, len(linear.pattern)
    if layers % length:
        raise ValueError(
            f"--cp-layer-pattern {linear.pattern} has {length} letters, which do not divide --num-layers {layers}: "
            "the pattern is repeated over the layers"
        )
    tp = args.tensor_model_parallel_size
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if groups % tp:
        raise ValueError(
            f"--cp-linear-attention {linear.variant} divides the key/value heads over the tensor-parallel ranks: "
            f"{groups} heads (--num-query-groups) are not a multiple of --tensor-model-parallel-size {tp}"
        )
    settled = providers.settle(linear.provider, linear.problem(problem), linear.options)
    reason = providers.unsupported(settled.provider, linear.problem(problem), settled.options)
    if reason is not None:
        raise ValueError(f"--cp-linear-provider {linear.provider} cannot run this model: {reason}")
    if device is not None:
        kernels.choose(linear.options.backend, device, problem.dtype, problem.documents, linear.kind.decay)
