"""Installing into an NVIDIA container replaces none of its packages.

The images have versions that PEP 440 sorts before their release (``2.11.0a0+eb65b36914.nv26.02`` < ``2.11.0``). pip's
resolver decides here, over an environment with the metadata of such packages and an index of empty, newer wheels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from nightly import nightly, one_case
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
REQUIRES = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
IMAGE = {
    "torch": "2.11.0a0+eb65b36914.nv26.02",
    "transformer_engine": "2.12.0+5671fd36",
    "flash_attn": "2.7.4.post1+25.11",
    "apex": "0.1",
    "numpy": "2.1.0",
    "triton": "3.5.1+gitbfeb0666",
}
"""What an image has, versions as NVIDIA writes them."""
OUTSIDE = {
    "torch": "2.15.0",
    "transformer-engine": "2.20.2",
    "flash-attn": "2.8.3",
    "apex": "0.9.10.dev0",
    "numpy": "2.4.1",
    "triton": "3.7.0",
}
"""What the index has."""


def metadata(name: str, version: str, requires: tuple[str, ...] = ()) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    return "\n".join([*lines, *(f"Requires-Dist: {requirement}" for requirement in requires), ""])


def add_wheel(index: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(index / f"{stem}-py3-none-any.whl", "w") as wheel:
        tag = "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata(name, version, requires))
        wheel.writestr(f"{stem}.dist-info/WHEEL", tag)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def would_install(tmp_path: Path, requires: tuple[str, ...], image: dict[str, str]) -> dict[str, str]:
    """name -> version of what ``pip install cp-plugin`` would put into the image."""
    index, site = tmp_path / "index", tmp_path / "image"
    index.mkdir()
    add_wheel(index, "cp-plugin", "0.1.0", requires)
    for requirement in map(Requirement, requires):
        if requirement.name not in OUTSIDE:
            floors = [Version(s.version) for s in requirement.specifier if s.operator == ">="]
            needs = ("torch>=2.6.0", "numpy") if requirement.name == "megatron-core" else ()
            add_wheel(index, requirement.name, str(max(floors, default=Version("9"))), needs)
    for name, version in OUTSIDE.items():
        add_wheel(index, name, version, ("torch>=2.1",) if name in ("transformer-engine", "flash-attn") else ())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", site], check=True)
    (packages,) = site.glob("lib/python*/site-packages")
    for name, version in image.items():
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(metadata(name, version))
    pip = [sys.executable, "-m", "pip", "--isolated", "--python", str(site / "bin" / "python"), "install"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # shows pip our egg-info
    done = subprocess.run(
        [*pip, "--quiet", "--dry-run", "--no-index", "--find-links", str(index), "--report", "-", "cp-plugin"],
        capture_output=True,
        text=True,
        env=environment | {"PIP_CONFIG_FILE": os.devnull},  # a machine's own constraints apply even to --isolated
    )
    assert done.returncode == 0, done.stderr
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(done.stdout)["install"]}


@one_case
@pytest.mark.parametrize("torch", [IMAGE["torch"], "2.10.0a0+b4e4ee81d3.nv25.12", "2.12.0a0+5d3a2c1b.nv26.04"])
def test_nothing_of_the_image_is_replaced(tmp_path: Path, torch: str) -> None:
    new = would_install(tmp_path, REQUIRES, IMAGE | {"torch": torch})
    assert "cp-plugin" in new and "megatron-core" in new and "typer" in new
    assert {name.replace("-", "_") for name in new} & set(IMAGE) == set()


@nightly
def test_a_range_without_pre_releases_would_replace_torch(tmp_path: Path) -> None:
    """So the test above can fail."""
    planted = tuple("torch>=2.11" if Requirement(r).name == "torch" else r for r in REQUIRES)
    assert would_install(tmp_path, planted, IMAGE)["torch"] == OUTSIDE["torch"]
