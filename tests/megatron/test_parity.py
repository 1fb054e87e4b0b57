"""Context parallelism alone, beside other parallelism, and with what else a model may have: see ``parity``."""

from __future__ import annotations

import pytest
import torch
from harness import MODEL, train
from nightly import ALL, one_case, slow
from parity import check

from cp_plugin.core.versions import version_tuple

STEPS = 20
LAYOUTS = {"ring": "ring --cp-layout contiguous", "zigzag": "ring --cp-layout zigzag", "striped": "striped"}

pytestmark = pytest.mark.usefixtures("adapter")


@one_case
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_context_parallel_alone(layout: str, cp: int) -> None:
    _, base = check("", f"--cp-provider {LAYOUTS[layout]}", cp=cp, steps=STEPS)
    assert base[0].losses[-1] < 0.95 * base[0].losses[0], "it learns"


@one_case
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parallel", ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"])
def test_with_tensor_and_pipeline_parallelism(layout: str, cp: int, parallel: str) -> None:
    check(parallel, f"--cp-provider {LAYOUTS[layout]}", cp=cp, ranks=2, steps=STEPS if ALL else 4)


VARIANTS = {
    "sequence parallel": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "data parallel": (2, ""),
    "selective recompute": (1, "--recompute-granularity selective"),
    "full recompute": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "virtual pipeline": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "fewer key/value heads than tensor-parallel ranks": (2, "--tensor-model-parallel-size 2 --num-query-groups 1"),
    "mixture of experts": (1, "--num-experts 4 --moe-router-topk 2"),
    "end-of-document masked": (1, "--eod-mask-loss"),
}


@one_case
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str) -> None:
    ranks, flags = VARIANTS[variant]
    check(flags, "--cp-provider striped", cp=2, ranks=ranks)


def test_auxiliary_losses_of_experts() -> None:
    """Before 0.19 Megatron computes them wrongly per token, which all layouts but zigzag need: refused there."""
    from cp_plugin.megatron.patches.patching import megatron_version

    flags = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
    layout = LAYOUTS["striped" if version_tuple(megatron_version()) >= (0, 19) else "zigzag"]
    check(flags, f"--cp-provider {layout}", cp=2)


@slow
def test_a_length_that_megatron_alone_would_refuse() -> None:
    model = MODEL.replace("--seq-length 64", "--seq-length 60")
    for layout in ("ring", "striped"):
        check("", f"--cp-provider {LAYOUTS[layout]}", model=model)


def test_the_reference_kernel() -> None:
    check("", "--cp-provider ring --cp-layout zigzag --cp-backend reference", cp=2)


def test_the_self_check_leaves_training_alone() -> None:
    """Bit for bit, with dropout: it draws no random numbers that training would have drawn."""
    model = MODEL.replace("--hidden-dropout 0", "--hidden-dropout 0.1")
    flags = "--context-parallel-size 2 --cp-provider striped --cp-selfcheck"
    once, off = (train(2, f"{flags} {when}", steps=3, model=model) for when in ("once", "off"))
    assert [r.losses for r in once] == [r.losses for r in off]
    assert all(torch.equal(a.grads[name], b.grads[name]) for a, b in zip(once, off, strict=True) for name in a.grads)
