"""Tables from records: launches and bytes (``tests/fake_cuda/budget.py``), visible keys (``ci/cluster/seen.py``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import markdown_tables as markdown

_ROOT = Path(__file__).parent.parent
_PLACES = {
    "placed": "documents placed",
    "zigzag": "zigzag over the pack",
    "each": "every document cut by itself",
}


def budget(kind: str) -> str:
    """The budget's entries of one kind (``step``, ``message``, ``call``, ...): a row for each pass."""
    rows = []
    for name, passes in _read("tests/fake_cuda/budget.json").items():
        of_kind, what, kernel = name.split("/")
        for way, f in sorted(passes.items(), reverse=True) if of_kind == kind else ():
            messages = ", ".join(f"{n} {verb}" for verb, n in f["messages"].items()) or "none"
            nbytes, peak, sent = (f"{f[part] / f['elements']:.1f}" for part in ("nbytes", "peak", "sent"))
            rows.append((what, f"`{kernel}`", way, f["launches"], nbytes, f["allocations"], peak, messages, sent))
    titles = ("what", "kernel", "pass", "launches", "bytes", "allocations", "peak", "messages", "bytes sent")
    return markdown.table(titles, rows)


def ablation() -> str:
    """The parts of the start-up check, and how many harmful edits of Megatron each finds, also alone."""
    record = _read("docs/ablation.json")
    found = [parts.split(", ") for parts in record["edits"].values()]
    counts = [(part, sum(part in p for p in found), sum(p == [part] for p in found)) for part in record["parts"]]
    rows = sorted(counts, key=lambda row: -row[1])
    return markdown.table((f"of {len(found)} harmful edits", "found", "by it alone"), rows)


def launched(entry: str) -> str:
    """The launches of a budget entry, by operation; blanks and slashes of its name are written as ``_``."""
    found = _read("tests/fake_cuda/budget.json").items()
    passes = next(passes for name, passes in found if name.replace(" ", "_").replace("/", "_") == entry)
    names = sorted({operation for figures in passes.values() for operation in figures["operations"]})
    order = sorted(passes, reverse=True)
    rows = [(f"`{name}`", *(passes[way]["operations"].get(name, 0) for way in order)) for name in names]
    return markdown.table(("launched", *order), rows)


def seen(part: str) -> str:
    """A scenario on slow and fast links, or bytes at full size (``bytes``)."""
    content = _read("ci/cluster/seen.json")
    return _bytes(content["bytes"]) if part == "bytes" else _seconds(content[part], content[f"{part}-fast"])


def _seconds(slow: dict[str, Any], fast: dict[str, Any]) -> str:
    """The first run is the reference of the ratios."""
    rates = [f"{one['rate'] / 1e6:g} Mbit/s" for one in (slow, fast)]
    rows = []
    for ours, theirs in zip(slow["measured"], fast["measured"], strict=True):
        assert ours["entry"] == theirs["entry"] and ours["booked"] == theirs["booked"], "another record"
        cells = [_named(ours["entry"]), f"{ours['booked'][1] / 1e6:.2f} MB"]
        for one, part in ((ours, slow), (theirs, fast)):
            cells += [f"{one['median']:.2f} s", f"{one['median'] / part['measured'][0]['median']:.2f}x"]
        rows.append(cells)
    return markdown.table(("", "sent by the busiest rank", rates[0], "", rates[1], ""), rows)


def _bytes(kinds: dict[str, dict[str, int]]) -> str:
    runs = list(next(iter(kinds.values())))
    rows = [
        (kind, *(f"{sent[run] / 1e9:.2f} GB" for run in runs), f"{sent['ring@each'] / sent[runs[0]]:.1f}x")
        for kind, sent in kinds.items()
    ]
    return markdown.table(("documents", *map(_named, runs), "last over first"), rows)


def _named(entry: str) -> str:
    """``needed@placed`` or ``ring:layout=zigzag`` in words."""
    name, _, place = entry.partition("@")
    if place:
        return f"`{name}`, {_PLACES[place]}"
    name, _, layout = entry.partition(":layout=")
    return f"`{name}`, {layout}"


def _read(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_ROOT / path).read_text())
    return found
