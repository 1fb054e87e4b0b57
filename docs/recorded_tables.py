"""Tables from records: launches and bytes (``tests/equipment/cuda/budget.py``), parts of the start-up check."""

from __future__ import annotations

import json
import tomllib
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


def edits() -> str:
    """Count harmful edits of Megatron by what refuses them."""
    said = [edit["refusal"] for edit in tomllib.loads((_ROOT / "tests/megatron/edits.toml").read_text())["harmful"]]
    step, own = map(said.count, ("differs from the step on one rank", "otherwise than Megatron's own attention"))
    rest = len(said) - step - own
    return f"Of {len(said)} harmful edits the step refuses {step}, Megatron's own attention {own}, other checks {rest}."


def _read(path: str) -> Any:
    return json.loads((_ROOT / path).read_text())
