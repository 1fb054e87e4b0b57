"""The package's own sources, for tests that hold its structure."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "cp_plugin"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
"""File, relative to the package -> its text."""
