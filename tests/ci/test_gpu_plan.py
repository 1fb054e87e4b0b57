"""The plan of ci/gpu/check.sh: which steps have time, what is wrong or not run, and which timings are withheld."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equipment.nccl import lazy
from nightly import nightly
from processes import alive, wait_until

from cp_plugin.engine.attention.calls import Setup
from cp_plugin.engine.methods import registry as providers

ROOT = Path(__file__).parents[2]
HERE = ROOT / "ci/gpu"
OUT_OF_TIME = (None, {"reason": "out of time: the cap of its step"})
TRITON, FLASH = "kernel triton for heads of 128/128", "kernel sdpa for heads of 128/128"


@pytest.fixture
def plan(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("ci/gpu/plan")


def left_by(folder: Path, name: str, **had: object) -> None:
    """Write the file of an unfinished step, or one with other contents."""
    nothing = {"finished": False, "error": "", "seconds": 1.0, "checks": [], "figures": [], "not_run": []}
    (folder / f"{name}.json").write_text(json.dumps({"step": name} | nothing | had))


@pytest.fixture
def report(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("ci/gpu/report")


@pytest.mark.parametrize("over", [0.0, 10.0])
def test_calls_end_in_time_and_have_the_steps_that_teach_most(plan: ModuleType, over: float) -> None:
    """Even if every step is killed: ``over`` seconds after its cap."""

    def call(budget: int, first: str) -> dict[str, float]:
        elapsed, caps = 0.0, {}
        for name in list(plan.PLAN)[list(plan.PLAN).index(first) :]:
            seconds = plan.cap(name, budget, elapsed, smoke=False)
            if seconds is None:
                break
            caps[name] = seconds
            elapsed += seconds + over
        assert elapsed + plan.END_S <= budget
        return caps

    nine, three = call(540, "environment"), call(180, "extremes")
    assert {"environment", "our_kernels", "nccl", "megatron_training", "performance", "hot_path"} <= nine.keys()
    assert {"extremes", "providers"} <= three.keys()
    assert max(step.seconds for step in plan.PLAN.values()) * plan.LONGER < 600


def test_the_page_describes_the_plan(plan: ModuleType) -> None:
    """Steps in their order, with their caps; estimates that keep them, and a rehearsal of each."""
    text = (ROOT / "docs/gpu/README.md").read_text().split("## The plan of nine minutes")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [(row[0].strip("`"), int(row[2])) for row in rows] == [
        (name, step.seconds) for name, step in plan.PLAN.items()
    ]
    assert all(int(estimate) <= int(cap) and rehearsal.isdecimal() for *_, cap, estimate, rehearsal in rows)


@pytest.mark.parametrize("how", ["killed 0.5 s after the cap of 3 s for nccl", "the call was stopped"])
def test_a_step_that_does_not_end_is_killed_with_its_processes(how: str, tmp_path: Path) -> None:
    """By its cap, or by SIGTERM to the call: what it had stays, in few files, with its last case; nothing is wrong."""
    (tmp_path / "record.py").write_text(
        "import json, os, pathlib, subprocess, sys, time; child = subprocess.Popen(['sleep', '600'])\n"
        "out = pathlib.Path(sys.argv[2])\n"
        "had = {'finished': False, 'error': '', 'seconds': 1.0, 'figures': [], 'not_run': [], 'now': 'ring, full'}\n"
        "had['checks'] = [{'group': 'over NCCL', 'name': 'ring', 'ok': True, 'of': [], 'detail': {}}]\n"
        "(out / 'nccl.json').write_text(json.dumps({'step': 'nccl'} | had))\n"
        "pathlib.Path(__file__).with_name('child').write_text(str(child.pid)); time.sleep(600)\n"
    )
    text = (
        "import pathlib, sys, plan\n"
        "plan.HERE, plan.GRACE_S, plan.SMOKE = pathlib.Path(sys.argv[1]), 0.5, 3 / plan.PLAN['nccl'].seconds\n"
        "sys.argv[1:] = ['--smoke', '--only', 'nccl', '--out', sys.argv[1] + '/out']; sys.exit(plan.main())\n"
    )
    command, started = [sys.executable, "-c", text, str(tmp_path)], tmp_path / "child"
    call = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(HERE)}, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: call.poll() is not None or (started.exists() and started.read_text()))
    if stopped := how == "the call was stopped":
        call.terminate()
    output, _ = call.communicate(timeout=30)
    assert call.returncode == (143 if stopped else 0) and "PASS: nothing is wrong" in output
    wait_until(lambda: not alive(int(started.read_text())))  # a killed process may take a moment to end
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"check.json", "page.md", "check.log"}
    page = (tmp_path / "out/page.md").read_text()
    assert "| over NCCL | 1 | 1 |" in page and f"| the rest of nccl | {how}, during ring, full |" in page


def test_only_timings_of_what_is_wrong_are_withheld(report: ModuleType, tmp_path: Path) -> None:
    """A kernel alone, and a provider on one kernel."""

    def check(name: str, *of: str) -> dict[str, Any]:
        return {"group": "checked", "name": name, "ok": False, "of": of, "detail": {"failure": "planted"}}

    def figure(name: str, value: float, *of: str) -> dict[str, Any]:
        return {"group": "timed", "name": name, "value": value, "wanted": None, "of": of, "detail": {}}

    wrong = [check("triton's forward", TRITON), check("striped on torch's", "provider striped", FLASH)]
    wrong.append(check("first words"))  # of nothing that is timed
    kept = {
        "sdpa": figure("sdpa", 1.01, FLASH),
        "triton, other heads": figure("triton, other heads", 1.02, "kernel triton for heads of 64/64"),
        "ring on torch's": figure("ring on torch's", 1.03, "provider ring", FLASH),
        "striped on cuDNN": figure("striped on cuDNN", 1.04, "provider striped", "kernel cudnn for heads of 128/128"),
    }
    gone = [figure("triton", 1.05, TRITON), figure("ring on ours", 1.06, "provider ring", TRITON)]
    gone.append(figure("striped on torch's", 1.07, "provider striped", FLASH))
    left_by(tmp_path, "providers", checks=wrong, finished=True)
    left_by(tmp_path, "performance", figures=[*kept.values(), *gone], finished=True)
    status, page = report.finish(tmp_path), (tmp_path / "page.md").read_text()
    assert status == 1 and "**3 wrong:**" in page
    assert all(f"| {name} | {one['value']:.3g} |" in page for name, one in kept.items())
    assert not any(f"{one['value']:.3g}" in page for one in gone)
    reason = "its timing is withheld, since checked: "
    assert f"| timed: triton; timed: ring on ours | {reason}triton's forward is wrong |" in page
    assert f"| timed: striped on torch's | {reason}striped on torch's is wrong |" in page


def test_steps_that_end_early(report: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that checks and crashed is wrong, also without a file; one that its cap ended, or that measures, is not."""
    right = {"group": "backend sdpa", "name": "ring", "ok": True, "of": [], "detail": {"error": 1e-3, "limit": 2e-3}}
    figure = {"group": "speed", "name": "triton", "value": 0.7, "wanted": [">=", 0.75], "detail": {"ms": 1.25}}
    left_by(tmp_path, "providers", checks=[right])
    left_by(tmp_path, "nccl", checks=[right], capped="killed 10 s after its cap")
    left_by(tmp_path, "performance", figures=[figure])
    report.join(tmp_path, "our_kernels")
    status, page = report.finish(tmp_path), (tmp_path / "page.md").read_text()
    assert status == 1
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")] == [
        "WRONG step our_kernels: it left nothing",
        "WRONG step providers: it crashed: see check.log",
    ]
    assert "| backend sdpa | 1 | 1 | 50% |" in page
    assert "| triton | 0.7 | at least 0.75 | missed | 1.25 |" in page
    assert "| the rest of nccl | killed 10 s after its cap |" in page and "the rest of performance" in page


@nightly
def test_what_stops_a_case_of_several_ranks(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """Whatever happened first: the end of a rank breaks the connections of others, whose errors come after it. A rank
    that raises or never comes is wrong; a library that refuses, a compiler, or a cap leaves a case that is not run."""
    workers = script("ci/gpu/workers")

    def compiled_as(file: str, source: str) -> Callable[[], None]:
        module = ModuleType(file.split("/")[2])
        exec(compile(source, file, "exec"), vars(module))
        return module.call

    def hangs() -> None:
        time.sleep(60)

    def fails() -> None:
        raise ValueError("planted")

    refuses = compiled_as("/site/fla/ops.py", "def call(): raise RuntimeError('not with this Triton')")
    mistaken = compiled_as("/site/fla/ops.py", "def call(): raise TypeError('one argument too many')")
    compiles = compiled_as("/site/triton/compiler/compiler.py", "def call():\n import time\n time.sleep(60)")
    faults = [hangs, fails, refuses, mistaken, compiles]

    def each(case: int) -> None:
        if case % 2 == 0 and dist.get_rank() == 0:
            time.sleep(1)  # so its time for the next case ends later than rank 1's
        elif case % 2 == 1:
            faults[case // 2]() if dist.get_rank() else dist.barrier()

    with lazy.waiting(0):
        results = list(workers.run_on_ranks(workers.Step("nccl", tmp_path, smoke=True), each, 11, ranks=2, case_s=8))
        step = workers.Step("nccl", tmp_path, 2, smoke=True)
        capped = list(workers.run_on_ranks(step, lambda case: case and hangs(), 3, ranks=2, case_s=20))
    assert results[::2] == [(case, [None, None]) for case in range(0, 11, 2)]
    hanging = f"test_gpu_plan.py:{hangs.__code__.co_firstlineno + 1}"
    assert [verdict for _, verdict in results[1::2]] == [
        (False, {"failure": f"ranks [1] did not finish within 8 s; rank 1 in hangs ({hanging})"}),
        (False, {"failure": "rank 1: ValueError: planted"}),
        (None, {"reason": "rank 1: RuntimeError: not with this Triton"}),
        (False, {"failure": "rank 1: TypeError: one argument too many"}),
        (None, {"reason": "ranks [1] were still compiling or autotuning kernels after 8 s"}),
    ]
    assert capped == [(0, [0, 0]), *((case, OUT_OF_TIME) for case in (1, 2))]


def planted_rows(group: str) -> Iterator[tuple[str, str, bool, dict[str, str]]]:
    yield "group", group, True, {}
    match group:
        case "device":
            yield "group", "lost", False, {"failure": "RuntimeError: CUDA error: an illegal memory access"}
        case "raises":
            raise ValueError("planted")
        case "ends":
            os._exit(7)
        case "hangs":
            time.sleep(600)
    yield "group", f"{group}, again", True, {}


@nightly
def test_what_ends_a_process_of_cases(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows so far are kept, and other processes go on."""
    spread = script("ci/gpu/workers").spread
    monkeypatch.syspath_prepend(str(HERE))  # for the processes
    groups = ["device", "raises", "ends", "hangs", "fine"]
    rows = [(group, row[-2:]) for group, row in spread(planted_rows, groups, inline=False, seconds=60)]
    assert sorted(rows, key=str) == sorted(
        [
            *((group, (True, {})) for group in (*groups, "fine")),
            ("device", (False, {"failure": "RuntimeError: CUDA error: an illegal memory access"})),
            ("device", (None, {"reason": "the device was lost in lost"})),
            ("raises", (False, {"failure": "ValueError: planted"})),
            ("ends", (False, {"failure": "its process ended with status 7"})),
            ("hangs", OUT_OF_TIME),
        ],
        key=str,
    )


@nightly
def test_ranks_are_threads_where_nccl_does_not_share_a_gpu(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every provider once, then the rest; the page says why, and what is wrong is wrong."""
    workers, nccl = script("ci/gpu/workers"), script("ci/gpu/nccl")
    monkeypatch.setattr(workers, "once_on_ranks", lambda *_, **__: (False, {"failure": "Duplicate GPU detected"}))
    compare = nccl.compare_to_answer

    def compare_wrong_ring(setup: Setup, *rest: Any) -> object:
        return (False, {"failure": "planted"}) if setup.provider.name == "ring" else compare(setup, *rest)

    monkeypatch.setattr(nccl, "compare_to_answer", compare_wrong_ring)
    on_one_gpu = nccl.Step("nccl", tmp_path, smoke=True)
    on_one_gpu.devices = 1
    assert on_one_gpu.run(nccl.nccl) == 1
    step = json.loads((tmp_path / "nccl.json").read_text())
    names = [check["name"].split(": ")[1].split()[0] for check in step["checks"]]
    every = [*providers.names(), *providers.names("linear")]
    assert sorted(names[: len(every)]) == sorted(every)
    assert {check["group"] for check in step["checks"]} == {"ranks as threads, not over Gloo"}
    assert {name for name, check in zip(names, step["checks"], strict=True) if not check["ok"]} == {"ring"}
    assert step["checks"][0]["of"] == [f"provider {names[0]}"]
    refused = "4 ranks cannot share 1 GPU here: Duplicate GPU detected"
    duplicates = [row for row in step["not_run"] if "Duplicate" in row["reason"]]
    assert duplicates == [{"name": "over Gloo: 4 ranks say their first words", "reason": refused}]


@nightly
def test_a_training_that_goes_wrong(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong gradient, one too small to be seen among others, a loss of NaN or too many bytes on one rank, or no
    self-check. In bfloat16 equal losses, by chance, of one rank in both precisions leave a limit."""
    training = script("ci/gpu/training_runs")
    sizes = {"w": torch.ones(8), "q": torch.ones(8) / 1e6}
    right = training.Trained([4.0, 3.0], sizes, {("forward", "cp"): 8}, {("forward", "cp"): 8}, True)
    too_many = "rank 3 sent {('forward', 'cp'): 9} bytes instead of {('forward', 'cp'): 8}"
    wrong = {
        "w": (3, {"gradients": sizes | {"w": torch.ones(8) + torch.eye(8)[3] / 100}}),
        "q": (3, {"gradients": sizes | {"q": -sizes["q"]}}),
        "losses": (3, {"losses": [4.0, float("nan")]}),
        too_many: (3, {"sent": {("forward", "cp"): 9}}),
        "rank 0: no self-check": (0, {"checked": False}),
    }
    step = training.Step("megatron_training", tmp_path, smoke=True)
    for said, (rank, changed) in {"": (0, {}), **wrong}.items():
        of_ranks = [right._replace(**changed) if n == rank else right for n in range(4)]
        monkeypatch.setattr(training, "train", lambda n, *_, of_ranks=of_ranks: of_ranks if n > 1 else [right])
        ok, detail = training.compare(training.Run("planted", ""), step)
        assert (ok, detail.get("failure", detail["tensor"])) == (not said, said or "losses")
    rounded = right._replace(gradients={name: 1.01 * x for name, x in sizes.items()})
    limits = training.limits_of(rounded, right)
    for loss, near in ((4.0001, True), (4.001, False)):
        ok, detail = training.compare_trained([rounded._replace(losses=[loss, 3.0])], rounded, limits)
        assert (ok, detail["tensor"]) == (near, "losses")
