"""Lazy communicators (``lazy.py``) in processes that a test starts, once torch.distributed is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_INSTALL = {
    "torch.distributed.distributed_c10d": "install",
    "torch.distributed._functional_collectives": "install_functional",
}
"""Module -> what of lazy.py is called with it once it has been imported."""


@cache
def _lazy() -> ModuleType:
    found = importlib.util.spec_from_file_location("_cp_plugin_lazy", Path(__file__).parents[1] / "lazy.py")
    assert found is not None and found.loader is not None
    lazy = importlib.util.module_from_spec(found)
    sys.modules[found.name] = lazy
    found.loader.exec_module(lazy)
    return lazy


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in _INSTALL:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module: ModuleType) -> None:
                execute(module)
                getattr(_lazy(), _INSTALL[name])(module)

            spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


if os.environ.get("CP_PLUGIN_TEST_LAZY_GROUPS", "0") not in ("", "0"):
    sys.meta_path.insert(0, _Finder())
