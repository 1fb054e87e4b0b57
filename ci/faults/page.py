"""The tables of docs/faults.md, written from what happened."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from faults import LIMIT, TIMEOUT

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
TABLE, SAVES = ("<!-- table -->", "<!-- end of the table -->"), ("<!-- saves -->", "<!-- end of the saves -->")


def renew(faults: list[dict[str, object]], saves: list[dict[str, object]], path: Path = PAGE) -> None:
    """Put the outcomes in the place of those before; what there is none of stays.

    Raises ValueError where the page has no such place.
    """
    text = path.read_text()
    if faults:
        text = _between(text, TABLE, table(faults))
    if saves:
        text = _between(text, SAVES, sentence(saves))
    path.write_text(text)


def table(rows: list[dict[str, object]]) -> str:
    """All faults, and how many ended as they must."""
    good = sum(row["verdict"] == "ok" for row in rows)
    left_out = sum(row["verdict"] == "left out" for row in rows)
    ending = [float(row["seconds"]) for row in rows if row["expect"] == "ends" and row["verdict"] == "ok"]
    without = f", {left_out} left out" if left_out else ""
    lines = [
        f"{good} of {len(rows)} ended as they must{without}; the slowest end came {max(ending, default=0.0):.1f} s "
        f"after the fault, and {LIMIT * TIMEOUT:g} s are allowed. {os.cpu_count()} cores, shared with other work.",
        "",
        "| fault | what | must | is | s |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['what']} | {row['expect']} | {row['verdict']} | {row['seconds']:.1f} |" for row in rows
    ]
    return "\n".join(lines)


def sentence(rows: list[dict[str, object]]) -> str:
    """How many kills in the midst of saving, by format, the next start went on from."""
    styles = Counter(str(row["what"]).partition(":")[0] for row in rows)
    good = sum(row["verdict"] == "ok" for row in rows)
    by_style = ", ".join(f"{number} of `{style}`" for style, number in sorted(styles.items()))
    return (
        f"{good} of {len(rows)} kills in the midst of saving ({by_style}): the next start went on from the last "
        "checkpoint that was reported as saved, or a later complete one, with exactly the losses of an undisturbed run."
    )


def _between(text: str, marks: tuple[str, str], new: str) -> str:
    first, last = marks
    before, found, rest = text.partition(first)
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise ValueError(f"the page has no {first} ... {last}")
    return f"{before}{first}\n{new}\n{last}{after}"
