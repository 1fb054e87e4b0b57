"""``--cp-gradient-dtype`` in Megatron: flags, what the table chooses, and with ``--cp-provider auto``."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest
from training import train

from cp_plugin.megatron.flags.option_flags import shown
from cp_plugin.megatron.state import STATE

pytestmark = pytest.mark.usefixtures("adapter")

MODEL = "--cp-gradient-dtype model"


def test_flags(validated: Callable[..., argparse.Namespace]) -> None:
    """``auto`` is no flag at all, ``float32`` and ``model`` are the user's word."""
    from cp_plugin.megatron import runtime

    for word, value in (("auto", None), ("float32", "float32"), ("model", "model")):
        validated(f"--bf16 --context-parallel-size 4 --cp-provider ring --cp-gradient-dtype {word}")
        assert runtime.settings().options.gradient_dtype == value
        assert shown(runtime.settings().options) == ({"--cp-gradient-dtype": value} if value else {})
    validated("--context-parallel-size 4 --cp-provider ulysses --cp-gradient-dtype auto")
    with pytest.raises(ValueError, match="--cp-gradient-dtype float32 has no effect with --cp-provider ulysses"):
        validated("--context-parallel-size 4 --cp-provider ulysses --cp-gradient-dtype float32")


def _between_hosts() -> None:
    """Four hosts on a network that is not Gloo's, as far as the table can see."""
    socket.gethostname = lambda: f"host{os.environ['RANK']}"
    assert STATE.model is not None
    STATE.model = replace(STATE.model, problem=replace(STATE.model.problem, network="nccl"))


@pytest.mark.parametrize(
    ("prepare", "more", "dtype", "why"),
    [
        (
            _between_hosts,
            "",
            "bfloat16",
            "leave messages between hosts exposed; dk and dv are rounded at each",
        ),
        (_between_hosts, "--cp-gradient-dtype float32", "", ""),
        (None, "", "float32", "on CPU ranks there is no slow network to relieve"),
    ],
    ids=["between hosts", "the user's word", "Gloo"],
)
def test_start_up_says_what_the_table_chose(
    prepare: Callable[[], None] | None, more: str, dtype: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it says is what is sent: as many bytes as with the flag."""
    flags = "--bf16 --context-parallel-size 4 --cp-provider ring"
    got = train(4, f"{flags} {more}", prepare=prepare)
    told = " ".join(line.strip("| ") for line in capfd.readouterr().out.splitlines())
    assert ("sums of gradients travel in" in told) == bool(dtype)
    assert f"sums of gradients travel in {dtype}" in told or not dtype
    assert all(word in told for word in why.split())
    assert "self-check passed" in told
    same = train(4, f"{flags} --cp-gradient-dtype {'model' if dtype == 'bfloat16' else 'float32'}")
    assert [rank.sent for rank in got] == [rank.sent for rank in same]


def test_auto_may_choose_a_provider_without_sums(
    validated: Callable[..., argparse.Namespace], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag permits lower precision; ``ulysses``, which has no sums, remains a candidate."""
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.planned import auto as planned

    auto = f"--bf16 --context-parallel-size 4 --cp-provider auto --cp-cluster h100-1-per-node {MODEL}"
    with monkeypatch.context() as patch:
        ulysses = lambda found, *_: next(p for p in found.found if p.candidate.name == "ulysses")  # noqa: E731
        patch.setattr(planned, "_best", ulysses)
        args = validated(f"{auto} --num-query-groups 4")
    told = capsys.readouterr().out
    assert runtime.settings().provider == "ulysses" and args.cp_gradient_dtype is None
    assert "--cp-gradient-dtype" not in told.partition("equivalent flags without the planner: ")[2].splitlines()[0]
    validated(f"{auto} --cp-head-groups 1")
    told = capsys.readouterr().out
    assert runtime.settings().options.gradient_dtype == "model"
    assert MODEL in told.partition("equivalent flags without the planner: ")[2].splitlines()[0]
