"""ci/gpu/check.sh on a CPU with tiny shapes: it needs only torch and triton, and finds planted faults."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest
import third_party
from nightly import nightly

from cp_plugin.engine.methods import registry as providers

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/gpu"
MAY_BE_MISSING = (
    *("rich", "typer", "psutil", "megatron", "transformers", "hypothesis", "pytest", "_pytest", "matplotlib"),
)
FAULTS = """
import time
from dataclasses import replace
from cp_plugin.engine.methods.ring import PROVIDERS

ring = replace(PROVIDERS[0], layouts=("contiguous",))

def wrong_scale(mesh, local, *call):
    return ring.build(mesh, replace(local, scores=local.scores._replace(scale=1.01 * local.scores.scale)), *call)

def wrong_rank(mesh, local, problem, options):
    return (wrong_scale if mesh.index == 1 else ring.build)(mesh, local, problem, options)

def missing_rank(mesh, local, problem, options):
    if mesh.size == 4 and mesh.index == 3:
        time.sleep(3600)
    return ring.build(mesh, local, problem, options)

WRONG_SCALE, WRONG_RANK, MISSING_RANK = (
    replace(ring, name=build.__name__, build=build) for build in (wrong_scale, wrong_rank, missing_rank)
)
"""
FIGURES = (
    "Peak memory over the prediction",
    "Compute efficiency of emulated ranks",
    "Bandwidth of decode over a copy's",
    "Bandwidth over a copy's",
    "Speed of one staircase launch over its tiles",
    "Time of the row term over a backward's",
    "Microseconds of the host in a ring step",
    "Share of the time that Gloo is waited for",
)
WRONG_MERGE = """
right = merge

def merge(*parts):
    out, lse = right(*parts)
    return 1.02 * out, lse
"""


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with ``folder/site`` first in the path."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(folder / "site"), "COMMIT": "of a test"}
    command = ["bash", str(ROOT / "ci/gpu/check.sh"), "--out", str(folder / "out"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def wrong_in(output: str) -> list[str]:
    return [line.removeprefix("WRONG ") for line in output.split("== result")[-1].splitlines() if "WRONG" in line]


def report(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "ci/gpu/report.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Has a ``site`` that hides packages a GPU machine may lack."""
    (tmp_path / "site").mkdir()
    missing = f"import sys\nsys.modules.update(dict.fromkeys({MAY_BE_MISSING}))\n"
    (tmp_path / "site/sitecustomize.py").write_text(missing)
    return tmp_path


@nightly
def test_everything_runs_with_torch_and_triton_alone(script: Callable[[str], ModuleType], folder: Path) -> None:
    pages = sorted(PAGES.iterdir())
    done = check(folder, "--smoke")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: nothing is wrong" in done.stdout
    assert {file.name for file in (folder / "out").iterdir()} == {*("check.json", "page.md", "check.log", "traces.tar")}
    with tarfile.open(folder / "out/traces.tar") as traces:
        assert traces.getnames() == [f"ring-{phase}.trace.json.gz" for phase in ("forward", "backward")]
    steps = json.loads((folder / "out/check.json").read_text())["steps"]
    assert {name: step["finished"] for name, step in steps.items()} == dict.fromkeys(script("ci/gpu/plan").PLAN, True)
    assert len(steps["our_kernels"]["checks"]) >= 20 and len(steps["extremes"]["checks"]) >= 15
    every = {*providers.names(), *providers.names("linear")}
    over_groups = Counter(check["group"] for check in steps["nccl"]["checks"])
    assert over_groups["over Gloo, CP 4"] >= 50 and over_groups["over Gloo, CUDA_DEVICE_MAX_CONNECTIONS=1, CP 4"]
    for divided in ("neighbours", "every other"):
        assert over_groups[f"over Gloo, 2 x CP 2, {divided}"] >= len(every)
    assert {check["name"].split()[0] for check in steps["inference"]["checks"]} == every
    ranks = [row["name"] for row in steps["performance"]["figures"] if row["group"].startswith("compute efficiency")]
    assert [name.split("backend ")[1].split(",")[0] for name in ranks] == ["sdpa", "triton", "auto"]
    page = (folder / "out/page.md").read_text()
    wanted = ["at commit of a test", "**Nothing is wrong.**"]
    wanted += [f"| backend {k} |" for k in ("sdpa", "triton", "float8, --cp-fp8 compute", "auto, --cp-fp8 comm")]
    wanted += [f"### {figure}" for figure in FIGURES]
    assert not [text for text in wanted if text not in page]
    unmeasured = page.split("## Not measured")[1].splitlines()
    for name, reason in (
        ("backend te", "Transformer Engine"),
        ("whether the host waits", "CUDA"),
        ("Megatron's own training steps", "ci/gpu/wheels.sh"),
        ("training steps of transformers", "not installed"),
    ):
        assert any(name in line and reason in line for line in unmeasured), (name, unmeasured)
    assert sorted(PAGES.iterdir()) == pages
    assert report("page", str(folder / "out/check.json"), str(folder / "docs")).returncode == 0
    assert (folder / "docs/smoke-test-on-a-cpu.md").read_text() == page


@nightly
def test_faults_are_named_on_the_page_and_none_of_their_timings_is(folder: Path) -> None:
    """Three rings of a third party: scores 1 % too large on all ranks, or on one, and a rank that hangs."""
    names = ("wrong_scale", "wrong_rank", "missing_rank")
    third_party.install(folder / "site", "faulty", FAULTS, providers.ENTRY_POINTS, **{n: n.upper() for n in names})
    done = check(folder, "--smoke", "--only", "providers nccl hot_path")
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = wrong_in(done.stdout)
    assert all(any(name in line for name in names) for line in wrong), wrong
    for group in ("backend sdpa", "over Gloo, CP 4", "over Gloo, 2 x CP 2, neighbours"):
        for name in names[:2]:
            assert any(line.startswith(f"{group}: {name} on contiguous") for line in wrong), (group, name, wrong)
    (missing,) = (line for line in wrong if "missing_rank" in line)
    assert "did not finish within" in missing and "rank 3 in missing_rank (faulty.py:" in missing
    steps = json.loads((folder / "out/check.json").read_text())["steps"]
    assert len(steps["nccl"]["checks"]) > 50, "cases after the missing rank"
    page = (folder / "out/page.md").read_text()
    assert f"**{len(wrong)} wrong:**" in page and "wrong_scale on contiguous, causal" in page
    assert "performance (speed)" in page and "the step was not requested" in page
    timed = {row["name"].split(",")[0] for row in steps["hot_path"]["figures"]}
    assert timed >= {*names, "ring"}
    for name in timed:
        assert (f"| {name}, causal, backend sdpa, forward |" in page) == (name not in names), name


@nightly
def test_a_wrong_kernel_is_named_and_only_its_own_timings_are_withheld(folder: Path) -> None:
    """Merges are 2 % too large."""
    ours = shutil.copytree(ROOT / "kernels/cp_kernels", folder / "site/cp_kernels")
    with (ours / "merge.py").open("a") as merge, (folder / "site/sitecustomize.py").open("a") as first:
        merge.write(WRONG_MERGE)
        first.write(f"sys.path.insert(0, {str(folder / 'site')!r})\n")
    done = check(folder, "--smoke", "--only", "our_kernels performance")
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = wrong_in(done.stdout)
    assert len(wrong) == 12 and all(line.startswith("fused: merge") and "merge_into" not in line for line in wrong)
    page = (folder / "out/page.md").read_text()
    assert "| bandwidth over a copy's: merge, 4 partials; bandwidth over a copy's: merge, 2 partials | its tim" in page
    assert "| merge, 4 partials |" not in page
    assert all(f"| {name} |" in page for name in ("merge_into", "gather_rows, at random", "pack")), page
    assert "### Speed over torch's flash attention" in page and "### Compute efficiency of emulated ranks" in page


@nightly
@pytest.mark.parametrize("step, needs, n", [("megatron_training", "megatron", 7), ("huggingface", "transformers", 3)])
def test_training_over_process_groups(step: str, needs: str, n: int, tmp_path: Path) -> None:
    """All training runs of the check, with Megatron and with transformers."""
    pytest.importorskip(needs)
    (tmp_path / "site").mkdir()
    done = check(tmp_path, "--smoke", "--only", step)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads((tmp_path / "out/check.json").read_text())["steps"][step]["checks"]
    assert len(checks) == n and all(one["ok"] for one in checks)


@nightly
def test_another_call_goes_on(folder: Path) -> None:
    """A later call continues one that ran out of time or was killed; one page has all results."""
    steps, out = ("--smoke", "--only", "environment waiting"), folder / "out"
    done = check(folder, *steps, "--seconds", "36")
    assert done.returncode == 0 and "no time is left for waiting; go on with --from waiting" in done.stdout, done.stdout
    case = {"group": "backend sdpa", "name": "ring", "of": [], "detail": {"error": 1e-3, "limit": 2e-3}}
    left = {"step": "hot_path", "finished": True, "error": "", "seconds": 1.0, "figures": [], "not_run": []}
    (out / "hot_path.json").write_text(json.dumps(left | {"checks": [case | {"ok": False}]}))  # a call that was killed
    done = check(folder, *steps, "--from", "waiting")
    assert done.returncode == 1 and "WRONG backend sdpa: ring" in done.stdout, done.stdout + done.stderr
    (out / "hot_path.json").write_text(json.dumps(left | {"checks": [case | {"ok": True}], "commit": "another"}))
    done = check(folder, *steps, "--from", "waiting")
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((out / "check.json").read_text())["steps"]
    assert list(written) == ["environment", "hot_path", "waiting"] and written["waiting"]["figures"]
    assert (out / "check.log").read_text().count("== result") == 3
    assert "ran on 2 commits:** another, of a test" in (out / "page.md").read_text()


def test_wheels_are_used_for_what_is_not_installed(tmp_path: Path) -> None:
    for name in ("not_installed_anywhere", "torch"):
        with ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as wheel:
            info = f"{name}-1.dist-info"
            wheel.writestr(f"{name}/__init__.py", "")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    script, site = str(ROOT / "ci/gpu/wheels.sh"), tmp_path / "site"
    command = ["bash", script, "--install", str(tmp_path), str(site), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (site / "not_installed_anywhere").is_dir() and not (site / "torch").exists()


def test_pages_say_what_their_files_say(tmp_path: Path) -> None:
    for file in PAGES.glob("*.json"):
        assert report("page", str(file), str(tmp_path)).returncode == 0
        assert (tmp_path / f"{file.stem}.md").read_text() == file.with_suffix(".md").read_text()
    others = {"README", "audit", "budget", "gluon"}
    assert {file.stem for file in PAGES.glob("*.md")} == {file.stem for file in PAGES.glob("*.json")} | others
