"""``--documents``: the lengths of packed documents, as a user gives them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cp_plugin.cli.bench.cases import distributions, document_bounds
from cp_plugin.core.names import did_you_mean
from cp_plugin.placement.lengths import LENGTHS

if TYPE_CHECKING:
    from cp_plugin.planner.asked import Asked

Documents = Annotated[
    str | None,
    typer.Option(
        help="packed documents: a file with their lengths in tokens, lengths such as 600,200,224, or a distribution: "
        "chat, code, long, pile, prolong64k, prolong512k"
    ),
]


def packed(asked: Asked, text: str | None) -> Asked:
    """The same with documents in every sequence; with None as it is.

    Raises:
        ValueError: as ``bounds`` does.
    """
    if text is None:
        return asked
    documents = in_sequence(text, asked.shapes[0].seq_length)
    return replace(asked, shapes=[replace(shape, documents=documents) for shape in asked.shapes])


def in_sequence(text: str, seq_length: int) -> tuple[int, ...]:
    """The tokens of each document of a sequence.

    Raises:
        ValueError: as ``bounds`` does.
    """
    return tuple(end - start for start, end in pairwise(bounds(text, seq_length)))


def bounds(text: str, seq_length: int) -> tuple[int, ...]:
    """Where the documents of a sequence begin, and its length.

    Lengths that are given fill it in their order, from the first again where they do not suffice; the last document is
    cut to fit.

    Raises:
        ValueError: for a text that is neither a file, nor lengths, nor a distribution, and a length that is none.
    """
    if text in LENGTHS:
        return tuple(accumulate(LENGTHS[text].pack(seq_length), initial=0))
    if text in distributions():
        return document_bounds(text, seq_length, seed=0)
    ends = [0]
    for length in cycle(lengths(text)):
        ends.append(min(seq_length, ends[-1] + length))
        if ends[-1] == seq_length:
            return tuple(ends)
    raise AssertionError("lengths are repeated until the sequence is full")


def lengths(text: str) -> list[int]:
    """The tokens of each document, one or more, from a file or a list.

    Raises:
        ValueError: as ``bounds`` does.
    """
    words = text.split(",")
    if not all(map(_is_length, words)):
        words = _read(text)
    return [int(word) for word in words]


def _read(text: str) -> list[str]:
    """The lengths in a file of that name."""
    try:
        words = Path(text).read_text(encoding="utf-8", errors="replace").split()
    except (OSError, ValueError):  # such as a name that is too long
        names = (*LENGTHS, *distributions())
        raise ValueError(
            f"--documents {text}: there is no such file{did_you_mean(text, names) or '.'} Write a file, lengths such "
            f"as 600,200,224, or one of {', '.join(names)}"
        ) from None
    wrong = [f"{word!r} is no length" for word in words if not _is_length(word)] or ["it is empty"] * (not words)
    if wrong:
        raise ValueError(f"--documents {text}: {wrong[0]}: write the tokens of one document, 1 or more, on each line")
    return words


def _is_length(word: str) -> bool:
    return word.isdecimal() and word.isascii() and int(word) > 0
