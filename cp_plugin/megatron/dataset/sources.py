"""Source files of a dataset: named files, and files with certain suffixes in folders, in a fixed order."""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
"""Default suffixes of files taken from folders, each also with ``.gz``."""
PACKED = ".gz"
LINES = (".jsonl", ".ndjson")
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file, as found when the build started."""

    path: str  # absolute
    size: int
    modified: int  # nanoseconds since 1970

    @property
    def lines(self) -> bool:
        """Whether each line is a JSON document; otherwise the file is one document."""
        return _suffix(self.path) in LINES

    @property
    def packed(self) -> bool:
        """Whether it is gzipped."""
        return self.path.endswith(PACKED)

    @property
    def python(self) -> bool:
        """Whether it may declare its encoding, as Python files do."""
        return _suffix(self.path) == ".py"


def standard_library() -> Path:
    """The folder of Python's standard library: real text on every machine."""
    return Path(sysconfig.get_paths()["stdlib"])


def find(paths: Sequence[Path], suffixes: Sequence[str] = SUFFIXES, max_bytes: int | None = None) -> list[Source]:
    """The files in the order of the paths; within a folder sorted by name, folder by folder.

    Skips hidden files and folders, caches and installed packages.

    Args:
        max_bytes: stop before the file that would exceed this total.

    Raises:
        ValueError: for a path that is missing, unreadable or without such files, and for a file found twice.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"--max-bytes {max_bytes}: write 1 or more, or leave it out")
    found = [file for path in paths for file in (_below(path, suffixes) if path.is_dir() else [_named(path)])]
    met: set[str] = set()
    sources, total = [], 0
    for path in found:
        if not os.access(path, os.R_OK):
            raise ValueError(f"{path}: not readable, or a broken link")
        if (real := os.path.realpath(path)) in met:
            raise ValueError(
                f"{path}: found twice, so its text would count twice: name the file or its folder only once"
            )
        met.add(real)
        status = path.stat()
        total += status.st_size
        if max_bytes is None or total <= max_bytes:
            sources.append(Source(path=os.path.abspath(path), size=status.st_size, modified=status.st_mtime_ns))
    if not sources:
        raise ValueError(
            f"--max-bytes {max_bytes}: the first file, {found[0]}, has {found[0].stat().st_size} bytes; allow more"
        )
    return sources


def _named(path: Path) -> Path:
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if not path.is_file():
        raise ValueError(f"{path}: neither a file nor a folder")
    if _suffix(str(path)) == ".json":
        raise ValueError(
            f"{path}: JSON is read from .jsonl files, one object per line; if this is such a file, rename it to .jsonl"
        )
    return path


def _below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    def unreadable(error: OSError) -> None:
        raise ValueError(f"{error.filename}: cannot be read ({error.strerror})")

    found, others = [], Counter[str]()
    for root, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and _suffix(name) in suffixes:
                found.append(Path(root, name))
            else:
                others[_suffix(name)] += 1
    if not found:
        there = ", ".join(f"{suffix or 'none'} ({n})" for suffix, n in others.most_common(5))
        raise ValueError(
            f"{folder}: no file with --suffix {','.join(suffixes)} in it; suffixes there: {there or 'it is empty'}"
        )
    return sorted(found, key=lambda path: path.parts)


def _suffix(name: str) -> str:
    """The last suffix before ``.gz``."""
    return Path(name.removesuffix(PACKED)).suffix
