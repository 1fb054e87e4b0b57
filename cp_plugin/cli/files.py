"""Files that commands write: checked before the work begins."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cp_plugin.common.text import either

PICTURES = (".svg", ".png", ".pdf")


def check_output(path: Path, kind: str = "file", suffixes: Sequence[str] = (), flag: str = "") -> None:
    """ValueError for an unwritable file or a wrong suffix; ``kind`` of file and ``flag``: for the message."""
    if not path.name:
        example = f"{kind}{suffixes[0] if suffixes else ''}"
        raise ValueError(f"{flag or path}: name the {kind} to write, such as {example}")
    if suffixes and path.suffix not in suffixes:
        listed = either(suffixes)
        shown = f"{flag} {path}".strip()
        raise ValueError(f"{shown}: {kind}s are {listed} files; write {path.with_suffix(suffixes[0])}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        shown = f"{flag} {path}".strip()
        raise ValueError(f"{shown} cannot be written: name a file in an existing folder that you can write to")
