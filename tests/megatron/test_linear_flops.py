"""Megatron's count of floating point operations for models with linear layers, against a count by hand."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

TOKENS, SQUARES = 4 * 64, 4 * 64**2  # of a global batch
QUADRATIC = 3 * 2 * 4 * 16 * SQUARES  # forward and backward of a causal layer, 4 heads of 16


@pytest.mark.parametrize(
    ("flags", "linear_layers", "per_token"),
    [
        ("lightning", 2, 2 * (4 + 2) * 16 * 16),
        ("lightning --cp-layer-pattern LN", 1, 2 * (4 + 2) * 16 * 16),
        ("basic", 2, 2 * (4 + 2) * 16 * 17),
        ("gla", 2, 2 * ((4 + 2) * 16 * 16 + 64 * 16 + 16 * 2 * 16)),
        ("rebased", 2, 2 * ((4 + 2) * 136 * 17 + (4 + 2) * 16 * 16)),
    ],
)
def test_the_count_of_operations(
    validated: Callable[..., argparse.Namespace], flags: str, linear_layers: int, per_token: int
) -> None:
    from megatron.training import training

    from cp_plugin.megatron.patches import patching

    args = validated(f"--context-parallel-size 4 --cp-linear-attention {flags}")
    args.padded_vocab_size = 128
    stock = patching.original("megatron.training.training:num_floating_point_operations")(args, 4)
    got = training.num_floating_point_operations(args, 4)
    assert got == stock + linear_layers * (3 * TOKENS * per_token - QUADRATIC)
    projections = 64 * (64 + 2 * 32) + 64 * 64  # q, k and v; out
    feed_forward = 3 * 64 * 128
    rest = 6 * TOKENS * (2 * (projections + feed_forward) + 64 * 128)
    assert got == rest + (2 - linear_layers) * QUADRATIC + linear_layers * 3 * TOKENS * per_token
