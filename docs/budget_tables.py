"""The tables of the page on launches and bytes, from the file that ``tests/fake_cuda/budget.py`` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import markdown_tables as markdown

_FILE = Path(__file__).parent.parent / "tests" / "fake_cuda" / "budget.json"


def table(kind: str) -> str:
    """The entries of one kind (``step``, ``call``, ``linear``, ``decode``): a row for each pass."""
    titles = ("what", "kernel", "pass", "launches", "bytes", "allocations", "peak", "messages", "bytes sent")
    rows = []
    for name, ways in _entries().items():
        of_kind, what, kernel = name.split("/")
        if of_kind != kind:
            continue
        for way in sorted(ways, reverse=True):
            f = ways[way]
            messages = ", ".join(f"{n} {verb}" for verb, n in f["messages"].items()) or "none"
            per_element = (f"{f[part] / f['elements']:.1f}" for part in ("nbytes", "peak", "sent"))
            nbytes, peak, sent = per_element
            rows.append((what, f"`{kernel}`", way, f["launches"], nbytes, f["allocations"], peak, messages, sent))
    return markdown.table(titles, rows)


def launched(name: str) -> str:
    """What is launched in an entry, by name: ``step_zigzag,_keys_of_an_earlier_rank_sdpa``, blanks as ``_``."""
    ways = next(ways for entry, ways in _entries().items() if entry.replace(" ", "_").replace("/", "_") == name)
    names = sorted({operation for figures in ways.values() for operation in figures["operations"]})
    order = sorted(ways, reverse=True)
    rows = [(f"`{name}`", *(ways[way]["operations"].get(name, 0) for way in order)) for name in names]
    return markdown.table(("launched", *order), rows)


def _entries() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(_FILE.read_text())
    return found
