"""Start-up: agreement of the ranks, audit, self-check."""

from __future__ import annotations

import os
import re
import runpy
import socket
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_faults import STRIPED
from nightly import nightly
from training import train

from cp_plugin.megatron.patches.hooks import difference
from cp_plugin.testing.launch import RankError

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("adapter")


def test_the_audit_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    train(4, f"{STRIPED} --pipeline-model-parallel-size 2")
    text = capfd.readouterr().out
    assert text.count("attention layers") == 1
    rows = _rows(text)
    assert rows["provider"].startswith("striped: Striped Attention")
    assert rows["layout"].startswith("striped; each of 2 ranks holds 1/2")
    assert rows["backend"].startswith("sdpa: ")
    assert rows["attention layers"] == "2 of 2 replaced"
    assert rows["self-check"] == "once, before training"
    assert text.count("cp_plugin: self-check passed: a step") == 1
    (said,) = (value for name, value in rows.items() if name.startswith("replaced in megatron-core"))
    assert re.fullmatch(r"\d\d functions; --cp-verbose lists them", said)
    assert not any(target in text for target in REPLACED)


REPLACED = ("get_batch_on_this_cp_rank", "get_pos_emb_on_this_cp_rank", "LocalSpecProvider.core_attention")


def test_audit_shows_choices_and_reasons(capfd: pytest.CaptureFixture[str]) -> None:
    train(4, "--context-parallel-size 4 --cp-provider burst --cp-intra-size 4", prepare=_two_hosts)
    text = capfd.readouterr().out
    rows = _rows(text)
    assert rows["--cp-intra-size"] == "4"
    assert rows["--cp-backward"] == "kv"
    assert "--cp-grid" not in rows and "--cp-head-parallel" not in rows
    warning = "warning: --cp-intra-size 4 does not match the hosts: ranks 0-1 on a, 2-3 on b"
    assert rows["why"] == warning
    assert text.splitlines().count(f"cp_plugin: {warning}") == 1
    assert "backward: k, v, dk and dv travel" in text
    assert "self-check passed: a step" in text, "a single rank ignores the flags of several"


def _two_hosts() -> None:
    socket.gethostname = lambda: "aabb"[int(os.environ["RANK"])]


def _rows(text: str) -> dict[str, str]:
    """Left -> right column of the table."""
    cells = ([cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| "))
    return {row[1]: row[2] for row in cells if len(row) == 4}


def _spread_hosts() -> None:
    """Four hosts on a network that is not Gloo's, as far as the table can see."""
    socket.gethostname = lambda: f"host{os.environ['RANK']}"
    from cp_plugin.megatron.state import STATE

    assert STATE.model is not None
    STATE.model = replace(STATE.model, problem=STATE.model.problem.with_transport(network="nccl"))


def test_start_up_says_what_the_table_chose(capfd: pytest.CaptureFixture[str]) -> None:
    """What it says is what is sent: as many bytes as with the flag, of which it says nothing."""
    flags = "--bf16 --context-parallel-size 2 --cp-provider ring"
    sent = {}
    for name, prepare, more, why in (
        ("bfloat16", _spread_hosts, "", "leave messages between hosts exposed; dk and dv are rounded at each"),
        ("float32", None, "", "on CPU ranks there is no slow network to relieve"),
        ("asked for model", None, "--cp-gradient-dtype model", ""),
    ):
        sent[name] = [rank.sent for rank in train(2, f"{flags} {more}", prepare=prepare)]
        told = " ".join(line.strip("| ") for line in capfd.readouterr().out.splitlines())
        assert ("sums of gradients travel in" in told) == bool(why)
        assert f"sums of gradients travel in {name}" in told or not why
        assert all(word in told for word in why.split())
        assert "self-check passed" in told
    assert sent["bfloat16"] == sent["asked for model"] != sent["float32"]


def test_ranks_that_disagree_are_stopped() -> None:
    flags = ["--cp-provider ring --cp-layout zigzag"] * 3 + ["--cp-provider striped"]
    with pytest.raises(RankError) as raised:
        train(4, "--context-parallel-size 4 --calculate-per-token-loss", rank_flags=flags)
    text = str(raised.value)
    assert "ValueError: the ranks were started with different settings" in text
    assert "--cp-provider is 'ring' on ranks 0-2 and 'striped' on rank 3" in text
    assert "--cp-layout is 'zigzag' on ranks 0-2 and None on rank 3" in text


def test_megatron_flags_are_compared_on_a_rank_without_provider() -> None:
    ranks = ["--tensor-model-parallel-size 2 --rotary-base 500", "--context-parallel-size 2 --cp-provider ring"]
    with pytest.raises(RankError) as raised:
        train(2, rank_flags=ranks)
    for what in ("--tensor-model-parallel-size is 2", "--rotary-base is 500", "--cp-provider is None"):
        assert f"{what} on rank 0 and " in str(raised.value)


def test_flags_of_an_earlier_run_are_not_compared() -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.flags.args import Settings
    from cp_plugin.megatron.state import STATE

    STATE.compared = Namespace(seq_length=1)
    runtime.configure(Settings())
    assert STATE.compared is None


def test_a_setting_that_a_rank_does_not_have_differs() -> None:
    assert "a is 1 on rank 0 and missing on rank 1" in (difference([{"a": "1"}, {}]) or "")


def test_one_layer_on_one_rank_is_enough_to_refuse() -> None:
    from cp_plugin.megatron.selfcheck import audit

    ranks = audit.Coverage(replaced=("layer 1",)), audit.Coverage(replaced=("layer 2",), missed=("layer 3 (Foreign)",))
    with pytest.raises(ValueError, match=r"every attention layer of this model: 2 of 3\. Not replaced: layer 3 \(For"):
        audit.check(audit.union(ranks))


@nightly
def test_audit_and_self_check_cost_little() -> None:
    """At most 2 % of 1,000 iterations of the quickstart's model."""
    times: dict[str, list[float]] = {"audit": [], "check": [], "training": []}

    def timed(function: Callable[..., Any], kept: list[float]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            kept.append(time.perf_counter() - start)
            return result

        return call

    def prepare() -> None:
        from megatron.training import training

        from cp_plugin.megatron.selfcheck import audit, step

        audit.run, step.check = timed(audit.run, times["audit"]), timed(step.check, times["check"])
        training.train_step = timed(training.train_step, times["training"])

    model = " ".join(runpy.run_path(str(ROOT / "examples/quickstart.py"))["MODEL"])
    flags = "--context-parallel-size 4 --cp-provider striped"
    records = train(4, flags, steps=4, model=model, prepare=prepare, ask=lambda _: times)
    audit, check, steps = ([taken for record in records for taken in record.result[name]] for name in times)
    assert max(audit) + max(check) <= 0.02 * 1000 * statistics.median(steps)


def test_kernels_are_chosen_for_the_local_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron sets the device after checking flags; until then all ranks would use the first one."""
    from cp_plugin.megatron.cpu import mode as cpu
    from cp_plugin.megatron.patches import hooks

    assert hooks._device() == torch.device("cpu")
    monkeypatch.setattr(cpu, "active", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert hooks._device() == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert hooks._device() == torch.device("cuda", 0), "each rank is shown its own device alone"


@pytest.mark.parametrize(
    ("built", "symbol"),
    [
        ({"mtp_num_layers": 1}, "megatron.core.transformer.multi_token_prediction:process_mtp_loss"),
        ({"num_moe_experts": 4}, "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count"),
        ({"hybrid_layer_pattern": "M*"}, "megatron.core.ssm.mamba_context_parallel:_redo_attention_load_balancing"),
        ({}, ""),
    ],
)
def test_a_model_that_a_script_builds_without_a_flag_has_its_patches(
    adapter: None, built: dict[str, object], symbol: str
) -> None:
    from cp_plugin.megatron.flags.args import Settings
    from cp_plugin.megatron.patches import hooks, patching
    from cp_plugin.megatron.state import STATE

    hooks.start(Settings(provider="ring"), None, Namespace())
    before = patching.installed()
    assert symbol not in before
    model = torch.nn.Module()
    model.config = SimpleNamespace(**built)  # type: ignore[assignment]
    STATE.complete([model])
    assert (symbol in patching.installed()) if built else patching.installed() == before
