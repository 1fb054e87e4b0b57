"""Whether the datasets of a command line exist, and its folders can be written.

Megatron looks for datasets only once the model is built, and for ``--save`` when it writes the first checkpoint.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from cp_plugin.megatron.flags.linear_flags import attribute

_PATHS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_FOLDERS = ("--save", "--tensorboard-dir")
_LISTS = ("--data-args-path", "--per-split-data-args-path")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare Megatron's flags."""
    for flag in _PATHS:
        parser.add_argument(flag, nargs="*", default=[])
    for flag in (*_LISTS, *_FOLDERS):
        parser.add_argument(flag)
    for flag in ("--mock-data", "--sft"):
        parser.add_argument(flag, action="store_true")


def check(args: argparse.Namespace) -> None:
    """Check on the first rank, which reads data in every division of a model, and writes most.

    A dataset is a pair of files ``PATH.bin`` and ``PATH.idx``. A path that exists itself is the script's affair, as are
    addresses (``s3://...``), and names with ``--sft``.

    Raises:
        FileNotFoundError: for all datasets and lists of datasets that do not exist.
        ValueError: for a folder that cannot be made or written.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    for flag in _FOLDERS:
        _check_folder(flag, getattr(args, attribute(flag)))
    if args.mock_data or args.sft:
        return
    wrong = []
    for flag in _PATHS:
        words = getattr(args, attribute(flag))
        wrong += [f"{flag} {path}: {reason}" for path in _paths(words) if (reason := _missing(path))]
    for flag in _LISTS:
        path = getattr(args, attribute(flag))
        if path is not None and "://" not in path and not os.path.exists(path):
            wrong.append(f"{flag} {path}: no such file")
    if args.data_args_path is not None and not wrong and os.path.isfile(args.data_args_path):
        listed = Path(args.data_args_path).read_text().split()
        wrong = [f"{path} in --data-args-path: {reason}" for path in _paths(listed) if (reason := _missing(path))]
    if wrong:
        raise FileNotFoundError(" | ".join(wrong))


def _check_folder(flag: str, path: str | None) -> None:
    if not path or "://" in path:
        return
    existing = Path(path).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        why = "is no folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        why = "cannot be written by you"
    else:
        return
    raise ValueError(f"{flag} {path}: {existing} {why}; name a folder that can be made and written")


def _paths(words: Sequence[str]) -> list[str]:
    """The paths of a blend: each, or every second word is one, behind its weight."""
    return [word for word in words if not _is_number(word)]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _missing(path: str) -> str:
    """What is not there, or how the path is to be written; empty if nothing is missing."""
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    if prefix != path and not _absent(prefix) and _absent(path):
        return f"write {prefix}, without the suffix"
    absent = [] if "://" in path or os.path.exists(path) else _absent(path)
    if len(absent) == 1:
        return f"{absent[0]} is missing"
    return f"neither {' nor '.join(absent)} exists; cp-plugin dataset makes them from text files" if absent else ""


def _absent(prefix: str) -> list[str]:
    """Those of a dataset's two files that do not exist."""
    return [file for file in (f"{prefix}.bin", f"{prefix}.idx") if not os.path.exists(file)]
