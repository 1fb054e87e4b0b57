"""``--cp-log-traffic``: what is printed is the providers' closed formula, for every axis."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from harness import train
from nightly import one_case

from cp_plugin import Options, Problem
from cp_plugin.methods import registry as providers

pytestmark = pytest.mark.usefixtures("adapter")

PROBLEM = Problem(size=4, seq_length=64, heads=4, kv_heads=2, head_dim=16, batch=2, dtype=torch.float32)
CALLS = 2 * 2  # layers and micro-batches


def test_the_traffic_log_is_the_closed_formula(capfd: pytest.CaptureFixture[str]) -> None:
    train(2, "--context-parallel-size 2 --cp-provider striped --cp-log-traffic", steps=4, training=_LOG_EVERY_2)
    lines = [line for line in capfd.readouterr().out.splitlines() if "bytes sent by rank 0 per iteration" in line]
    formula = providers.get("striped").traffic(replace(PROBLEM, size=2), Options(), 0)
    total = CALLS * sum(formula.values())
    there, back = CALLS * formula["forward", "cp"], CALLS * formula["backward", "cp"]
    detail = f"{total:,} (backward exchange on cp: {back:,}, forward exchange on cp: {there:,})"
    sent = [line.partition("; overlap")[0] for line in lines]
    assert sent == [f"cp_plugin: iteration {i}: bytes sent by rank 0 per iteration: {detail}" for i in (2, 4)]


@one_case
@pytest.mark.parametrize(
    ("provider", "flags", "options", "axes"),
    [
        ("attention2d", "--cp-grid 2x2 --cp-head-groups 2", Options(grid=(2, 2), head_groups=2), {"q", "kv"}),
        ("burst", "--cp-intra-size 2 --cp-backward q", Options(intra_size=2, backward="q"), {"inter", "intra"}),
        ("ring", "--cp-head-parallel 2", Options(head_parallel=2), {"cp", "head"}),
    ],
)
def test_the_traffic_log_names_every_axis(
    capfd: pytest.CaptureFixture[str], provider: str, flags: str, options: Options, axes: set[str]
) -> None:
    train(4, f"--context-parallel-size 4 --cp-provider {provider} {flags} --cp-log-traffic")
    (line,) = (line for line in capfd.readouterr().out.splitlines() if "bytes sent by rank 0 per iteration" in line)
    printed: dict[tuple[str, str], int] = {}
    for phase, axis, sent in re.findall(r"(forward|backward) \w+ on (\w+): ([\d,]+)", line):
        printed[phase, axis] = printed.get((phase, axis), 0) + int(sent.replace(",", ""))
    settled = providers.settle(provider, PROBLEM, options)
    formula = settled.provider.traffic(PROBLEM, settled.options, 0)
    assert printed == {key: CALLS * sent for key, sent in formula.items()}
    assert {axis for _, axis in printed} == axes
    assert f"per iteration: {sum(printed.values()):,} (" in line


_LOG_EVERY_2 = (
    "--micro-batch-size 2 --global-batch-size 4 --lr 0.05 --lr-decay-style constant --optimizer sgd --clip-grad 0 "
    "--log-interval 2 --eval-iters 0 --eval-interval 1000"
)
