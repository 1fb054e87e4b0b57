"""Megatron's groups under lazy communicators, with context parallelism as a part of a larger world.

All of Megatron's own collectives are held to the rule too. Numbers are checked elsewhere: here a training starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nightly import nightly, one_case
from warm import before_forking

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests/megatron"), str(ROOT / "ci/parity")]  # `import harness`, `import recording`


@pytest.fixture(scope="module")
def _megatron() -> Iterator[None]:
    """Megatron, imported once for all the forked ranks."""
    from cp_plugin.megatron.cpu import mode as cpu

    with cpu.cpu_mode():
        import megatron.training.initialize
        import megatron.training.training  # noqa: F401

        before_forking()
        yield


@one_case
@pytest.mark.usefixtures("_megatron")
@pytest.mark.parametrize("beside", ["--tensor-model-parallel-size 2", ""], ids=["tp2", "dp2"])
def test_a_part_of_the_ranks_attends_on_a_grid(beside: str) -> None:
    from harness import train

    flags = "--context-parallel-size 4 --cp-provider attention2d --cp-layout striped --cp-grid 2x2"
    found = train(8, f"{flags} {beside}")
    assert all(record.sent == record.formula for record in found)
    assert {record.coordinates["cp"] for record in found} == {0, 1, 2, 3}


@nightly
@pytest.mark.parametrize("ranks", [8, 64])
def test_the_scaled_run_of_the_flagship(ranks: int, tmp_path: Path) -> None:
    """As a user starts it: the trainings are processes of their own, which fork their ranks."""
    script = Path(sys.executable).with_name("cp-plugin")
    words = ["example", "attention2d-64xa100", "--scaled", "--ranks", str(ranks), "--steps", "1"]
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "kernels")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(script), *words], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and f"on {ranks} ranks equals CP 1" in done.stdout, done.stdout + done.stderr
