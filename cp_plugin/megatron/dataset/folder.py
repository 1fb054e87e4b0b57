"""The folder of an unfinished dataset: the plan, the finished shards, and a lock. It goes when the dataset is there."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cp_plugin.megatron.dataset import files
from cp_plugin.megatron.dataset.sources import Source

_PATIENCE = 3.0
"""Seconds to wait for the processes of a run that was killed to be gone."""


PLAN = "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an unfinished dataset was begun with."""

    recipe: dict[str, Any]
    sample: str
    """What the tokenizer made of a sample of text."""
    shard_bytes: int | None
    sources: list[Source]
    without_text: list[str] = field(default_factory=list)
    """Files without text, as many as are reported by name."""
    unreadable: list[str] = field(default_factory=list)
    """Documents that are left out, likewise, each with the reason."""

    def save(self, folder: Path) -> None:
        """Keep it, in one step."""
        unfinished = folder / "plan.unfinished"
        unfinished.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(unfinished, folder / PLAN)

    @classmethod
    def load(cls, folder: Path) -> Plan | None:
        """The plan that was kept; None where there is none. ValueError for a file that is none."""
        try:
            return files.described(cls, folder / PLAN)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise ValueError(f"{error}; start over with --fresh") from None


@contextmanager
def locked(folder: Path, keep: Callable[[], bool]) -> Iterator[None]:
    """Make the folder, and have it alone; remove it in the end unless it is to be kept.

    The lock is the operating system's, and ends with the last process that has it.

    Raises:
        ValueError: if another process has it.
        OSError: if it cannot be made.
    """
    descriptor = _locked(folder)
    try:
        yield
    finally:
        if not keep():
            empty(folder)
            folder.rmdir()
        os.close(descriptor)


def empty(folder: Path) -> None:
    """Remove what is in it, the plan first: without it nothing else counts."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name != PLAN):
        entry.unlink()


def _locked(folder: Path) -> int:
    give_up = time.monotonic() + _PATIENCE
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise ValueError(
                    f"{folder}: another process is building this dataset; wait for it, or end it"
                ) from None
            time.sleep(0.05)
        os.close(descriptor)  # of a folder that the other removed, or has still
