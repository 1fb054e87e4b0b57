"""Third-party distributions as pip installs them."""

from __future__ import annotations

from pathlib import Path


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
