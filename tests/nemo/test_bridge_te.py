"""Bridge's own spec, which is Transformer Engine's: built with the real package, and audited."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("bridge")


def test_every_core_attention_is_the_plugins() -> None:
    try:
        version("transformer-engine")
    except PackageNotFoundError:
        pytest.skip("Transformer Engine is not installed here: ci/nemo.sh installs it where there is nvcc")
    program = Path(__file__).with_name("bridge_te_ranks.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("every core attention of Bridge's default spec is the plugin's\n"), done.stderr[-3000:]
