"""Tables from records: launches and bytes (``tests/equipment/cuda/budget.py``), parts of the start-up check."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import markdown_tables as markdown

_ROOT = Path(__file__).parent.parent


def budget(kind: str) -> str:
    """The budget's entries of one kind (``step``, ``message``, ``call``, ...): a row for each pass."""
    rows = []
    for name, passes in _read("tests/equipment/cuda/budget.json").items():
        of_kind, what, kernel = name.split("/")
        for way, f in sorted(passes.items(), reverse=True) if of_kind == kind else ():
            messages = ", ".join(f"{n} {verb}" for verb, n in f["messages"].items()) or "none"
            nbytes, peak, sent = (f"{f[part] / f['elements']:.1f}" for part in ("nbytes", "peak", "sent"))
            rows.append((what, f"`{kernel}`", way, f["launches"], nbytes, f["allocations"], peak, messages, sent))
    titles = ("what", "kernel", "pass", "launches", "bytes", "allocations", "peak", "messages", "bytes sent")
    return markdown.table(titles, rows)


def faults() -> str:
    """How many faults ended as required, and the slowest of those that must end all ranks."""
    rows = _read("docs/faults.json")
    ok = [row for row in rows if row["verdict"] == "ok"]
    slowest = max(row["seconds"] for row in ok if row["expect"] == "ends")
    return f"{len(ok)} of {len(rows)} ended as required; the slowest end came {slowest:.1f} s after the fault."


REFUSES = {
    "differs from the step on one rank": "a step of the run",
    "otherwise than Megatron's own attention": "Megatron's own attention",
}
"""What a refusal says -> which part of the start-up check it is from."""


def edits() -> str:
    """Which part of the start-up check refuses how many harmful edits of Megatron."""
    harmful = tomllib.loads((_ROOT / "tests/megatron/edits.toml").read_text())["harmful"]
    counts = Counter(REFUSES.get(edit["found"], "other checks, by name") for edit in harmful)
    return markdown.table((f"of {len(harmful)} harmful edits", "refused"), counts.most_common())


def _read(path: str) -> Any:
    return json.loads((_ROOT / path).read_text())
