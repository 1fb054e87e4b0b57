"""Tests against the real Transformer Engine, which ci/te.sh builds and makes an environment for."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))  # `import harness`
sys.path.append(str(Path(__file__).parents[2] / "ci/parity"))  # `import recording`


@pytest.fixture(scope="session")
def te() -> None:
    """Skips where Transformer Engine is not installed."""
    if find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed here: ci/te.sh makes an environment with it")
