"""Recipe and description of a dataset; the description is the ``.json`` beside its ``.bin`` and ``.idx``."""

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
"""Bytes of the index header: magic, version, element type, numbers of sequences and documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The user's choices; the same recipe yields the same bytes."""

    paths: tuple[Path, ...]
    tokenizer: Name
    suffixes: tuple[str, ...] = SUFFIXES
    json_key: str = "text"
    append_eod: bool = True
    skip_bad: bool = False  # skip unreadable documents
    max_bytes: int | None = None

    def written(self, sources: Sequence[Source]) -> dict[str, Any]:
        """Its form in the description: by flag, with digests of the input files."""
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
    """Contents of a dataset, its recipe, and the flags to train on it."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    files: _Count
    documents: _Count
    tokens: _Count  # including end-of-document tokens
    empty: _Count  # skipped documents without text or tokens
    bad: _Count  # skipped unreadable documents
    vocabulary: _Count
    end_of_document: int | None
    element_bytes: _Count  # per token in the .bin
    flags: list[str]  # for Megatron's command line, without --split
    without_text: list[str]  # up to 20 files without text
    unreadable: list[str]  # up to 20 unreadable documents with reasons
    recipe: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write it beside the dataset."""
        Path(f"{path}.json").write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def of(cls, path: Path | str) -> Description | None:
        """The description of a dataset; None if .bin, .idx or .json is missing, truncated or inconsistent."""
        try:
            found = TypeAdapter(cls).validate_json(Path(f"{path}.json").read_bytes(), strict=True)
            index = _INDEX_HEADER + found.documents * (4 + 8) + (found.documents + 1) * 8
            sizes = (os.path.getsize(f"{path}.bin"), os.path.getsize(f"{path}.idx"))
        except (OSError, ValueError):
            return None
        return found if sizes == (found.tokens * found.element_bytes, index) else None


class Changed(ValueError):
    """An existing dataset has another recipe."""


def require_same(path: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise Changed with all differences if the dataset at ``path`` has another recipe."""

    def shown(value: object) -> str:
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    differing = [
        f"the files of --tokenizer {now['--tokenizer']} changed"
        if key == "tokenizer files"
        else f"{key}: {shown(then.get(key))} then, {shown(value)} now"
        for key, value in now.items()
        if then.get(key) != value
    ]
    if differing:
        raise Changed(f"{path}: built from something else ({'; '.join(differing)}); rebuild it with --fresh")


def _digest(sources: Sequence[Source]) -> str:
    """Number, bytes and a hash of names, sizes and modification times."""
    words = json.dumps([asdict(source) for source in sources])
    return f"{len(sources)} files, {sum(s.size for s in sources)} bytes, {hashlib.sha256(words.encode()).hexdigest()}"
