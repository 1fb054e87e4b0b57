"""Step files -> one result file -> a page that says nothing else.

    report.py page CHECK.json DOCS   check.json -> DOCS/<GPU>.json and DOCS/<GPU>.md

Steps are joined as they end, so a call leaves few files, and one that is killed loses at most its last step.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from pack import anew
from plan import NOTHING, PLAN

MOST_SHOWN = 40
"""Failures, or cases not run for the same reason."""
Json = dict[str, Any]


def join(folder: Path, *names: str) -> Json:
    """All results so far, from the steps' files and FOLDER/check.json, written there and to FOLDER/page.md; a step that
    has run and left nothing is wrong."""
    file = folder / "check.json"
    steps = json.loads(file.read_text())["steps"] if file.exists() else {}
    files = {name: folder / f"{name}.json" for name in PLAN}
    steps |= {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    for name in names:
        if not files[name].exists():  # what an earlier call had of it no longer counts
            steps[name] = NOTHING | {"step": name, "finished": False, "error": "it left nothing"}
    results = {"steps": {name: steps[name] for name in PLAN if name in steps}}
    if pack := steps.get("environment", {}).get("pack"):
        pack["compiled anew"] = anew(pack)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(results, separators=(",", ":")))
    new.replace(file)
    (folder / "page.md").write_text(page(results))
    for file in files.values():
        file.unlink(missing_ok=True)
    return results


def failures(results: Json) -> list[tuple[str, str]]:
    """What is wrong, and how; so is a step that crashed, if it checks. One that its cap ended has not run the rest."""
    wrong = []
    for name, step in results["steps"].items():
        if not (step["finished"] or step.get("capped") or PLAN[name].measures):
            wrong.append((f"step {name}", _end(step)))
        wrong += [(f"{c['group']}: {c['name']}", _how(c["detail"])) for c in step["checks"] if not c["ok"]]
    return wrong


def page(results: Json) -> str:
    """Markdown."""
    results, environment = _reported(results), results["steps"].get("environment", {})
    machine, made, versions, pack = (environment.get(name, {}) for name in ("machine", "made", "versions", "pack"))
    commits = sorted({step["commit"] for step in results["steps"].values() if step.get("commit")})
    several = f" **Its steps ran on {len(commits)} commits:** {', '.join(commits)}." if len(commits) > 1 else ""
    introduction = (
        f"Written by `ci/gpu/check.sh` on {made.get('date', 'an unknown date')}, at commit "
        f"{made.get('commit', 'not known')}, from the JSON file of the same name. Ratios are medians of calls that "
        f"took turns in one run. Targets are those of the project; a figure that misses one is no error.{several}"
    )
    pack = {name: text for name, text in pack.items() if isinstance(text, str) and name != "cache"}
    facts = [(name, _words(value)) for name, value in (machine | versions | pack).items()]
    parts = [f"# {machine.get('name', 'Unknown machine')}", introduction, _result(failures(results))]
    parts += ["## Machine and versions", _table(("", ""), facts), "## Correctness", _checks(results)]
    for name, step in results["steps"].items():
        if step["figures"]:
            parts += [f"## Measured: {PLAN[name].title}", *_figures(step["figures"])]
    parts += ["## Not measured", _not_run(results)]
    return "\n\n".join(parts) + "\n"


def _reported(results: Json) -> Json:
    """The results without the figures of what a check found to be wrong."""
    steps = results["steps"]
    wrong = [check for step in steps.values() for check in step["checks"] if check.get("of") and not check["ok"]]
    reported = {}
    for name, step in steps.items():
        kept, withheld = [], []
        for figure in step["figures"]:
            own = next((c for c in wrong if set(c["of"]) <= set(figure.get("of", ()))), None)
            if own is None:
                kept.append(figure)
            else:
                reason = f"its timing is withheld, since {own['group']}: {own['name']} is wrong"
                withheld.append({"name": f"{figure['group']}: {figure['name']}", "reason": reason})
        reported[name] = step | {"figures": kept, "not_run": step["not_run"] + withheld}
    return results | {"steps": reported}


def _result(wrong: list[tuple[str, str]]) -> str:
    if not wrong:
        return "**Nothing is wrong.**"
    more = f"\n\nand {len(wrong) - MOST_SHOWN} more" if len(wrong) > MOST_SHOWN else ""
    rows = [(f"`{name}`", how) for name, how in wrong[:MOST_SHOWN]]
    return f"**{len(wrong)} wrong:**\n\n" + _table(("what", "how"), rows) + more


def _checks(results: Json) -> str:
    rows = []
    for step in results["steps"].values():
        for group, checks in _grouped(step["checks"]).items():
            near = max(_share(check["detail"]) for check in checks)
            right = sum(check["ok"] for check in checks)
            rows.append((group, str(len(checks)), str(right), f"{near:.0%}" if near else ""))
    if not rows:
        return "Nothing was checked."
    note = "The last column is the largest error as a share of its limit, over out and the gradients of all cases."
    return _table(("what", "cases", "right", "error of its limit"), rows) + "\n\n" + note


def _figures(figures: list[Json]) -> list[str]:
    parts = []
    for group, rows in _grouped(figures).items():
        details = list(dict.fromkeys(name for figure in rows for name in figure["detail"]))
        table = [
            (f["name"], f"{f['value']:.3g}", *_target(f), *(_words(f["detail"].get(d, "")) for d in details))
            for f in rows
        ]
        parts += [f"### {group[0].upper()}{group[1:]}", _table(("", "measured", "wanted", "", *details), table)]
    return parts


def _not_run(results: Json) -> str:
    by_reason: dict[str, dict[str, None]] = {}
    for name in PLAN:
        step = results["steps"].get(name)
        if step is None:
            reason, title = "the step was not requested, or there was no time left for it", PLAN[name].title
            by_reason.setdefault(reason, {})[f"{name} ({title})"] = None
            continue
        if not step["finished"]:
            by_reason.setdefault(_end(step), {})[f"the rest of {name}"] = None
        for left in step["not_run"]:
            by_reason.setdefault(left["reason"], {})[left["name"]] = None
    rows = []
    for reason, names in by_reason.items():
        more = f"; and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
        rows.append(("; ".join(list(names)[:MOST_SHOWN]) + more, reason))
    return _table(("what", "why not"), rows) if rows else "Everything was."


def _grouped(rows: list[Json]) -> dict[str, list[Json]]:
    """By group, in order of first appearance."""
    groups: dict[str, list[Json]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    return groups


def _target(figure: Json) -> tuple[str, str]:
    """In words, and whether it is met."""
    if not figure["wanted"]:
        return "", ""
    (sign, number), value = figure["wanted"], figure["value"]
    met = value >= number if sign == ">=" else value <= number
    return f"{'at least' if sign == '>=' else 'at most'} {number:g}", "met" if met else "missed"


def _share(detail: Json) -> float:
    error, limit = detail.get("error", 0.0), detail.get("limit", 0.0)
    return error / limit if isinstance(error, float) and isinstance(limit, float) and limit else 0.0


def _end(step: Json) -> str:
    return step.get("capped") or step["error"] or "it crashed: see check.log"


def _how(detail: Json) -> str:
    return detail.get("failure") or ", ".join(f"{name} {_words(value)}" for name, value in detail.items())


def _words(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def publish(check: Path, docs: Path) -> None:
    """Write the page and its result file under the name of the GPU."""
    results = json.loads(check.read_text())
    name = re.sub(r"[^a-z0-9]+", "-", results["steps"]["environment"]["machine"]["name"].lower()).strip("-")
    docs.mkdir(parents=True, exist_ok=True)
    (docs / f"{name}.json").write_text(check.read_text())
    (docs / f"{name}.md").write_text(page(results))
    print(docs / f"{name}.md")


def finish(folder: Path) -> int:
    """Join, and print what is wrong; 1 if anything is."""
    wrong = failures(join(folder))
    for name, how in wrong[:MOST_SHOWN]:
        print(f"WRONG {name}: {how}")
    print(f"FAIL: {len(wrong)} wrong" if wrong else "PASS: nothing is wrong", f"({folder / 'page.md'})", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["page", check, docs]:
            publish(Path(check), Path(docs))
        case _:
            sys.exit(__doc__)
