"""Shared fixture of the tests of generated pages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of ``docs`` that the test module names in ``GENERATOR``."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    yield importlib.import_module(request.module.GENERATOR)
    sys.modules.pop(request.module.GENERATOR)
