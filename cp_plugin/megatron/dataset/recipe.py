"""What a dataset is made of and how: two runs with the same recipe give the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cp_plugin.megatron.dataset.sources import SUFFIXES, Source
from cp_plugin.megatron.models.tokenizers import Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The choices of a user."""

    paths: tuple[Path, ...]
    tokenizer: Name
    suffixes: tuple[str, ...] = SUFFIXES
    json_key: str = "text"
    append_eod: bool = True
    skip_bad: bool = False
    """Leave out documents that cannot be read."""
    max_bytes: int | None = None

    def written(self, sources: Sequence[Source]) -> dict[str, Any]:
        """As it is kept in files, by the names of flags, with digests of what lies outside it."""
        return {
            "PATHS": [os.path.abspath(path) for path in self.paths],
            "--suffix": ",".join(self.suffixes),
            "--json-key": self.json_key,
            "--tokenizer": " ".join([str(self.tokenizer), *self.tokenizer.more]),
            "tokenizer files": self.tokenizer.identity(),
            "--append-eod": self.append_eod,
            "--skip-bad": self.skip_bad,
            "--max-bytes": self.max_bytes,
            "source files": digest(sources),
        }


class Changed(ValueError):
    """What is there was made by another recipe."""


def digest(sources: Sequence[Source]) -> str:
    """Of the files' names, sizes and times of change."""
    words = json.dumps([asdict(source) for source in sources])
    return f"{len(sources)} files, {sum(s.size for s in sources)} bytes, {hashlib.sha256(words.encode()).hexdigest()}"


def require_same(where: str, then: Mapping[str, Any], now: Mapping[str, Any], named: str = "") -> None:
    """Compare two recipes as they are written.

    where: what was made by the first. named: the first source file that changed, if it is known.

    Raises:
        Changed: if they differ, with everything that does.
    """
    differing = []
    for key in now:
        before, after = then.get(key), now[key]
        if before == after:
            continue
        if key == "source files":
            differing.append(named or f"{key}: {_short(before)} then, {_short(after)} now")
        elif key == "tokenizer files":
            differing.append(f"the files of --tokenizer {now['--tokenizer']} changed")
        else:
            differing.append(f"{key}: {_shown(before)} then, {_shown(after)} now")
    if differing:
        raise Changed(f"{where}: made from something else ({'; '.join(differing)}); start over with --fresh")


def first_difference(then: Sequence[Source], now: Sequence[Source]) -> str:
    """The first source file that is not what it was, in words; empty where all are."""
    before, after = {s.path: s for s in then}, {s.path: s for s in now}
    for path in sorted({*before, *after}):
        if path not in after:
            return f"{path} is gone"
        if path not in before:
            return f"{path} is new"
        if before[path] != after[path]:
            return f"{path} changed ({before[path].size} bytes then, {after[path].size} now)"
    return "" if list(then) == list(now) else "the order of the files changed"


def _short(text: object) -> str:
    """Without the digest itself: numbers of files and bytes; 'of other times' where these are the same."""
    return str(text).rpartition(", ")[0] + f" ({str(text)[-6:]})"


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
