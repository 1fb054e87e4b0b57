"""ci/gpu/pack.py: kernels compiled here, without a GPU, are found in another folder by another install."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from nightly import nightly

ROOT = Path(__file__).parents[2]
pytestmark = nightly
GPU = ROOT / "ci/gpu"
USE = "import pathlib, sys, pack; print(*map('='.join, pack.use(pathlib.Path(sys.argv[1])).items()), sep='\\n')"
STEP = """
import torch
from cp_kernels import permute

def launch(step):
    x, order = torch.empty(128, 1, 8, 64, device="cuda"), torch.empty(128, dtype=torch.int64, device="cuda")
    permute.gather_rows((x,), order)
"""


def python(*command: str, paths: list[Path], **environment: str) -> str:
    """Run with these folders first in the path."""
    tests = ROOT / "tests"
    text = os.pathsep.join(map(str, [*paths, ROOT, tests, tests / "kernels"]))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command], env=env | {"PYTHONPATH": text} | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of one kernel."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "tiny_step.py").write_text(STEP)
    said = python(str(GPU / "pack.py"), str(folder / "pack"), "600", "tiny_step:launch", paths=[folder])
    assert re.match(r"\d kernels and C modules of Triton ", said)
    return folder / "pack"


def elsewhere(packed: Path, folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The pack in another folder, beside other installs of Triton and of our kernels: paths, and the environment."""
    moved = shutil.copytree(packed, folder / "moved")
    (folder / "site").mkdir()
    (folder / "tiny_step.py").write_text(STEP)
    (folder / "site/triton").symlink_to(Path(find_spec("triton").origin).parent)
    shutil.copytree(ROOT / "kernels/cp_kernels", folder / "site/cp_kernels")
    paths = [folder / "site", folder]
    lines = python("-c", USE, str(moved), paths=[*paths, GPU]).splitlines()
    return paths, dict(line.split("=", 1) for line in lines)


def told(paths: list[Path], environment: dict[str, str]) -> list[str]:
    """Run the step again with the pack: whether its key fits, and what was compiled anew."""
    stub = Path(environment["TRITON_CACHE_DIR"]).with_name("stub")
    stub.mkdir()
    text = (
        "import pathlib, sys, pack; print(*map('='.join, pack.stub_of_the_driver(pathlib.Path(sys.argv[1])).items()))"
    )
    driver = python("-c", text, str(stub), paths=[*paths, GPU]).split()
    stubbed = environment | dict(line.split("=", 1) for line in driver)
    python(str(GPU / "ahead.py"), str(stub), "tiny_step:launch", paths=paths, **stubbed)
    code = "import pack; about = pack.describe()['pack']; print(about['packed kernels'], pack.anew(about), sep='\\n')"
    return python("-c", code, paths=[*paths, GPU], **environment).splitlines()


def test_a_kernel_is_found_in_another_folder_by_another_install(packed: Path, tmp_path: Path) -> None:
    paths, environment = elsewhere(packed, tmp_path)
    assert environment["TRITON_CACHE_DIR"] == str(tmp_path / "moved/cache")
    fits, compiled = told(paths, environment)
    assert fits.endswith("its key is that of the Triton here") and compiled == "0 of ours, 0 others"
    again = python("-c", USE, str(tmp_path / "moved"), paths=[*paths, GPU])
    assert "TRITON_CACHE_DIR" in again, "a second call of the check goes on with the same cache"


def test_a_kernel_that_has_changed_is_compiled_anew(packed: Path, tmp_path: Path) -> None:
    paths, environment = elsewhere(packed, tmp_path)
    source = tmp_path / "site/cp_kernels/permute.py"
    source.write_text(
        source.read_text().replace("@triton.jit\ndef _permute_kernel(", "\n@triton.jit\ndef _permute_kernel(")
    )
    assert told(paths, environment)[1] == "1 of ours (_permute_kernel 1), 0 others"


def test_another_triton_is_named(packed: Path, tmp_path: Path) -> None:
    paths, environment = elsewhere(packed, tmp_path)
    file = tmp_path / "moved/pack.json"
    file.write_text(file.read_text().replace('"key": "', '"key": "0'))
    assert "ANOTHER KEY" in told(paths, environment)[0]
