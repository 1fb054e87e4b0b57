"""Every kernel compiles for the GPUs it is meant for; that needs no GPU. Shared memory and registers suffice.

Compilation runs in a process of its own, since kernels are interpreted in this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory a program may have, by compute capability."""
SPILLED = 256
"""Bytes of registers that may go to local memory."""


@pytest.mark.parametrize(("capability", "sizes"), [(90, "128x128"), (90, "192x128"), (80, "128x128")])
def test_attention_compiles_and_fits(capability: int, sizes: str) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), str(capability), *sizes.split("x")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["name"] for kernel in found} == {"forward", "forward onto", "dq", "dkv"}
    for kernel in found:
        assert kernel["shared"] <= SHARED[capability] and kernel["spilled"] <= SPILLED, kernel
        assert kernel["matrix products"] > 0, kernel
