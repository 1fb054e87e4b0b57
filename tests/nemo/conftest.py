"""Tests with the real Megatron-Bridge, on CPU ranks: ci/nemo.sh makes an environment for them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest


@pytest.fixture(scope="session", autouse=True)
def bridge() -> None:
    """Imports Bridge in CPU mode, once for all ranks; skips where it is not installed."""
    try:
        version("megatron-bridge")
    except PackageNotFoundError:
        pytest.skip("megatron-bridge is not installed here: ci/nemo.sh makes an environment with it")
    from cp_plugin import nemo

    nemo.activate()
