"""``--cp-gradient-dtype`` in Megatron: trainings against one rank's, and with ``--cp-provider auto``."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest
from harness import train
from nightly import one_case
from test_fp8 import BF16, compare

from cp_plugin.core.options import Options
from cp_plugin.megatron.flags.option_flags import shown

pytestmark = pytest.mark.usefixtures("adapter")

MODEL = "--cp-gradient-dtype model"
LOSS, GRADIENT = 5e-5, 0.015
"""Relative errors of the loss of each of two steps, and of every parameter's gradient (norm), in bfloat16. Measured:
1e-6 and 0.0055 with sums in float32, 8e-6 and 0.0060 with sums in bfloat16."""


@one_case
@pytest.mark.parametrize("provider", ["ring", "attention2d --cp-grid 2x2"])
def test_two_steps_are_those_of_one_rank(provider: str, capfd: pytest.CaptureFixture[str]) -> None:
    flags = f"{BF16} --context-parallel-size 4 --cp-provider {provider}"
    wide, narrow = (train(4, f"{flags} {more}", steps=2) for more in ("", MODEL))
    assert "self-check passed" in capfd.readouterr().out
    for got in (wide, narrow):
        loss, gradient = compare(got)
        assert loss <= LOSS and gradient <= GRADIENT
    for a, b in zip(wide, narrow, strict=True):
        assert a.losses[0] == b.losses[0], "the forward is the same"
        assert sum(b.sent.values()) < sum(a.sent.values())


def test_float32_is_no_flag_at_all(validated: Callable[..., argparse.Namespace]) -> None:
    from cp_plugin.megatron import runtime

    validated("--context-parallel-size 4 --cp-provider ulysses --cp-gradient-dtype float32")
    assert runtime.settings().options.gradient_dtype is None
    assert shown(Options(gradient_dtype="model")) == {"--cp-gradient-dtype": "model"}


def test_auto_may_choose_a_provider_without_sums(
    validated: Callable[..., argparse.Namespace], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag permits lower precision; ``ulysses``, which has no sums, remains a candidate."""
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.planned import auto as planned

    auto = f"--bf16 --context-parallel-size 4 --cp-provider auto --cp-cluster h100-1-per-node {MODEL}"
    with monkeypatch.context() as patch:
        patch.setattr(planned, "_ours", lambda real: lambda candidate: candidate.name == "ulysses")
        args = validated(f"{auto} --num-query-groups 4")
    told = capsys.readouterr().out
    assert runtime.settings().provider == "ulysses" and args.cp_gradient_dtype is None
    assert "--cp-gradient-dtype" not in told.partition("the same without the planner: ")[2].splitlines()[0]
    validated(f"{auto} --cp-head-groups 1")
    told = capsys.readouterr().out
    assert runtime.settings().options.gradient_dtype == "model"
    assert MODEL in told.partition("the same without the planner: ")[2].splitlines()[0]
