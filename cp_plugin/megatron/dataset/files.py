"""The three files of a dataset, or of a shard of one: PREFIX.bin, .idx and .json."""

from __future__ import annotations

import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

_SUFFIXES = ("bin", "idx", "json")
_HEADER = 34
"""Bytes in front of an index: a mark, version, element type, numbers of sequences and of documents."""


Number = Annotated[int, Field(ge=0)]
"""Of things, in a .json file."""


def described[T](kind: type[T], path: Path) -> T:
    """The dataclass that a .json file holds.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it holds anything else: other fields, or values of other types.
    """
    text = path.read_text(encoding="utf-8")
    try:
        found = TypeAdapter(dict[str, object]).validate_json(text)
        assert is_dataclass(kind)
        if unknown := found.keys() - {field.name for field in fields(kind)}:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
        return TypeAdapter(kind).validate_json(text, strict=True)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not what cp-plugin dataset wrote: {' '.join(str(error).split())}") from None


def is_complete(prefix: str, documents: int, tokens: int, element_bytes: int) -> bool:
    """Whether .bin and .idx are as long as so many documents, one sequence each, and tokens make them."""
    sizes = {
        f"{prefix}.bin": tokens * element_bytes,
        f"{prefix}.idx": _HEADER + documents * (4 + 8) + (documents + 1) * 8,
    }
    return all(os.path.isfile(path) and os.path.getsize(path) == size for path, size in sizes.items())


def publish(unfinished: str, final: str) -> None:
    """Give complete files their names, the .json last: whoever finds it finds all, also after a power failure."""
    Path(f"{final}.json").unlink(missing_ok=True)  # never an old description with new data
    for suffix in _SUFFIXES:
        with open(f"{unfinished}.{suffix}", "rb") as file:
            os.fsync(file.fileno())
        os.replace(f"{unfinished}.{suffix}", f"{final}.{suffix}")


def remove(prefix: str) -> None:
    """Remove whichever of them are there."""
    for suffix in _SUFFIXES:
        Path(f"{prefix}.{suffix}").unlink(missing_ok=True)
