"""``--cp-gradient-dtype`` in Megatron: what the table chooses, and with ``--cp-provider auto``."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest
from training import train

from cp_plugin.megatron.state import STATE

pytestmark = pytest.mark.usefixtures("adapter")

MODEL = "--cp-gradient-dtype model"


def _between_hosts() -> None:
    """Four hosts on a network that is not Gloo's, as far as the table can see."""
    socket.gethostname = lambda: f"host{os.environ['RANK']}"
    assert STATE.model is not None
    STATE.model = replace(STATE.model, problem=STATE.model.problem.with_transport(network="nccl"))


def test_start_up_says_what_the_table_chose(capfd: pytest.CaptureFixture[str]) -> None:
    """What it says is what is sent: as many bytes as with the flag, of which it says nothing."""
    flags = "--bf16 --context-parallel-size 2 --cp-provider ring"
    sent = {}
    for name, prepare, more, why in (
        ("bfloat16", _between_hosts, "", "leave messages between hosts exposed; dk and dv are rounded at each"),
        ("float32", None, "", "on CPU ranks there is no slow network to relieve"),
        ("asked for model", None, MODEL, ""),
    ):
        sent[name] = [rank.sent for rank in train(2, f"{flags} {more}", prepare=prepare)]
        told = " ".join(line.strip("| ") for line in capfd.readouterr().out.splitlines())
        assert ("sums of gradients travel in" in told) == bool(why)
        assert f"sums of gradients travel in {name}" in told or not why
        assert all(word in told for word in why.split())
        assert "self-check passed" in told
    assert sent["bfloat16"] == sent["asked for model"] != sent["float32"]


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
