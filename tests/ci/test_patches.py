"""Patches for Megatron-LM: one file each, with a reason; they apply to the installed Megatron."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "patches" / "megatron-lm"
FOLDERS = ("core_v0.18.2", "core_v0.19.x", "main")
ARGUMENTS = Path("megatron/training/arguments.py")


def test_there_is_one_for_every_supported_version() -> None:
    assert sorted(path.name for path in PATCHES.iterdir()) == sorted(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_adds_the_same_lines_to_one_file(folder: str) -> None:
    lines = (PATCHES / folder / "plugins.patch").read_text().splitlines()
    assert [line for line in lines if line.startswith(("--- ", "+++ "))] == [f"--- a/{ARGUMENTS}", f"+++ b/{ARGUMENTS}"]
    assert not [line for line in lines[3:] if line.startswith("-")], "it takes nothing away"
    assert _added(folder) == _added("main")
    assert len([line for line in lines[3:] if line.startswith(" ")]) <= 12, "little of Megatron's own text"
    readme = (PATCHES / folder / "README.md").read_text()
    assert all(word in readme for word in ("**Why.**", "**What it touches.**", "**It can go**"))


def test_it_applies_to_the_installed_megatron(tmp_path: Path) -> None:
    spec = find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    target = tmp_path / ARGUMENTS
    target.parent.mkdir(parents=True)
    shutil.copy(Path(spec.origin).parents[2] / ARGUMENTS, target)
    apply_patch(tmp_path)
    compile(target.read_text(), str(target), "exec")
    assert subprocess.run(["git", "apply", "--check", str(patch())], cwd=tmp_path, capture_output=True).returncode


def test_the_plugin_is_offered_where_the_patches_look() -> None:
    offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    (group,) = {name for folder in FOLDERS for name in re.findall(r"group='([^']+)'", "\n".join(_added(folder)))}
    assert offered == {group: {"cp_plugin": "cp_plugin.megatron.native"}}


def patch() -> Path:
    """The installed version's."""
    minor = version("megatron-core").rpartition(".")[0]
    folder = next((name for name in FOLDERS if name.startswith(f"core_v{minor}.")), "main")
    return PATCHES / folder / "plugins.patch"


def apply_patch(root: Path) -> None:
    subprocess.run(["git", "apply", str(patch())], cwd=root, check=True)


def _added(folder: str) -> list[str]:
    lines = (PATCHES / folder / "plugins.patch").read_text().splitlines()[3:]
    return [line for line in lines if line.startswith("+") and line != "+"]
