"""The replay of a history of Megatron-LM: how a process ended, a planted break, and the page of its record."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from nightly import nightly

from cp_plugin.engine.common.versions import megatron_supported

FOLDER = Path(__file__).parents[2] / "ci" / "megatron"


@pytest.fixture
def replay(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("ci/megatron/replay")


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
    """In a script that trains the installed Megatron, in which a function is changed that only other models need."""
    spec = find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    shutil.copytree(Path(spec.origin).parents[1], tmp_path / "megatron")
    changed = tmp_path / "megatron/core/transformer/multi_token_prediction.py"
    changed.write_text(changed.read_text().replace("def roll_tensor(tensor,", "def roll_tensor(x,"))
    end = "    return output, partial("
    text = (FOLDER / "stock_gpt.py").read_text()
    assert text.count(end) == 1
    (tmp_path / "pretrain_gpt.py").write_text(text.replace(end, planted + end))
    result = replay.run(tmp_path, "gpt", kind)
    assert result["state"] == state, result
    assert list(replay.run(tmp_path)["broken"]) == ["megatron.core.transformer.multi_token_prediction:roll_tensor"]
