"""CI pipelines and shell scripts can be parsed, and every script that they call exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = sorted((ROOT / ".github/workflows").glob("*.yml"))
SHELL = sorted(
    path for kind in ("sh", "sbatch") for top in ("ci", "examples") for path in (ROOT / top).rglob(f"*.{kind}")
)
SCRIPT = re.compile(r"(?<!tests/)\bci/[\w/]+\.(?:sh|py)\b")


def commands(file: Path) -> list[str]:
    pipeline = yaml.safe_load(file.read_text())
    if file.name == ".gitlab-ci.yml":
        jobs = [job for job in pipeline.values() if isinstance(job, dict) and "script" in job]
        assert {job["stage"] for job in jobs} == set(pipeline["stages"])
        return [line for job in jobs for line in job["script"]]
    assert pipeline["name"] == file.stem and True in pipeline, "YAML reads `on` as true"
    steps = [step for job in pipeline["jobs"].values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    return [step["run"] for step in steps if "run" in step]


@pytest.mark.parametrize("file", [*GITHUB, ROOT / ".gitlab-ci.yml"], ids=lambda file: file.name)
def test_a_pipeline_calls_scripts_that_exist(file: Path) -> None:
    called = [script for command in commands(file) for script in SCRIPT.findall(command)]
    assert called
    assert not [script for script in called if not (ROOT / script).exists()]


@pytest.mark.parametrize("file", SHELL, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_script_is_one_and_calls_what_exists(file: Path) -> None:
    assert subprocess.run(["bash", "-n", str(file)], capture_output=True).returncode == 0
    called = set(SCRIPT.findall(file.read_text()))
    assert not [script for script in called if not (ROOT / script).exists()]


def test_there_are_pipelines() -> None:
    assert [file.stem for file in GITHUB] == ["gpu", "nightly", "tests"]
