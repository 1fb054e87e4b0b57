"""The table of ``versions.md``: on which commits of Megatron-LM the plugin starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import markdown_tables as markdown

from cp_plugin.common.versions import megatron_supported

_MEGATRONS_OWN = {"alone", "lacks"}
"""States of what fails without the plugin, too: not counted."""
REPLAYED = Path(__file__).parents[1] / "ci" / "megatron" / "replayed.json"


def replayed() -> str:
    """A row for each version that commits of main call themselves, one for open pull requests, and the dev branch."""
    found = json.loads(REPLAYED.read_text(encoding="utf-8"))["commits"]
    if not found:
        return "Not yet run as a whole."
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in sorted(found.values(), key=lambda one: (one["name"] != "HEAD", one["date"])):
        if megatron_supported(one["version"]):
            groups.setdefault(_group(one), []).append(one)
    rows = []
    for group, some in groups.items():
        dates = [one["date"] for one in some]
        rows.append(
            [
                group,
                f"{min(dates)} to {max(dates)}" if len(some) > 1 else dates[0],
                len(some),
                *(_passed(some, "start", names) for names in (("gpt", "packed", "moe"), ("hybrid",), ("delta net",))),
                _passed(some, "train", ("packed",)),
                _passed(some, "train", ("hybrid", "delta net")),
            ]
        )
    titles = (
        *("", "dates", "commits", "GPT, packed, experts start", "Mamba hybrids start"),
        *("with gated delta net", "packed GPT trains as on one rank", "hybrids do"),
    )
    return "\n".join([markdown.table(titles, rows), *_left_out(found)])


def _left_out(found: dict[str, Any]) -> list[str]:
    """Each commit on which a case did not pass, with the first message."""
    lines = [""]
    for commit, one in found.items():
        cases = {**one["start"], **one.get("train", {})} if megatron_supported(one["version"]) else {}
        failed = {name: result for name, result in cases.items() if result["state"] != "passed"}
        if not failed:
            continue
        first = next(iter(failed.values()))
        why = f"`{first['message'].splitlines()[0].partition(' (')[0].rstrip('.')}`"
        own = {result["state"] for result in failed.values()} <= _MEGATRONS_OWN
        lines.append(f"- {_named(commit, one)}{', not counted' if own else f', {", ".join(failed)}'}: {why}")
    return lines if len(lines) > 1 else []


def _named(commit: str, one: dict[str, Any]) -> str:
    return f"pull request {one['name'].split('/')[2]}" if one["name"].startswith("refs/pull/") else commit[:10]


def _group(one: dict[str, Any]) -> str:
    if one["name"] == "HEAD":
        return f"main, {one['version']}"
    return "open pull requests" if one["name"].startswith("refs/pull/") else one["name"]


def _passed(some: list[dict[str, Any]], kind: str, cases: tuple[str, ...]) -> str:
    """Of the commits that have one of these cases, those on which all of them pass."""
    states = [[one[kind][case]["state"] for case in cases if case in one.get(kind, {})] for one in some]
    states = [one for one in states if not set(one) & _MEGATRONS_OWN]
    return f"{sum(set(one) == {'passed'} for one in states)} of {sum(map(bool, states))}" if any(states) else "-"
