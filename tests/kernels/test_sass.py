"""Machine code of the kernels equals ``ci/perf/sass.json`` exactly, for the versions of Triton that it has.

After an intended change: ``python ci/perf/sass.py --update``, and review the difference. Compilation runs in a separate
process, since kernels are interpreted in this one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from cp_kernels import sizes
from cp_kernels.parts import Parts
from nightly import nightly

SCRIPT = Path(__file__).parents[2] / "ci/perf/sass.py"
FILE = SCRIPT.with_name("sass.json")
VERSIONS = json.loads(FILE.read_text())
held = pytest.mark.skipif(
    triton.__version__ not in VERSIONS,
    reason=f"sass.json has no counts of Triton {triton.__version__}, but of {', '.join(VERSIONS)}",
)


WHOLE = [pytest.param(f"--gpu {gpu}", marks=nightly) for gpu in (80, 90, 100)]


@held
@pytest.mark.parametrize("arguments", ["--gpu 90 --only merge", *WHOLE])
def test_machine_code_is_as_stored(arguments: str) -> None:
    """Without TRITON_INTERPRET, under which kernels are interpreted in this process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "PASS" in done.stdout, done.stdout + done.stderr[-3000:]


TWICE = {"_dkv": (256,)}
"""Head sizes of which both groups of warps compute all scores: their sums of 128 keys do not fit into registers."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("heads", ["64", "96", "128", "192/128", "256"])
@pytest.mark.parametrize("kernel", ["_forward", "_dq", "_dkv"])
def test_groups_of_warps_share_products_on_hopper(kernel: str, heads: str, version: str) -> None:
    """The multiplications of all wgmma are those of a block, once for inner blocks and once for masked ones."""
    d, e = map(int, (heads.split("/") * 2)[:2])
    size = getattr(sizes, f"{kernel[1:]}_sizes")(d, e, torch.bfloat16, sizes.Gpu.HOPPER)
    call = "forward" if kernel == "_forward" else "backward"
    counts = VERSIONS[version][f"sm_90, attention {heads}, {call}: {kernel}"]
    shapes = {int(match[1]): n for name, n in counts.items() if (match := re.match(r"HGMMA.64x(\d+)x16", name))}
    issued = sum(n * 64 * columns * 16 for columns, n in shapes.items()) * size.warps // 4
    d, e = (sum(Parts.split(width)) for width in (d, e))
    needed = 2 * size.queries * size.keys * {"_forward": d + e, "_dq": d + e + d, "_dkv": 2 * (d + e)}[kernel]
    scores = 2 * size.queries * size.keys * (d + e)
    assert issued == needed + (scores if d in TWICE.get(kernel, ()) else 0), (shapes, size)
    assert min(shapes) >= (16 if d in TWICE.get(kernel, ()) else 32), "narrow products wait for shared memory"
