"""Tests against the real Transformer Engine, which ci/te.sh builds and makes an environment for."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session")
def te() -> None:
    """Skips where Transformer Engine is not installed."""
    if find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed here: ci/te.sh makes an environment with it")
