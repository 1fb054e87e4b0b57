"""The tables of what is sent only where it is seen, from the record that ``ci/cluster/seen.py`` writes."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import markdown_tables as markdown

_FILE = Path(__file__).parent.parent / "ci" / "cluster" / "seen.json"
_PLACES = {
    "placed": "documents placed",
    "zigzag": "zigzag over the pack",
    "each": "every document cut by itself",
}


def table(part: str) -> str:
    """Of a scenario on slow and on fast links, of kernel times (``balance``), or of bytes at full size (``bytes``)."""
    content = json.loads(_FILE.read_text())
    if part == "balance":
        return _balance(content["balance"]["packs"])
    return _bytes(content["bytes"]) if part == "bytes" else _seconds(content[part], content[f"{part}-fast"])


def _seconds(slow: dict[str, Any], fast: dict[str, Any]) -> str:
    """First the run that others are compared with."""
    rates = [f"{one['rate'] / 1e6:g} Mbit/s" for one in (slow, fast)]
    rows = []
    for ours, theirs in zip(slow["measured"], fast["measured"], strict=True):
        assert ours["entry"] == theirs["entry"] and ours["booked"] == theirs["booked"], "another record"
        cells = [_named(ours["entry"]), f"{ours['booked'][1] / 1e6:.2f} MB"]
        for one, part in ((ours, slow), (theirs, fast)):
            cells += [f"{one['median']:.2f} s", f"{one['median'] / part['measured'][0]['median']:.2f}x"]
        rows.append(cells)
    others = " and ".join(f"{100 * one['others']:.0f} %" for one in (slow, fast))
    found = markdown.table(("", "sent by the busiest rank", rates[0], "", rates[1], ""), rows)
    return f"{found}\n\nOther programs took {others} of the processors meanwhile."


def _balance(packs: list[dict[str, Any]]) -> str:
    rows = []
    for pack in packs:
        placed = max(next(iter(pack["seconds"].values())))
        for run, seconds in pack["seconds"].items():
            most = max(seconds)
            cells = (f"{most:.3f} s", f"{statistics.mean(seconds):.3f} s", f"{most / placed:.2f}x")
            rows.append((f"{pack['kind']}, {pack['documents']} documents", _named(run), *cells))
    return markdown.table(("pack", "", "busiest rank", "mean of the ranks", "against placed"), rows)


def _bytes(kinds: dict[str, dict[str, int]]) -> str:
    runs = list(next(iter(kinds.values())))
    rows = [
        (kind, *(f"{sent[run] / 1e9:.2f} GB" for run in runs), f"{sent['ring@each'] / sent[runs[0]]:.1f}x")
        for kind, sent in kinds.items()
    ]
    return markdown.table(("documents", *map(_named, runs), "last over first"), rows)


def _named(entry: str) -> str:
    """``needed@placed``, ``ring:layout=zigzag`` in words."""
    name, _, place = entry.partition("@")
    if place:
        return f"`{name}`, {_PLACES[place]}"
    name, _, layout = entry.partition(":layout=")
    return f"`{name}`, {layout}"
