"""Megatron's memory, precision and diagnosis features with context parallelism, against the same without it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from nightly import each_value, one_case, slow
from training import FIRST_LOSS, LOSS, Record, stock, train

STEPS = 3
LAYOUTS = ("striped", "ring --cp-layout zigzag")
ADAM = "--optimizer adam --adam-eps 1 --lr 0.5"  # so that losses depend on the scale of gradients
OVERLAP = f"{ADAM} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

pytestmark = pytest.mark.usefixtures("adapter")


def losses(records: Sequence[Record]) -> list[float]:
    return next(record.losses for record in records if record.losses)


def same_losses(
    got: Sequence[Record], want: Sequence[Record], *, first: float = FIRST_LOSS, all_: float = LOSS
) -> None:
    """Where gradients are sharded over the ranks, the following losses show what the optimizer made of them."""
    pairs = list(zip(losses(got), losses(want), strict=True))
    assert len(pairs) == STEPS
    errors = [abs(a / b - 1) for a, b in pairs]
    assert errors[0] <= first and max(errors) <= all_, errors
    assert pairs[0][1] != pairs[-1][1], "it learns"


@one_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_distributed_optimizer(layout: str) -> None:
    got = train(2, f"{OVERLAP} --context-parallel-size 2 --cp-provider {layout}", steps=STEPS)
    same_losses(got, stock(1, OVERLAP, steps=STEPS))


MEGATRON_FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params"
TORCH_FSDP = "--use-torch-fsdp2"


@each_value
@pytest.mark.parametrize("sharded", [MEGATRON_FSDP, MEGATRON_FSDP.replace("optim_grads_params", "optim"), TORCH_FSDP])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["", "--num-experts 4 --moe-aux-loss-coeff 0.1", "--softmax-type learnable"])
def test_fully_sharded_data_parallelism(
    sharded: str, layout: str, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if sharded is TORCH_FSDP and "striped" in layout:
        pytest.skip("it needs --calculate-per-token-loss, which FSDP2 does not take")
    if sharded is not TORCH_FSDP:
        pytest.importorskip("einops")
    got = train(2, f"{ADAM} {sharded} {model} --context-parallel-size 2 --cp-provider {layout}", steps=STEPS)
    same_losses(got, stock(1, f"{ADAM} {model}", steps=STEPS))
    told = capfd.readouterr().out
    assert told.count("self-check passed: a step") == 1, "one rank's step, too, is sharded"


@one_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_on_the_context_parallel_ranks(layout: str) -> None:
    """Each context-parallel rank holds the experts that it would hold as a data-parallel rank."""
    model = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
    want = stock(2, model, steps=STEPS)
    got = train(2, f"{model} --context-parallel-size 2 --cp-provider {layout}", steps=STEPS)
    same_losses(got, want)
    for record, base in zip(got, want, strict=True):
        assert any("experts" in name for name in base.grads)
        for name, grad in base.grads.items():
            assert torch.equal(record.weights[name], base.weights[name])
            assert (record.grads[name] - grad).norm() <= 1e-4 * grad.norm(), name


@one_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision(layout: str) -> None:
    """At most twice as far from float32 as without context parallelism."""
    exact = losses(stock(1, OVERLAP, steps=STEPS))
    half = losses(stock(1, f"{OVERLAP} --bf16", steps=STEPS))
    got = losses(train(2, f"{OVERLAP} --bf16 --context-parallel-size 2 --cp-provider {layout}", steps=STEPS))
    allowed = 2 * max(abs(a / b - 1) for a, b in zip(half, exact, strict=True))
    assert 0 < allowed < 0.01
    assert max(abs(a / b - 1) for a, b in zip(got, exact, strict=True)) <= allowed


@slow
def test_linear_attention_with_an_overlapped_distributed_optimizer() -> None:
    model = f"{OVERLAP} --cp-linear-attention gla --cp-layer-pattern LN"
    same_losses(train(2, f"{model} --context-parallel-size 2", steps=STEPS), stock(1, model, steps=STEPS))
    want = stock(1, f"{model} --bf16", steps=STEPS)
    got = train(2, f"{model} --bf16 --context-parallel-size 2", steps=STEPS)
    same_losses(got, want, first=0.001, all_=0.001)


def _run_iterations_twice() -> None:
    """Make Megatron run every iteration twice, and stop where a result differs.

    Its own flag for this, ``--rerun-mode report_stats``, fails: the mode has another name inside. It compares the loss
    before it is divided in place, so the loss must be a sum over tokens.
    """
    from megatron.core import rerun_state_machine as rerun
    from megatron.training import initialize

    start, compare_again = initialize.initialize_rerun_state_machine, rerun.QuickStats.record

    def record(self: Any, difference: float) -> None:
        assert difference == 0
        compare_again(self, difference)

    mode = rerun.RerunMode.REPORT_DETERMINISM_STATS
    initialize.initialize_rerun_state_machine = lambda **named: start(**{**named, "mode": mode})
    rerun.QuickStats.record = record


@slow
def test_determinism() -> None:
    """Nothing differs between runs, or between the two runs of an iteration."""
    flags = "--deterministic-mode --calculate-per-token-loss --context-parallel-size 2"
    for layout in LAYOUTS:
        once = train(2, f"{flags} --cp-provider {layout}", steps=STEPS)
        again = train(2, f"{flags} --cp-provider {layout}", steps=STEPS, prepare=_run_iterations_twice)
        for record, second in zip(once, again, strict=True):
            assert record.losses == second.losses
            assert all(torch.equal(second.grads[name], grad) for name, grad in record.grads.items())
            assert second.sent == {line: 2 * sent for line, sent in record.sent.items()} != {}
        same_losses(once, stock(1, "", steps=STEPS))


def test_determinism_is_not_promised_on_cuda(validated: Callable[..., argparse.Namespace]) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.rules import checks

    args = validated("--context-parallel-size 4 --cp-provider striped --bf16")
    args.deterministic_mode = True
    checks.after(args, runtime.settings(), torch.device("cpu"))
    with pytest.raises(ValueError, match="striped does not support --deterministic-mode on CUDA: "):
        checks.after(args, runtime.settings(), torch.device("cuda"))


def test_no_fusion_without_its_kernels(validated: Callable[..., argparse.Namespace]) -> None:
    """By default Megatron accumulates weight gradients in a CUDA kernel of Apex or Transformer Engine."""
    assert validated("--context-parallel-size 4 --cp-provider striped").gradient_accumulation_fusion is False
