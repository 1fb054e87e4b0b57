"""The check of one step of the run, on N context-parallel ranks and on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Record, train
from nightly import one_case
from torch import Tensor

from cp_plugin.testing.launch import RankError

pytestmark = pytest.mark.usefixtures("adapter")

CP = "--context-parallel-size 2 --cp-provider striped"
RUNS = {
    "dropout": f"{CP} --hidden-dropout 0.1",
    "biased experts": f"{CP} --num-experts 4 --moe-router-enable-expert-bias --moe-router-score-function sigmoid "
    "--moe-router-load-balancing-type none --moe-router-bias-update-rate 0.5",
    "balanced experts": f"{CP} --num-experts 4 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1",
    "distributed optimizer": f"{CP} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--optimizer adam --clip-grad 0.1",
    "half precision": f"{CP} --fp16 --optimizer adam --initial-loss-scale 1024",
    "prediction": f"{CP} --mtp-num-layers 1",
    "packs": f"{CP} --dataloader-inter-document-masking",
    "checked steps": f"{CP} --cp-check-every 1",
}


@one_case
@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_left_behind(name: str) -> None:
    """Losses, gradients and weights are those of a run without the check, to the bit."""
    for with_check, without in zip(train(2, RUNS[name], steps=2), _unchecked(RUNS[name], steps=2), strict=True):
        assert with_check.losses == without.losses
        assert with_check.mtp_losses == without.mtp_losses or all(
            torch.equal(a, b) for a, b in zip(with_check.mtp_losses, without.mtp_losses, strict=True)
        )
        for found, wanted in ((with_check.weights, without.weights), (with_check.grads, without.grads)):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def _unchecked(flags: str, steps: int = 1) -> list[Record]:
    return train(2, f"{flags} --cp-selfcheck off", steps=steps)


def _after_slicing(change: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
    def prepare() -> None:
        from cp_plugin.megatron.models import gpt

        get = gpt.get_batch

        def get_batch(*args: Any) -> dict[str, Any]:
            batch = get(*args)
            change(batch)
            return batch

        gpt.get_batch = get_batch

    return prepare


def _shift_labels(batch: dict[str, Tensor]) -> None:
    batch["labels"] = batch["labels"].roll(-1, 1)


def _count_positions(batch: dict[str, Tensor]) -> None:
    batch["position_ids"] = torch.arange(batch["tokens"].size(1)).expand_as(batch["tokens"])


def _weigh_by_own_tokens(batch: dict[str, Tensor]) -> None:
    batch["loss_mask"] = batch["loss_mask"] / batch["loss_mask"].sum(1, keepdim=True).clamp(min=1)


SCRIPTS = {
    "labels shifted after slicing": (_shift_labels, CP),
    "positions counted after slicing": (_count_positions, f"{CP} --position-embedding-type learned_absolute"),
    "samples weighed by a rank's tokens": (_weigh_by_own_tokens, CP),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_faults_of_a_script_are_found(name: str) -> None:
    change, flags = SCRIPTS[name]
    with pytest.raises(RankError, match="differs from the step on one rank"):
        train(2, flags, prepare=_after_slicing(change))


def _fail_in_trial(batch: dict[str, Tensor]) -> None:
    from cp_plugin.megatron.state import STATE

    if STATE.trial:
        raise KeyError("a name of this fork")


def test_a_step_that_cannot_be_run_is_reported_and_the_run_starts(capfd: pytest.CaptureFixture[str]) -> None:
    got = train(2, CP, prepare=_after_slicing(_fail_in_trial))
    assert "the check of a training step could not be run: KeyError: 'a name of this fork'" in capfd.readouterr().out
    assert [record.losses for record in got] == [record.losses for record in _unchecked(CP)]


def test_a_gradient_times_the_number_of_ranks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.selfcheck import readings

    monkeypatch.setattr(runtime, "context_parallel", lambda: type("of four ranks", (), {"size": 4}))
    flat = [torch.randn(50, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    alone, moved, many = (
        readings.Result(readings.projections(x, torch.device("cpu")), {"loss": 2.0})
        for x in (flat, [x * (1 + 1e-7) for x in flat], [flat[0], 4 * flat[1], flat[2] * (1 + 5e-7)])
    )
    assert readings.differences(alone, alone, [moved], "abc", 1e-5) == []
    (found,) = readings.differences(many, alone, [moved], "abc", 1e-5)
    assert found.startswith("the gradient of b by") and found.endswith("the first of 1 of 3 that differ")
    assert "; it is 4 times that of one rank, the number of context-parallel ranks)" in found
