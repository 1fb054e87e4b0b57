"""Models with linear layers in Megatron's training loop: one rank's numbers, and the bytes of the formula.

On one rank the plugin runs too; that its layers compute linear attention is for the self-check to say, which compares
them with the quadratic form.
"""

from __future__ import annotations

import functools

import parity
import pytest
import torch
from harness import train
from nightly import one_case
from parity import LOSS
from warm import megatrons_own_data

from cp_plugin.linear.variants import variants
from cp_plugin.methods import registry as providers

SAME_VOCABULARY = "--make-vocab-size-divisible-by 64"  # Megatron pads it for the tensor-parallel ranks
FOUR = "--num-layers 4"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

pytestmark = pytest.mark.usefixtures("adapter")
check = functools.partial(parity.check, counted=True)


@one_case
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("variant", variants())
def test_every_variant_in_all_layers(variant: str, layout: str) -> None:
    check(f"--cp-linear-attention {variant}", f"--cp-layout {layout}")


@one_case
@pytest.mark.parametrize("variant", ["gla", "lightning"])
@pytest.mark.parametrize(
    ("pattern", "provider"),
    [
        ("NNLN", "ring --cp-head-parallel 2"),
        ("LLLN", "all_gather"),
        ("LN", "attention2d --cp-grid 2x2 --cp-layout zigzag"),
        ("LN", "usp --cp-layout zigzag"),
    ],
    ids=["head axis", "LLLN", "LN", "usp"],
)
def test_softmax_layers_between(variant: str, pattern: str, provider: str) -> None:
    check(f"{FOUR} --cp-linear-attention {variant} --cp-layer-pattern {pattern}", f"--cp-provider {provider}")


@one_case
@pytest.mark.parametrize(
    ("provider", "layout"),
    [(name, at) for name in providers.names("linear") if name != "lasp2" for at in providers.get(name).layouts[::-1]],
)
def test_the_other_linear_providers(provider: str, layout: str) -> None:
    variant = "basic" if provider == "linear_ring" else "retention"
    check(f"--cp-linear-attention {variant}", f"--cp-linear-provider {provider} --cp-layout {layout}")


PARALLEL = {
    "full recompute": (1, "", RECOMPUTE),
    "tensor parallel": (2, "--tensor-model-parallel-size 2", ""),
    "pipeline parallel, full recompute": (2, "--pipeline-model-parallel-size 2", RECOMPUTE),
    "sequence parallel": (2, "--tensor-model-parallel-size 2 --sequence-parallel", ""),
    "selective recompute": (1, "", "--recompute-granularity selective --recompute-modules core_attn"),
    "query and key norm": (1, "--qk-layernorm", ""),
}
"""Ranks and flags without context parallelism; recomputation flags of the run with it."""


@one_case
@pytest.mark.parametrize("variant", ["gla", "lightning"])
@pytest.mark.parametrize("name", PARALLEL)
def test_beside_other_parallelism_and_recomputation(name: str, variant: str) -> None:
    ranks, flags, recompute = PARALLEL[name]
    check(f"{FOUR} --cp-linear-attention {variant} --cp-layer-pattern LLNL {flags}", recompute, cp=2, ranks=ranks)


@one_case
@pytest.mark.parametrize("variant", ["gla", "lightning", "rebased"])
def test_tensor_parallelism_divides_the_heads_and_their_weights(variant: str) -> None:
    """One and two tensor-parallel ranks: decays, gates and features depend on the heads' global indices."""
    model = f"--cp-linear-attention {variant} --cp-layer-pattern LN --use-cpu-initialization {SAME_VOCABULARY}"
    (whole,) = train(1, model, prepare=megatrons_own_data)
    for more in ("", "--sequence-parallel"):
        halves = train(2, f"{model} --tensor-model-parallel-size 2 {more}", prepare=megatrons_own_data)
        assert abs(halves[0].losses[0] / whole.losses[0] - 1) <= LOSS
        names = [name for name in whole.weights if "core_attention" in name]
        assert any("linear" in name for name in names)
        for name in names:
            for part in ("weights", "grads"):
                want = getattr(whole, part)[name]
                first, second = (getattr(record, part)[name] for record in halves)
                shared = first.shape == want.shape
                got = first if shared else torch.cat((first, second))
                assert (got - want).norm() <= 1e-5 * want.norm(), (part, name, more)
                assert not shared or torch.equal(first, second), (part, name, more)
