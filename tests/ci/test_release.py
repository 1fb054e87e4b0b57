"""Wheel and sdist hold exactly the package, metadata is valid, and without Megatron the commands work or say so."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from nightly import nightly
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import cp_plugin
from cp_plugin.engine.common.versions import MEGATRON_RANGE, NO_MEGATRON, TORCH_MINIMUM

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = {
    "cp_plugin": "cp_plugin",
    "kernels/cp_kernels": "cp_kernels",
    "examples/papers": "cp_plugin/tools/examples/papers",
}
"""Folder in the repository -> folder in the wheel; the last is a symbolic link."""


class Built(NamedTuple):
    """File -> content of the project and of both distributions; the symbolic links of the sdist."""

    source: Mapping[str, bytes]
    wheel: Mapping[str, bytes]
    sdist: Mapping[str, bytes]
    links: list[str]


def tree() -> list[str]:
    """The project's files, tracked or untracked but not ignored, without symbolic links."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: the project's files cannot be told from others")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in names if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist of a clean copy, and the wheel built from that sdist."""
    work = tmp_path_factory.mktemp("release")
    source = {name: (ROOT / name).read_bytes() for name in tree()}
    for name, content in source.items():
        (work / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (work / "copy" / name).write_bytes(content)
    link = Path("cp_plugin/tools/examples/papers")
    (work / "copy" / link).symlink_to((ROOT / link).readlink())
    build(work / "copy", "sdist", work)
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
        sdist = {m.name.partition("/")[2]: tar.extractfile(m).read() for m in members if m.isfile()}  # type: ignore[union-attr]
        tar.extractall(work / "sdist", filter="data")
    (unpacked,) = (work / "sdist").iterdir()
    build(unpacked, "wheel", work)
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as zipped:
        content = {name: zipped.read(name) for name in zipped.namelist()}
    return Built(source, content, sdist, [m.name for m in members if m.issym()])


def build(source: Path, kind: str, to: Path) -> None:
    code = f"import setuptools.build_meta as backend; backend.build_{kind}({str(to)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def expected(source: Mapping[str, bytes]) -> dict[str, bytes]:
    """The content of the wheel, without metadata."""
    return {
        inside + name.removeprefix(folder): content
        for name, content in source.items()
        for folder, inside in PACKAGES.items()
        if name.startswith(f"{folder}/")
    }


def test_the_wheel_holds_exactly_the_packages(built: Built) -> None:
    got = {name: content for name, content in built.wheel.items() if ".dist-info/" not in name}
    want = expected(built.source)
    assert sorted(got) == sorted(want)
    assert [name for name in got if got[name] != want[name]] == []
    for needed in ("cp_plugin/py.typed", "cp_kernels/forward.py", "cp_plugin/planner/training/models.toml"):
        assert needed in got
    assert (
        sum(name.startswith("cp_plugin/tools/examples/papers/") and name.endswith("/config.yaml") for name in got) == 9
    )
    assert f"cp_plugin-{cp_plugin.__version__}.dist-info/licenses/LICENSE" in built.wheel


def test_the_sdist_is_what_the_wheel_is_built_from(built: Built) -> None:
    assert built.links == []
    packages = {name.replace("cp_kernels/", "kernels/cp_kernels/", 1) for name in expected(built.source)}
    made = {"PKG-INFO", "setup.cfg"} | {name for name in built.sdist if ".egg-info/" in name}
    beside = {"pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "CITATION.cff"}
    assert sorted(built.sdist) == sorted(packages | made | beside)


def test_the_metadata_is_valid(built: Built) -> None:
    (text,) = (content for name, content in built.wheel.items() if name.endswith(".dist-info/METADATA"))
    metadata = Metadata.from_email(text, validate=True)
    assert (metadata.name, str(metadata.version)) == ("cp-plugin", cp_plugin.__version__)
    assert metadata.license_expression == "Apache-2.0" and metadata.license_files == ["LICENSE"]
    assert metadata.description_content_type == "text/markdown" and metadata.description
    assert set(metadata.provides_extra or ()) == set(PROJECT["optional-dependencies"])


def test_versions_are_in_one_place() -> None:
    assert PROJECT["dynamic"] == ["version"]
    needed = {requirement.name: requirement.specifier for requirement in map(Requirement, PROJECT["dependencies"])}
    assert needed["megatron-core"] == SpecifierSet(MEGATRON_RANGE)
    assert needed["torch"] == SpecifierSet(f">={TORCH_MINIMUM}")
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert newest is not None and newest[1] == cited == cp_plugin.__version__


def test_the_public_surface_is_documented() -> None:
    assert cp_plugin.__all__ == sorted(cp_plugin.__all__)
    for name in cp_plugin.__all__:
        thing = getattr(cp_plugin, name)
        assert inspect.getdoc(thing), name
        for member, value in vars(thing).items():
            if inspect.isfunction(value) and not member.startswith("_"):
                assert inspect.getdoc(value), f"{name}.{member}"
                assert "return" in inspect.get_annotations(value), f"{name}.{member}"


HIDDEN = """
import sys, importlib.abc

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
import torch
torch.set_num_threads(1)
import cp_plugin
from typer.testing import CliRunner
from cp_plugin.tools.app import app
from cp_plugin.megatron import activate

for line in sys.stdin.read().splitlines():
    done = CliRunner().invoke(app, line.split())
    print("COMMAND", done.exit_code, line, done.output[-300:].replace(chr(10), " "))
try:
    activate([])
except ModuleNotFoundError as error:
    print("ACTIVATE", error)
"""


@nightly
def test_without_megatron(tmp_path: Path) -> None:
    works = (
        "traffic --ranks 4",
        "verify --ranks 2 --provider ring --dtype float32 --mask causal --kv-heads 8",
        f"draw --provider ring --plot {tmp_path}/ring.svg",
        "plan --model llama3-8b --cluster dgx-h100 --devices 8 --seq-length 32768",
    )
    refused = "plan --cluster dgx-h100 --devices 8 -- --num-layers 2"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    lines = "\n".join((*works, refused))
    done = subprocess.run([sys.executable, "-c", HIDDEN], input=lines, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    for line in works:
        assert f"COMMAND 0 {line}" in done.stdout, done.stdout
    assert re.search(rf"COMMAND 2 {re.escape(refused)}.*{re.escape(NO_MEGATRON)}", done.stdout), done.stdout
    assert f"ACTIVATE {NO_MEGATRON}" in done.stdout
