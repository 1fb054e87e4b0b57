"""``--cp-log-traffic``: bytes by the closed formula on every axis, in the log and in Megatron's writers."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from harness import SGD, train
from nightly import one_case

from cp_plugin import Options, Problem
from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.packs import place_documents
from cp_plugin.cli.draw.calls import record
from cp_plugin.comm import Ledger, TraceMesh, Waited, Waits
from cp_plugin.methods import registry as providers
from cp_plugin.placement.documents import place

pytestmark = pytest.mark.usefixtures("adapter")

PROBLEM = Problem(size=2, seq_length=64, heads=4, kv_heads=2, head_dim=16, batch=2, dtype=torch.float32)
CALLS = 2 * 2  # layers and micro-batches
RING = "--context-parallel-size 2 --cp-provider ring"
SENT = "bytes sent by rank 0 per iteration"


def _lines(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().out.splitlines() if SENT in line]


def test_tensorboard_and_wandb_writers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from megatron.training import global_vars

    class Wandb:
        config: ClassVar[dict[str, str]] = {}

        def finish(self) -> None: ...

        def log(self, numbers: dict[str, float], iteration: int) -> None:
            if any(name.startswith("cp-plugin") for name in numbers):
                print(f"wandb {iteration} {numbers}", flush=True)

    monkeypatch.setattr(global_vars, "_set_wandb_writer", lambda args: None)
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", Wandb())
    training = SGD.replace("--log-interval 1", "--log-interval 2")
    train(2, f"{RING} --cp-layout contiguous --cp-log-traffic --tensorboard-dir {tmp_path}", steps=4, training=training)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if name.startswith("cp-plugin/")]
    found = {name.removeprefix("cp-plugin/"): events.Scalars(name) for name in names}
    assert all([event.step for event in values] == [2, 4] for values in found.values())
    formula = sum(providers.get("ring").traffic(PROBLEM, Options(), 0).values())
    assert [event.value for event in found["bytes on cp"]] == [CALLS * formula] * 2
    assert all(0 <= event.value <= 1 for event in found["overlap"])
    assert all(event.value > 0 for event in found["waited, seconds"])
    assert all(1 <= event.value <= 2 for event in found["waited, max over mean"])
    uneven = record("ring", 2, seq_length=64, heads=4, kv_heads=2, layout="contiguous").balance()
    assert uneven > 1.4 and [event.value for event in found["work, max over mean"]] == [pytest.approx(uneven)] * 2
    out = capfd.readouterr().out
    assert set(re.findall(r"wandb (\d) \{'cp-plugin/([^']+)'", out)) == {(i, n) for i in "24" for n in found}
    lines = [line for line in out.splitlines() if SENT in line]
    sent = f"bytes sent by rank 0 per iteration: {CALLS * formula:,} ("
    assert all(line.startswith(f"cp_plugin: iteration {i}: {sent}") for i, line in zip((2, 4), lines, strict=True))
    assert re.search(
        r"; overlap: \S+; waited, seconds: \S+; waited, max over mean: \S+; work, max over mean: 1.4", lines[0]
    )


@one_case
@pytest.mark.parametrize(
    ("provider", "flags", "options", "axes"),
    [
        ("attention2d", "--cp-grid 2x2 --cp-head-groups 2", Options(grid=(2, 2), head_groups=2), {"q", "kv"}),
        ("burst", "--cp-intra-size 2 --cp-backward q", Options(intra_size=2, backward="q"), {"inter", "intra"}),
        ("ring", "--cp-head-parallel 2", Options(head_parallel=2), {"cp", "head"}),
    ],
)
def test_log_has_every_axis(
    capfd: pytest.CaptureFixture[str], provider: str, flags: str, options: Options, axes: set[str]
) -> None:
    train(4, f"--context-parallel-size 4 --cp-provider {provider} {flags} --cp-log-traffic")
    (line,) = _lines(capfd)
    printed: dict[tuple[str, str], int] = {}
    for phase, axis, sent in re.findall(r"(forward|backward) \w+ on (\w+): ([\d,]+)", line):
        printed[phase, axis] = printed.get((phase, axis), 0) + int(sent.replace(",", ""))
    problem = replace(PROBLEM, size=4)
    settled = providers.settle(provider, problem, options)
    formula = settled.provider.traffic(problem, settled.options, 0)
    assert printed == {key: CALLS * sent for key, sent in formula.items()}
    assert {axis for _, axis in printed} == axes
    assert f"per iteration: {sum(printed.values()):,} (" in line


def test_no_overhead_without_the_flag() -> None:
    def refuse() -> None:
        from cp_plugin.megatron.selfcheck import step_traffic as traffic

        def never(*args: object) -> None:
            raise AssertionError("not asked for")

        traffic._report, Waits.__init__ = never, never

    train(2, RING, steps=2, prepare=refuse)
    with pytest.raises(Exception, match="not asked for"):
        train(2, f"{RING} --cp-log-traffic", steps=2, prepare=refuse)


def test_linear_layers_have_no_balance(capfd: pytest.CaptureFixture[str]) -> None:
    train(2, "--context-parallel-size 2 --cp-linear-attention basic --cp-log-traffic")
    (line,) = _lines(capfd)
    assert "; overlap: " in line and "work" not in line


@pytest.mark.parametrize(
    ("provider", "options"),
    [
        ("ring", {}),
        ("ring", {"layout": "zigzag", "head_parallel": 2}),
        ("striped", {}),
        ("attention2d", {"grid": (2, 2), "head_groups": 2}),
        ("all_gather", {"layout": "contiguous"}),
        ("ulysses", {}),
        ("burst", {"intra_size": 2}),
    ],
)
def test_visible_pairs_match_recorded_work(provider: str, options: dict) -> None:
    from cp_plugin.megatron.selfcheck.step_traffic import visible_pairs

    size, problem = 4, replace(PROBLEM, size=4, kv_heads=4)
    axes = providers.settle(provider, problem, Options(**options)).provider.axes(size, Options(**options))
    meshes = [TraceMesh(axes, rank) for rank in range(size)]
    counted = [visible_pairs(ContextParallel(provider, mesh=m, problem=problem, **options), problem) for m in meshes]
    recorded = record(provider, size, seq_length=64, heads=4, kv_heads=4, **options).work()
    assert counted == [sum(steps) for steps in recorded]


@pytest.mark.parametrize("layout", ["zigzag", "documents"])
def test_visible_pairs_of_a_pack(layout: str) -> None:
    from cp_plugin.megatron.selfcheck.step_traffic import visible_pairs

    bounds = (0, 3, 40, 41, 57, 64)
    problem = replace(PROBLEM, size=4, kv_heads=4, bounds=bounds)
    counted = []
    for rank in range(4):
        cp = ContextParallel("needed", mesh=TraceMesh({"cp": 4}, rank), problem=problem, layout=layout)
        cp = place_documents(cp, torch.tensor(bounds)) if layout == "documents" else cp
        counted.append(visible_pairs(cp, replace(problem, placed=cp.layout)))
    lengths = [b - a for a, b in pairwise(bounds)]
    assert sum(counted) == sum(n * (n + 1) // 2 for n in lengths) * problem.heads
    if layout == "documents":
        assert counted == [work * problem.heads for work in place(lengths, 4).work().tolist()]


def test_waited_and_in_flight_time() -> None:
    waits = Waits()
    hidden = waits.timed(lambda: 1, cuda=False)
    time.sleep(0.05)
    assert hidden() == 1
    waits.timed(lambda: time.sleep(0.05), cuda=False)()
    waited, under_way = waits.total()
    assert 0.05 <= waited < 0.09 < 0.1 <= under_way < 0.2
    assert waits.total() == (waited, under_way), "asked again"
    ledger = Ledger()
    ledger.waits = waits
    ledger.reset()
    assert waits.total() == Waited()


def test_scalars_of_a_group() -> None:
    from cp_plugin.megatron.selfcheck.step_traffic import Measured, scalars

    group = [Measured({"q": 10, "kv": 4}, Waited(1.0, 10.0), 30), Measured({"kv": 8}, Waited(3.0, 10.0), 10)]
    assert scalars(group, 2) == {
        "bytes on kv": 4,
        "bytes on q": 5,
        "overlap": 0.8,
        "waited, seconds": 1.0,
        "waited, max over mean": 1.5,
        "work, max over mean": 1.5,
    }
    assert scalars([Measured({}, Waited(), 0)], 1) == {}
