"""Which files a dataset is made of: named ones, and those with certain suffixes in folders, in a fixed order."""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
"""Of files that are taken from a folder, each also with ``.gz`` behind it."""
PACKED = ".gz"
LINES = (".jsonl", ".ndjson")
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file, as it was when the work was planned."""

    path: str
    """Absolute."""
    size: int
    modified: int
    """Nanoseconds since 1970."""

    @property
    def lines(self) -> bool:
        """Whether each line is a document, in JSON; else the file is one."""
        return _suffix(self.path) in LINES

    @property
    def packed(self) -> bool:
        """Whether it is compressed by gzip."""
        return self.path.endswith(PACKED)

    @property
    def python(self) -> bool:
        """Whether it says itself, as Python's files may, in which encoding it is."""
        return _suffix(self.path) == ".py"


def standard_library() -> Path:
    """The folder of Python's own source text: real text on every machine."""
    return Path(sysconfig.get_paths()["stdlib"])


def find(paths: Sequence[Path], suffixes: Sequence[str] = SUFFIXES, max_bytes: int | None = None) -> list[Source]:
    """The files, in the order of the paths; within a folder in the order of their names, folder by folder.

    Hidden files and folders are left out, so are caches and installed packages.

    Args:
        max_bytes: stop before the file that would exceed so many bytes.

    Raises:
        ValueError: for a path that is not there, cannot be read or holds no such file, and for a file met twice.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"--max-bytes {max_bytes}: give a positive number of bytes, or leave it out")
    found: list[Path] = []
    for path in paths:
        found += _below(path, suffixes) if path.is_dir() else [_named(path)]
    _check_once(found)
    sources, total = [], 0
    for path in found:
        status = path.stat()
        total += status.st_size
        if max_bytes is not None and total > max_bytes:
            break
        sources.append(Source(path=os.path.abspath(path), size=status.st_size, modified=status.st_mtime_ns))
    if not sources:
        raise ValueError(f"--max-bytes {max_bytes}: the first file, {found[0]}, has {found[0].stat().st_size} bytes")
    return sources


def _named(path: Path) -> Path:
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if not path.is_file():
        raise ValueError(f"{path}: neither a file nor a folder")
    if _suffix(str(path)) == ".json":
        raise ValueError(
            f"{path}: text is read from .jsonl, one JSON object a line; if this is such a file, name it so"
        )
    return _readable(path)


def _below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    found, others = [], Counter()
    for root, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and _suffix(name) in suffixes:
                found.append(_readable(Path(root, name)))
            else:
                others[_suffix(name)] += 1
    if not found:
        there = ", ".join(f"{suffix or 'none'} ({n})" for suffix, n in others.most_common(5))
        raise ValueError(
            f"{folder}: no file with --suffix {','.join(suffixes)} in it; suffixes there: {there or 'it is empty'}"
        )
    return sorted(found, key=lambda path: path.parts)


def _suffix(name: str) -> str:
    """The last suffix, before that of compression."""
    return Path(name.removesuffix(PACKED)).suffix


def _readable(path: Path) -> Path:
    if not os.access(path, os.R_OK):
        raise ValueError(f"{path}: no permission to read it, or a link that leads nowhere")
    return path


def _unreadable(error: OSError) -> None:
    raise ValueError(f"{error.filename}: cannot be read ({error.strerror})")


def _check_once(paths: Iterable[Path]) -> None:
    met: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in met:
            raise ValueError(
                f"{path}: found twice, its text would count twice: name the file, or a folder with it, once"
            )
        met.add(real)
