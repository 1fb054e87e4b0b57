"""``--documents``: parsing the lengths of packed documents."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cp_plugin.cli.bench.cases import LENGTHS
from cp_plugin.common.names import did_you_mean

if TYPE_CHECKING:
    from cp_plugin.planner.asked import Asked

Documents = Annotated[
    str | None,
    typer.Option(
        metavar="LENGTHS",
        help="packed documents: a file with their lengths in tokens, lengths such as 600,200,224, or a distribution: "
        "chat, code, long",
    ),
]


def packed(asked: Asked, text: str | None) -> Asked:
    """Fill every sequence with documents, unless ``text`` is None; ValueError as for ``bounds``.

    Megatron joins the sequences of a micro-batch, and fills them so.
    """
    from cp_plugin.planner.asked import joined

    if text is None:
        return asked
    found = in_sequence(text, asked.shapes[0].seq_length * asked.shapes[0].micro_batch)
    return replace(asked, shapes=[joined(shape, found) for shape in asked.shapes])


def in_sequence(text: str, seq_length: int) -> tuple[int, ...]:
    """The length of each document in a sequence; ValueError as for ``bounds``."""
    return tuple(end - start for start, end in pairwise(bounds(text, seq_length)))


def bounds(text: str, seq_length: int) -> tuple[int, ...]:
    """Where the documents of a sequence begin, and its length.

    Given lengths are repeated until the sequence is full; the last document is truncated. ValueError for a text that is
    neither a file, nor lengths, nor a distribution, and for invalid lengths.
    """
    if text in LENGTHS:
        return tuple(accumulate(LENGTHS[text].pack(seq_length), initial=0))
    ends, more = [0], cycle(lengths(text))
    while ends[-1] < seq_length:
        ends.append(min(seq_length, ends[-1] + next(more)))
    return tuple(ends)


def lengths(text: str) -> list[int]:
    """The lengths in a file or a list; ValueError as for ``bounds``."""
    words = text.split(",")
    if not all(map(_is_length, words)):
        if len(words) > 1 and any(map(_is_length, words)):
            wrong = next(word for word in words if not _is_length(word))
            raise ValueError(f"--documents {text}: {wrong!r} is not a length; write numbers of tokens, 1 or more")
        words = _read(text)
    return [int(word) for word in words]


def _read(text: str) -> list[str]:
    try:
        words = Path(text).read_text(encoding="utf-8", errors="replace").split()
    except (OSError, ValueError):  # such as a name that is too long
        what = "a folder" if os.path.isdir(text) else "no such file"
        raise ValueError(
            f"--documents {text}: {what}{did_you_mean(text, LENGTHS) or '.'} Give a file, lengths such as 600,200,224, "
            f"or one of {', '.join(LENGTHS)}"
        ) from None
    wrong = [f"{word!r} is not a length" for word in words if not _is_length(word)] or ["it is empty"] * (not words)
    if wrong:
        raise ValueError(f"--documents {text}: {wrong[0]}; write the length of one document, 1 or more, on each line")
    return words


def _is_length(word: str) -> bool:
    return word.isdecimal() and word.isascii() and int(word) > 0
