"""What a finished dataset holds, and how to train on it: the .json beside its .bin and .idx."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cp_plugin.megatron.dataset import files
from cp_plugin.megatron.dataset.files import Number
from cp_plugin.megatron.models.tokenizers import Name, training_flags

ENDING = "_text_document"
"""Of the files' names, behind the prefix, as Megatron's own program writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A finished dataset."""

    files: Number
    documents: Number
    tokens: Number
    """With those at the ends of documents."""
    empty: Number
    """Documents left out because they have no text, or no token."""
    bad: Number
    """Documents left out because they cannot be read."""
    vocabulary: Number
    end_of_document: int | None
    element_bytes: Number
    """Of a token in the .bin."""
    flags: list[str]
    """For Megatron's command line, without the split."""
    without_text: list[str]
    """Files without text, up to 20 of them."""
    unreadable: list[str]
    """Documents that cannot be read, up to 20 of them, each with the reason."""
    recipe: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write it."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Description | None:
        """The one in this file; None where there is none, or something else."""
        try:
            return files.described(cls, path)
        except (OSError, ValueError):
            return None


def flags_for(path: str, tokenizer: Name, vocabulary: int) -> list[str]:
    """Megatron's flags to train on the dataset at this path."""
    return ["--data-path", path, *training_flags(tokenizer, vocabulary)]
