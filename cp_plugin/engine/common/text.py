"""Number and value formatting for messages."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Hashable, Sequence
from typing import TextIO


def show_bytes(n: float) -> str:
    """Bytes with three digits, in powers of 1000: ``1.50 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5:
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def show_seconds(value: float) -> str:
    """A duration with three digits: ``1.5 ms``; whole seconds from 100 s."""
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def either(words: Sequence[str]) -> str:
    """A choice: ``kv``, ``kv or q``, or ``zigzag, striped or documents``."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""


def divisors(n: int) -> list[int]:
    """All divisors, the smallest first."""
    return [d for d in range(1, n + 1) if n % d == 0]


def show_option(value: object) -> str:
    """An option's value as a user writes it: a grid is ``8x4``."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def ranks_named(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2`` or ``ranks 0, 2``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def group_ranks[T: Hashable](values: Sequence[T], ranks: Sequence[int] | None = None) -> dict[T, list[int]]:
    """Return each value's ranks; ranks: whose the values are, by default 0, 1, and so on."""
    groups: dict[T, list[int]] = {}
    for rank, value in zip(range(len(values)) if ranks is None else ranks, values, strict=True):
        groups.setdefault(value, []).append(rank)
    return groups


def wrap_for_terminal(text: str, stream: TextIO) -> str:
    """A message for a stream: wrapped between words if it is a terminal; whole lines for files and pipes."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = [
        textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""] for line in text.split("\n")
    ]
    return "\n".join(part for parts in lines for part in parts)
