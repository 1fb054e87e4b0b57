"""Tables of ``versions.md``: what is replaced, and on which commits of Megatron-LM the plugin starts."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import markdown_tables as markdown

from cp_plugin.cli import doctor_megatron
from cp_plugin.common.versions import megatron_supported

REPLAYED = Path(__file__).parents[1] / "ci" / "megatron" / "replayed.json"


@cache
def replaced() -> str:
    """Every symbol of Megatron-Core that some run replaces."""
    spec = find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    found = doctor_megatron.examine(str(Path(spec.origin).parents[2]), [])
    rows = [
        [f"`{one['symbol'].replace(':', ' : ')}`", one["contract"], one["for"], one["called_by"] or "an interface"]
        for one in found["symbols"]
    ]
    return markdown.table(["symbol", "contract", "for", "called by"], rows)


def replayed() -> str:
    """One row for each commit."""
    found = json.loads(REPLAYED.read_text(encoding="utf-8"))["commits"]
    commits = {name: one for name, one in found.items() if megatron_supported(one["version"])}
    rows = []
    for name, one in sorted(commits.items(), key=lambda pair: pair[1]["date"]):
        starts = {model: result["state"] for model, result in one["start"].items()}
        refused = [model for model, state in starts.items() if state != "passed"]
        trained = [result for result in one.get("train", {}).values() if result["state"] == "passed"]
        rows.append(
            [
                f"`{name[:10]}`",
                one["date"],
                one["version"],
                str(len(one["unknown"])),
                "yes" if not refused else f"not: {', '.join(refused)}",
                f"{len(trained)} of {len(one['train'])} as one rank" if one.get("train") else "",
            ]
        )
    return markdown.table(["commit", "date", "calls itself", "unknown sources", "starts", "two steps"], rows)
