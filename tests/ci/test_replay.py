"""The replay of a history of Megatron-LM, on a made-up repository: no Megatron is trained."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from nightly import nightly

from cp_plugin.engine.common.versions import megatron_supported

FOLDER = Path(__file__).parents[2] / "ci" / "megatron"
VERSIONS = {
    "2026-02-20": "0.15.0",
    "2026-03-01": "0.16.0rc0",
    "2026-03-02": "0.18.0",
    "2026-03-03": "0.18.1",
    "2026-03-04": "0.19.0",
}
HYBRID = "megatron/core/models/hybrid"
FILES = {
    "0.15.0": {"pretrain_gpt.py": "", "tests/long.py": ""},
    "0.18.1": {"pretrain_hybrid.py": "", f"{HYBRID}/hybrid_model.py": "class HybridModel: ..."},
    "0.19.0": {
        f"{HYBRID}/hybrid_block.py": "gdn_layer = None",
        "pretrain_gpt.py": "args.dataloader_inter_document_masking",
    },
}
"""What each version adds."""


@pytest.fixture
def replay(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("ci/megatron/replay")


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare clone with one commit a day, oldest first, and a merged branch, whose commits do not count."""
    work, bare = (tmp_path_factory.mktemp(name) for name in ("work", "bare"))
    git(work, "init", "-q", "-b", "main")
    for date, version in VERSIONS.items():
        numbers, rc = version.removesuffix("rc0").split("."), "rc0" if version.endswith("rc0") else ""
        names = ("MAJOR", "MINOR", "PATCH")
        info = "".join(f"{name} = {number}\n" for name, number in zip(names, numbers, strict=True))
        files = {"megatron/core/package_info.py": f"{info}PRE_RELEASE = '{rc}'\n"}
        files |= {"megatron/core/datasets/utils.py": ""} | FILES.get(version, {})
        for name, text in files.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_text(text)
        commit(work, date, f"of {version}")
        if version == "0.18.0":
            git(work, "checkout", "-q", "-b", "side")
            (work / "side.py").write_text("")
            commit(work, date, "on a branch")
            git(work, "checkout", "-q", "main")
            git(work, *IDENTITY, "merge", "-q", "--no-ff", "-m", "of a branch", "side", date=date)
    git(bare, "clone", "-q", "--bare", str(work), ".")
    return bare


IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b")


def commit(folder: Path, date: str, subject: str) -> None:
    git(folder, "add", "--all")
    git(folder, *IDENTITY, "commit", "-q", "-m", subject, date=date)


def git(folder: Path, *words: str, date: str = "2026-03-01") -> str:
    dates = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), f"{date}T12:00:00Z")
    done = subprocess.run(
        ["git", "-C", str(folder), *words], env=os.environ | dates, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def trained(replay: ModuleType, monkeypatch: pytest.MonkeyPatch, **states: str) -> list[tuple[str, str, str]]:
    """Stand in for the processes; returns (version, case, kind) of each as they run. states: case -> not passed."""
    ran: list[tuple[str, str, str]] = []

    def run(tree: Path, name: str, kind: str) -> dict[str, Any]:
        assert not (tree / "tests").exists(), "only the package and the scripts are unpacked"
        ran.append((replay.version_of(tree), name, kind))
        state = states.get(name.replace(" ", "_"), "passed")
        numbers = {"loss": 2e-7, "norm": 0.0} if kind == "train" and state == "passed" else {}
        return {"state": state, "message": "" if state == "passed" else f"why {name} did not", **numbers}

    monkeypatch.setattr(replay, "run", run)
    monkeypatch.setattr(replay, "contracts", lambda tree: [])
    return ran


def test_every_second_commit_of_the_first_parents_is_started_once(
    replay: ModuleType,
    repo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran, out = trained(replay, monkeypatch, hybrid="refused"), tmp_path / "new" / "replay.json"
    words = ("--repo", str(repo), "--since", "2026-02-01", "--every", "2", "--out", str(out))
    assert replay.main(words) == 0
    old, new = ["gpt", "moe"], ["gpt", "packed", "moe", "hybrid", "delta net"]
    assert ran == [("0.18.0", name, "start") for name in old] + [("0.19.0", name, "start") for name in new]
    written = json.loads(out.read_text())["commits"]
    assert [entry["version"] for entry in written.values()] == ["0.16.0rc0", "0.18.0", "0.19.0"]
    assert [entry["subject"] for entry in written.values()] == ["of 0.16.0rc0", "of a branch", "of 0.19.0"]
    assert [entry["date"] for entry in written.values()] == ["2026-03-01", "2026-03-02", "2026-03-04"]
    told = capsys.readouterr().out
    assert "2 of 3 commits are of megatron-core" in told
    assert "gpt: 2 of 2 start" in told and "hybrid: 0 of 1 start" in told
    newest = git(repo, "rev-parse", "HEAD")
    assert f"why hybrid did not\n    {newest[:10]} (hybrid)" in told

    assert replay.main(words) == 0 and len(ran) == len(old) + len(new), "all are known"
    ran = trained(replay, monkeypatch, packed="differs", hybrid="refused")
    capsys.readouterr()
    assert replay.main([*words, "--train"]) == 0
    assert ("0.19.0", "packed", "train") in ran and ("0.19.0", "gpt", "train") not in ran
    told = capsys.readouterr().out
    assert "packed: 1 of 1 start" in told and "packed, trained: 0 of 1 as one rank" in told
    assert "hybrid: 0 of 1 start" in told and "delta net, trained: 1 of 1 as one rank" in told


REPORTS = {
    "Traceback\n  File 'a'\nValueError: --cp-provider ring:\nline two": ("refused", "--cp-provider ring:\nline two"),
    "KeyError: 'a'\n\nDuring handling:\n\nValueError: cp_plugin needs it": ("refused", "cp_plugin needs it"),
    "cp_plugin.x.AttentionError: layer 1": ("refused", "cp_plugin.x.AttentionError: layer 1"),
    "  raise\nValueError: only supports all_gather": ("failed", "only supports all_gather"),
    "ModuleNotFoundError: No module named 'x'": ("lacks", "ModuleNotFoundError: No module named 'x'"),
    "ModuleNotFoundError: No module named 'megatron.core.moved'": ("failed", None),
}
"""The end of a process's output -> its state and message, here the last line for None."""


@pytest.mark.parametrize("report", REPORTS)
def test_refusals_of_the_plugin_are_told_from_failures(replay: ModuleType, report: str) -> None:
    result, (state, message) = replay.ended_by(report), REPORTS[report]
    assert result == {"state": state, "message": message or report}


def test_the_page_counts_the_commits_of_the_record() -> None:
    entries = json.loads((FOLDER / "replayed.json").read_text())["commits"].values()
    supported = [one for one in entries if megatron_supported(one["version"])]
    text = (FOLDER.parents[1] / "docs" / "versions.md").read_text().partition("| | dates | commits |")[2]
    assert sum(int(n) for n in re.findall(r"^\|(?:[^|]+\|){2} (\d+) \|", text, re.MULTILINE)) == len(supported)
    failed = [
        one
        for one in supported
        if any(case["state"] != "passed" for case in {**one["start"], **one.get("train", {})}.values())
    ]
    assert len(re.findall(r"^- pull request \d+", text, re.MULTILINE)) == len(failed)


RAISES = "    if mpu.get_context_parallel_world_size() > 1:\n        raise RuntimeError('planted')\n"
LATER = "    if get_args().curr_iteration == 1:\n        output = output * mpu.get_context_parallel_world_size()\n"
BY_PLACE = "    output = output * torch.arange(output.size(1))\n"


@nightly
@pytest.mark.parametrize(
    ("planted", "kind", "state"),
    [
        ("", "start", "passed"),
        (RAISES, "start", "failed"),
        (BY_PLACE, "start", "refused"),
        (RAISES, "train", "failed"),
        (LATER, "start", "passed"),
        (LATER, "train", "differs"),
    ],
)
def test_a_planted_break_is_found(replay: ModuleType, tmp_path: Path, planted: str, kind: str, state: str) -> None:
    """In a script that trains the installed Megatron."""
    spec = find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    (tmp_path / "megatron").symlink_to(Path(spec.origin).parents[1])
    end = "    return output, partial("
    text = (FOLDER / "stock_gpt.py").read_text()
    assert text.count(end) == 1
    (tmp_path / "pretrain_gpt.py").write_text(text.replace(end, planted + end))
    result = replay.run(tmp_path, "gpt", kind)
    assert result["state"] == state, result
