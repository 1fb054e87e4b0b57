"""Third-party distributions as pip installs them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cp_plugin.engine.kernels import backends
from cp_plugin.engine.linear.variants import variants
from cp_plugin.engine.methods import registry as providers


def install(folder: Path, module: str, source: str, group: str, **points: str) -> None:
    """A module and its entry points in a folder to be put on Python's path.

    points: name -> the module's attribute.
    """
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
    lines = [f"{name} = {module}:{what}" for name, what in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


@contextmanager
def looked_for_anew() -> Iterator[None]:
    """Every registry looks for installed distributions anew, within and after: they quote each other's names."""
    registries = providers.registry, backends._backends, variants
    for registry in registries:
        registry.cache_clear()
    try:
        yield
    finally:
        for registry in registries:
            registry.cache_clear()


@contextmanager
def installed(folder: Path, module: str, source: str, group: str, **points: str) -> Iterator[None]:
    """As ``install``, in this process: every registry has it within."""
    install(folder, module, source, group, **points)
    with pytest.MonkeyPatch.context() as patch, looked_for_anew():
        patch.syspath_prepend(str(folder))
        sys.modules.pop(module, None)
        yield
    sys.modules.pop(module, None)
