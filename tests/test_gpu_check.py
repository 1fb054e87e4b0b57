"""ci/gpu/check.sh on a CPU with tiny shapes: that it runs with torch and triton alone, and that it finds faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cp_plugin import providers

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs/gpu"
MAY_BE_MISSING = ("rich", "typer", "psutil", "megatron", "hypothesis", "pytest", "_pytest", "matplotlib")
FAULT = """
from dataclasses import replace
from cp_plugin import providers
from cp_plugin.methods.ring import PROVIDERS

ring = PROVIDERS[0]

def build(mesh, local, problem, options):
    return ring.build(mesh, replace(local, scale=1.01 * local.scale), problem, options)

PROVIDER = replace(ring, name="wrong_scale", build=build)
"""


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script, with a folder of modules in front of all others."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(folder / "site"), "COMMIT": "of a test"}
    command = ["bash", str(ROOT / "ci/gpu/check.sh"), "--out", str(folder / "out"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def report(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "ci/gpu/report.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a ``site`` in which what a GPU machine may lack cannot be imported."""
    (tmp_path / "site").mkdir()
    missing = f"import sys\nsys.modules.update(dict.fromkeys({MAY_BE_MISSING}))\n"
    (tmp_path / "site/sitecustomize.py").write_text(missing)
    return tmp_path


def test_everything_runs_with_torch_and_triton_alone(folder: Path) -> None:
    pages = sorted(PAGES.iterdir())
    done = check(folder, "--smoke", "--tune")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: nothing is wrong" in done.stdout
    assert {file.name for file in (folder / "out").iterdir()} == {"check.json", "page.md", "check.log"}
    steps = json.loads((folder / "out/check.json").read_text())["steps"]
    assert {name: step["finished"] for name, step in steps.items()} == dict.fromkeys(
        ("environment", "our_kernels", "providers", "ranks", "hot_path", "inference", "performance", "tune"), True
    )
    assert len(steps["our_kernels"]["checks"]) >= 20 and len(steps["ranks"]["checks"]) == 2
    generating = {check["name"].split()[0] for check in steps["inference"]["checks"]}
    assert generating == {*providers.names(), *providers.names("linear")}
    page = (folder / "out/page.md").read_text()
    assert "at commit of a test" in page and "**Nothing is wrong.**" in page
    for kernel in ("sdpa", "triton", "float8, --cp-fp8 compute", "auto, --cp-fp8 comm"):
        assert f"| backend {kernel} |" in page
    for figure in (
        "peak memory over the prediction",
        "compute efficiency of emulated ranks",
        "bandwidth of decode over a copy's",
        "bandwidth over a copy's",
    ):
        assert f"### {figure.capitalize()}" in page
    unmeasured = page.split("## Not measured")[1]
    for name, reason in (
        ("backend te", "Transformer Engine"),
        ("whether the host waits", "CUDA"),
    ):
        assert any(name in line and reason in line for line in unmeasured.splitlines()), (name, unmeasured)
    assert sorted(PAGES.iterdir()) == pages
    assert report("page", str(folder / "out/check.json"), str(folder / "docs")).returncode == 0
    assert (folder / "docs/smoke-test-on-a-cpu.md").read_text() == page


def test_a_fault_is_named_on_the_page(folder: Path) -> None:
    """A provider of a third party, a ring whose scores are 1 % too large."""
    site = folder / "site"
    (site / "wrong_scale.py").write_text(FAULT)
    (site / "wrong_scale-1.dist-info").mkdir()
    (site / "wrong_scale-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: wrong-scale\nVersion: 1\n")
    points = "[cp_plugin.providers]\nwrong_scale = wrong_scale:PROVIDER\n"
    (site / "wrong_scale-1.dist-info/entry_points.txt").write_text(points)
    done = check(folder, "--smoke", "--only", "providers")
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG backend")]
    assert wrong and all("wrong_scale" in line for line in wrong)
    page = (folder / "out/page.md").read_text()
    result = page.split("## Machine")[0]
    assert "performance (speed)" in page and "the step was not asked for" in page
    assert f"**{len(wrong)} wrong:**" in result and "wrong_scale on contiguous, causal" in result


def test_steps_that_end_early(tmp_path: Path) -> None:
    """Of correctness: wrong, and what they had is kept; of speed: the rest is not measured."""
    check = {"group": "backend sdpa", "name": "ring", "ok": True, "detail": {"error": 1e-3, "limit": 2e-3}}
    figure = {"group": "speed", "name": "triton", "value": 0.7, "wanted": [">=", 0.75], "detail": {"ms": 1.25}}
    nothing = {"finished": False, "error": "", "seconds": 1.0, "checks": [], "figures": [], "not_run": []}
    for name, had in (("providers", {"checks": [check]}), ("performance", {"figures": [figure]})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"step": name} | nothing | had))
    done = report("finish", str(tmp_path), "our_kernels providers performance")
    assert done.returncode == 1
    wrong = [line for line in done.stdout.splitlines() if line.startswith("WRONG")]
    assert [line.split(":")[0] for line in wrong] == ["WRONG step providers", "WRONG step our_kernels"]
    page = (tmp_path / "page.md").read_text()
    assert "| backend sdpa | 1 | 1 | 50% |" in page and "| triton | 0.7 | at least 0.75 | missed | 1.25 |" in page
    assert any("the rest of performance" in line and "stopped" in line for line in page.splitlines())


def test_bad_arguments_are_refused(folder: Path) -> None:
    for arguments, message in ((["--fast"], "unknown argument --fast"), (["--smoke", "--only", "x"], "unknown step x")):
        done = check(folder, *arguments)
        assert done.returncode == 2 and message in done.stderr
    assert not (folder / "out").exists()


def test_pages_say_what_their_files_say(tmp_path: Path) -> None:
    for file in PAGES.glob("*.json"):
        assert report("page", str(file), str(tmp_path)).returncode == 0
        assert (tmp_path / f"{file.stem}.md").read_text() == file.with_suffix(".md").read_text()
    assert {file.stem for file in PAGES.glob("*.md")} == {file.stem for file in PAGES.glob("*.json")} | {"README"}
