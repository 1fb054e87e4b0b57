"""Floating point operations of linear layers, for the throughput that Megatron logs.

Forward, per token, d the size of a key's features and e that of a value:

    2 d e per key/value head (k v^T into the state), 2 d e per query head (the state read), and the learned projections

The backward counts twice as much, as for every other part of the model.
"""

from __future__ import annotations

import argparse

from cp_plugin.core.problem import Problem
from cp_plugin.linear.features import PROJECTED
from cp_plugin.megatron import runtime
from cp_plugin.megatron.flags.linear_flags import Linear
from cp_plugin.megatron.layers.gate import RANK
from cp_plugin.megatron.patches.patching import Call, wraps

_FORWARD_AND_BACKWARD = 3


@wraps(
    "megatron.training.training:num_floating_point_operations",
    "floating point operations of linear layers",
    "args batch_size",
    called_by="the training loop",
    otherwise="the logged throughput would be that of quadratic attention",
    when=lambda run: run.settings.linear is not None,
)
def replace_num_floating_point_operations(call: Call) -> float:
    """Replaces ``num_floating_point_operations``, which counts linear layers as quadratic attention."""
    linear = runtime.settings().linear
    assert linear is not None, "installed with linear attention only"
    args, batch = call["args"], call["batch_size"]
    tokens, squares = map(call.arguments.get, ("total_real_tokens_in_batch", "seqlen_squared_sum_in_batch"))
    tokens = batch * args.seq_length if tokens is None else tokens
    squares = batch * args.seq_length**2 if squares is None else squares
    softmax = 2 * args.num_attention_heads * args.kv_channels * squares  # two products, half of them masked
    layers = linear.layers(args.num_layers)
    return call.original() + _FORWARD_AND_BACKWARD * layers * (tokens * per_token(args, linear) - softmax)


def per_token(args: argparse.Namespace, linear: Linear) -> int:
    """Operations of one layer's forward, over all tensor-parallel ranks."""
    heads, size = args.num_attention_heads, args.kv_channels
    groups = args.num_query_groups if args.group_query_attention else heads
    model = Problem(size=1, heads=heads, kv_heads=groups, head_dim=size)
    features = linear.problem(model)
    projections = 0
    if linear.kind.features.projected:
        projections += (heads + groups) * size * PROJECTED
    if linear.kind.gated:
        projections += args.hidden_size * RANK + RANK * groups * size
    return 2 * ((heads + groups) * features.head_dim * features.v_head_dim + projections)
