"""Documents packed in one sequence: their lengths, drawn from the distributions of public training data."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from cp_plugin.cli.bench import names


class Distribution(NamedTuple):
    """How long documents are, in tokens."""

    upper: tuple[int, ...]
    """Ends of the bins, the first of which begins at 1."""
    share: tuple[float, ...]
    """Part of all documents in each bin."""
    up_to: int | None
    """Longest sequence for which it is taken by default; None: any."""


@cache
def distributions() -> dict[str, Distribution]:
    """All of ``lengths.toml``, in the order in which ``default`` tries them."""
    content = tomllib.loads((files(__package__) / "lengths.toml").read_text())
    return {
        name: Distribution(tuple(table["upper"]), tuple(table["share"]), table.get("up_to"))
        for name, table in content.items()
    }


def default(seq_length: int) -> str:
    """The distribution that LongCA-bench takes for sequences of this length."""
    return next(name for name, d in distributions().items() if d.up_to is None or seq_length <= d.up_to)


def bounds(name: str, seq_length: int, seed: int) -> tuple[int, ...]:
    """Where the documents of a packed sequence begin, and its length; the last document is cut to fit.

    A bin is drawn by its share, a length inside it uniformly in its logarithm.

    Raises:
        ValueError: for an unknown distribution.
    """
    names.check("--distribution", name, distributions())
    found, generator = distributions()[name], np.random.default_rng(seed)
    lower, share = (1, *found.upper[:-1]), np.array(found.share) / sum(found.share)
    ends = [0]
    while ends[-1] < seq_length:
        number = generator.choice(len(share), p=share)
        length = lower[number] * (found.upper[number] / lower[number]) ** generator.random()
        ends.append(min(seq_length, ends[-1] + int(length)))
    return tuple(ends)
