"""Models with linear layers in Megatron's training loop: context parallelism changes no number, and sends the formula.

Without context parallelism the plugin runs too, on one rank; that this is linear attention is the self-check's to say,
which compares it with all tokens against all others.
"""

from __future__ import annotations

import functools

import parity
import pytest
import torch
from harness import train
from nightly import one_case
from parity import LOSS, compare
from warm import megatrons_own_data

from cp_plugin.linear.variants import variants
from cp_plugin.methods import registry as providers

STEPS = 2
SAME_VOCABULARY = "--make-vocab-size-divisible-by 64"  # that Megatron pads for the tensor-parallel ranks
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
    [("LLLN", "all_gather"), ("LN", "attention2d --cp-grid 2x2 --cp-layout zigzag")],
    ids=["LLLN", "LN"],
)
def test_softmax_layers_between(variant: str, pattern: str, provider: str) -> None:
    check(f"{FOUR} --cp-linear-attention {variant} --cp-layer-pattern {pattern}", f"--cp-provider {provider}")


@one_case
@pytest.mark.parametrize("provider", [name for name in providers.names("linear") if name != "lasp2"])
def test_the_other_linear_providers(provider: str) -> None:
    variant = "basic" if provider == "linear_ring" else "retention"
    for layout in providers.get(provider).layouts:
        check(f"--cp-linear-attention {variant}", f"--cp-linear-provider {provider} --cp-layout {layout}")


@one_case
@pytest.mark.parametrize("flags", ["ring --cp-head-parallel 2", "usp --cp-layout zigzag"])
def test_softmax_layers_behind_a_head_axis(flags: str) -> None:
    check("--cp-linear-attention gla --cp-layer-pattern LN", f"--cp-provider {flags}")


PARALLEL = {
    "tensor parallel": (2, "--tensor-model-parallel-size 2"),
    "pipeline parallel": (2, "--pipeline-model-parallel-size 2"),
    "full recompute": (1, RECOMPUTE),
    "sequence parallel": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "selective recompute": (1, "--recompute-granularity selective --recompute-modules core_attn"),
    "query and key norm": (1, "--qk-layernorm"),
}


@one_case
@pytest.mark.parametrize(
    ("name", "variant"),
    [*((name, "gla") for name in PARALLEL), *((name, "lightning") for name in list(PARALLEL)[:3])],
)
def test_beside_other_parallelism_and_recomputation(name: str, variant: str) -> None:
    ranks, flags = PARALLEL[name]
    check(f"{FOUR} --cp-linear-attention {variant} --cp-layer-pattern LLNL {flags}", "", cp=2, ranks=ranks)


@one_case
@pytest.mark.parametrize("flags", [RECOMPUTE, "--recompute-granularity selective --recompute-modules core_attn"])
def test_recomputation_changes_nothing(flags: str) -> None:
    model = "--cp-linear-attention gla --cp-layer-pattern LN --context-parallel-size 2"
    compare(train(2, f"{model} {flags}", steps=STEPS), train(2, model, steps=STEPS)[:1], steps=STEPS)


@one_case
@pytest.mark.parametrize("variant", ["gla", "lightning", "rebased"])
def test_tensor_parallelism_divides_the_heads_and_their_weights(variant: str) -> None:
    """The same model on one and on two tensor-parallel ranks: decays, gates and features go by the heads' numbers."""
    model = f"--cp-linear-attention {variant} --cp-layer-pattern LN --use-cpu-initialization {SAME_VOCABULARY}"
    (whole,) = train(1, model, prepare=megatrons_own_data)
    for more in ("", "--sequence-parallel"):
        halves = train(2, f"{model} --tensor-model-parallel-size 2 {more}", prepare=megatrons_own_data)
        assert abs(halves[0].losses[0] / whole.losses[0] - 1) <= LOSS
        names = [name for name in whole.weights if "core_attention" in name]
        assert any("linear" in name for name in names)
        for name in names:
            for part in ("weights", "grads"):
                first, second = (getattr(record, part)[name] for record in halves)
                shared = first.shape == getattr(whole, part)[name].shape
                got = first if shared else torch.cat((first, second))
                want = getattr(whole, part)[name]
                assert (got - want).norm() <= 1e-5 * want.norm(), (part, name, more)
                assert not shared or torch.equal(first, second), (part, name, more)


def test_fewer_layers_are_linear_than_not() -> None:
    check(f"{FOUR} --cp-linear-attention basic --cp-layer-pattern NNLN", "", cp=2)
