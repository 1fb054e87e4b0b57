"""The table of ``versions.md``: on which commits of Megatron-LM the plugin starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import markdown_tables as markdown

from cp_plugin.common.versions import megatron_supported

REPLAYED = Path(__file__).parents[1] / "ci" / "megatron" / "replayed.json"


def replayed() -> str:
    """A row for each version that commits call themselves."""
    found = json.loads(REPLAYED.read_text(encoding="utf-8"))["commits"]
    if not found:
        return "Not yet run as a whole."
    by_version: dict[str, list[dict[str, Any]]] = {}
    for one in sorted(found.values(), key=lambda one: one["date"]):
        if megatron_supported(one["version"]):
            by_version.setdefault(one["version"], []).append(one)
    rows = []
    for version, some in by_version.items():
        starts = [all(result["state"] == "passed" for result in one["start"].values()) for one in some]
        trained = [result["state"] for one in some for result in one.get("train", {}).values()]
        rows.append(
            [
                version,
                f"{some[0]['date']} to {some[-1]['date']}",
                len(some),
                f"{min(len(one['unknown']) for one in some)} to {max(len(one['unknown']) for one in some)}",
                f"{sum(starts)} of {len(some)}",
                f"{trained.count('passed')} of {len(trained)}",
            ]
        )
    titles = ("calls itself", "dates", "commits", "unknown sources", "start", "trainings as on one rank")
    return markdown.table(titles, rows)
