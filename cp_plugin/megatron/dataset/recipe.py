"""What a dataset is made of and how, and what a finished one holds: the ``.json`` beside its ``.bin`` and ``.idx``."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter

from cp_plugin.megatron.dataset.sources import SUFFIXES, Source
from cp_plugin.megatron.models.tokenizers import Name

type _Count = Annotated[int, Field(ge=0)]

_INDEX_HEADER = 34
"""Bytes in front of an index: a mark, version, element type, numbers of sequences and of documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The choices of a user: two runs with the same recipe give the same bytes."""

    paths: tuple[Path, ...]
    tokenizer: Name
    suffixes: tuple[str, ...] = SUFFIXES
    json_key: str = "text"
    append_eod: bool = True
    skip_bad: bool = False
    """Leave out documents that cannot be read."""
    max_bytes: int | None = None

    def written(self, sources: Sequence[Source]) -> dict[str, Any]:
        """As it is kept in the description, by the names of flags, with digests of what lies outside it."""
        return {
            "PATHS": [os.path.abspath(path) for path in self.paths],
            "--suffix": ",".join(self.suffixes),
            "--json-key": self.json_key,
            "--tokenizer": " ".join([str(self.tokenizer), *self.tokenizer.more]),
            "tokenizer files": self.tokenizer.identity(),
            "--append-eod": self.append_eod,
            "--skip-bad": self.skip_bad,
            "--max-bytes": self.max_bytes,
            "source files": _digest(sources),
        }


@dataclass(slots=True, kw_only=True)
class Description:
    """A dataset: what it was made from, what is in it, and the flags to train on it."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    files: _Count
    documents: _Count
    tokens: _Count
    """With those at the ends of documents."""
    empty: _Count
    """Documents left out because they have no text, or no token."""
    bad: _Count
    """Documents left out because they cannot be read."""
    vocabulary: _Count
    end_of_document: int | None
    element_bytes: _Count
    """Of a token in the .bin."""
    flags: list[str]
    """For Megatron's command line, without the split."""
    without_text: list[str]
    """Files without text, up to 20 of them."""
    unreadable: list[str]
    """Documents that cannot be read, up to 20 of them, each with the reason."""
    recipe: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write it beside the dataset at ``path``."""
        Path(f"{path}.json").write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def of(cls, path: Path | str) -> Description | None:
        """The one of the dataset with this path; None where .bin, .idx or .json is missing, cut or something else."""
        try:
            found = TypeAdapter(cls).validate_json(Path(f"{path}.json").read_bytes(), strict=True)
            index = _INDEX_HEADER + found.documents * (4 + 8) + (found.documents + 1) * 8
            sizes = (os.path.getsize(f"{path}.bin"), os.path.getsize(f"{path}.idx"))
        except (OSError, ValueError):
            return None
        return found if sizes == (found.tokens * found.element_bytes, index) else None


class Changed(ValueError):
    """What is there was made by another recipe."""


def require_same(path: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise Changed, with everything that differs, if the dataset at ``path`` was made by another recipe."""
    differing = [
        f"the files of --tokenizer {now['--tokenizer']} changed"
        if key == "tokenizer files"
        else f"{key}: {_shown(then.get(key))} then, {_shown(value)} now"
        for key, value in now.items()
        if then.get(key) != value
    ]
    if differing:
        raise Changed(f"{path}: made from something else ({'; '.join(differing)}); start over with --fresh")


def _digest(sources: Sequence[Source]) -> str:
    """Of the files' names, sizes and times of change."""
    words = json.dumps([asdict(source) for source in sources])
    return f"{len(sources)} files, {sum(s.size for s in sources)} bytes, {hashlib.sha256(words.encode()).hexdigest()}"


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
