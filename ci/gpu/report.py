"""Step files -> one result file -> a page that says nothing else.

    report.py steps                 every step: name, seconds, and "measures" or "checks"
    report.py finish FOLDER STEPS   step files -> FOLDER/check.json and FOLDER/page.md; status 1 if anything is wrong
    report.py withhold FOLDER STEP  status 1, and a step file with the reason, if STEP measures something incorrect
    report.py page CHECK.json DOCS  check.json -> DOCS/<GPU>.json and DOCS/<GPU>.md

Steps of an earlier call are in FOLDER/check.json, or still in their own files if that call was stopped.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A step."""

    title: str
    seconds: int
    """It starts nothing new after that, less than ten minutes; ten seconds later it is killed."""
    measures: bool = False
    """It only measures: the rest of an interrupted one is unmeasured, and nothing of it is reported if anything is
    wrong."""


STEPS = {
    "environment": Kind("the machine", 15),
    "our_kernels": Kind("our own kernels against their definitions", 120),
    "extremes": Kind("our own kernels many at a time, on large tensors, with non-finite numbers", 180),
    "nccl": Kind("every provider over process groups, through autograd", 420),
    "training": Kind("Megatron's training with context parallelism, against one rank", 480),
    "hot_path": Kind("no waiting of the host; peak memory", 60),
    "providers": Kind("every provider with every kernel, against attention in float64", 180),
    "inference": Kind("prefill and decode", 60),
    "ring_trace": Kind("the host, and NCCL's kernels, in a ring", 90, measures=True),
    "waiting": Kind("time spent waiting for NCCL", 60, measures=True),
    "performance": Kind("speed", 300, measures=True),
    "tune": Kind("block sizes", 480, measures=True),
}
"""In the order in which ``check.sh`` runs them."""
WITHHELD = "something is wrong, and then no timing is reported"
MOST_SHOWN = 40
"""Failures, or cases not run for the same reason."""
Json = dict[str, Any]


def finish(folder: Path, asked: list[str]) -> int:
    """Join the step files and write the page; 1 if anything is wrong."""
    steps = _steps(folder)
    for name in asked:
        if not (folder / f"{name}.json").exists():  # what an earlier call had of it no longer counts
            steps[name] = _empty(name, finished=False, error="it left nothing")
    found = {"steps": {name: steps[name] for name in STEPS if name in steps}}
    found["asked"] = list(found["steps"])
    (folder / "check.json").write_text(json.dumps(found, separators=(",", ":")))
    (folder / "page.md").write_text(page(found))
    for name in STEPS:
        (folder / f"{name}.json").unlink(missing_ok=True)
    print(summary(found))
    return 1 if failures(found) else 0


def withhold(folder: Path, name: str) -> int:
    """1 if a measuring step must not run; its file then has the reason."""
    wrong = failures({"steps": _steps(folder)})
    if not wrong:
        return 0
    reason = f"{WITHHELD}: {len(wrong)} wrong, the first of them {wrong[0][0]}"
    step = _empty(name, not_run=[{"name": _titled(name), "reason": reason}])
    (folder / f"{name}.json").write_text(json.dumps(step))
    print(f"{name}: {reason}")
    return 1


def _empty(name: str, **had: Any) -> Json:
    nothing = {"finished": True, "error": "", "seconds": 0.0, "checks": [], "figures": [], "not_run": []}
    return {"step": name} | nothing | had


def _titled(name: str) -> str:
    return f"{name} ({STEPS[name].title})"


def _steps(folder: Path) -> dict[str, Json]:
    """All results so far; those of this call are in step files."""
    file = folder / "check.json"
    found = json.loads(file.read_text())["steps"] if file.exists() else {}
    files = {name: folder / f"{name}.json" for name in STEPS}
    return found | {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def failures(found: Json) -> list[tuple[str, str]]:
    """What is wrong, and how."""
    wrong = []
    for name, step in found["steps"].items():
        if not step["finished"] and not STEPS[name].measures:
            wrong.append((f"step {name}", _end(step)))
        wrong += [(f"{c['group']}: {c['name']}", _how(c["detail"])) for c in step["checks"] if not c["ok"]]
    return wrong


def page(found: Json) -> str:
    """Markdown."""
    found, here = _reported(found), found["steps"].get("environment", {})
    machine, made = here.get("machine", {}), here.get("made", {})
    commits = sorted({step["commit"] for step in found["steps"].values() if step.get("commit")})
    several = f" **Its steps ran on {len(commits)} commits:** {', '.join(commits)}." if len(commits) > 1 else ""
    introduction = (
        f"Written by `ci/gpu/check.sh` on {made.get('date', 'an unknown date')}, at commit "
        f"{made.get('commit', 'not known')}, from the JSON file of the same name. Ratios are medians of calls that "
        f"took turns in one run. Targets are those of the project; a figure that misses one is no error.{several}"
    )
    facts = [(name, _words(value)) for name, value in (machine | here.get("versions", {})).items()]
    parts = [f"# {machine.get('name', 'Unknown machine')}", introduction, _result(failures(found))]
    parts += ["## Machine and versions", _table(("", ""), facts), "## Correctness", _checks(found)]
    for name, step in found["steps"].items():
        if step["figures"]:
            parts += [f"## Measured: {STEPS[name].title}", *_figures(step["figures"])]
    parts += ["## Not measured", _not_run(found)]
    return "\n\n".join(parts) + "\n"


def summary(found: Json) -> str:
    """The end of the output: the steps, the figures with a target, and what is wrong."""
    found = _reported(found)
    heads = ("step", "seconds", "checks", "wrong", "figures", "met", "missed", "not run")
    lines = ["{:12} {:>8} {:>7} {:>6} {:>8} {:>5} {:>7} {:>8}".format(*heads)]
    targets = []
    for name, step in found["steps"].items():
        wrong = sum(not check["ok"] for check in step["checks"])
        met = [_met(figure) for figure in step["figures"]]
        counts = (len(step["checks"]), wrong, len(met), met.count("met"), met.count("missed"), len(step["not_run"]))
        lines.append("{:12} {:8.1f} {:7} {:6} {:8} {:5} {:7} {:8}".format(name, step["seconds"], *counts))
        targets += [figure for figure in step["figures"] if figure["wanted"]]
    lines += [f"{f['group']}: {f['name']}: {f['value']:.3f} wanted {_wanted(f)}: {_met(f)}" for f in targets]
    wrong = failures(found)
    lines += [f"WRONG {name}: {how}" for name, how in wrong[:MOST_SHOWN]]
    lines.append(f"FAIL: {len(wrong)} wrong" if wrong else "PASS: nothing is wrong")
    return "\n".join(lines)


def _reported(found: Json) -> Json:
    """The results without figures of measuring steps, if anything is wrong."""
    steps = dict(found["steps"])
    for name in steps if failures(found) else ():
        if STEPS[name].measures and steps[name]["figures"]:
            steps[name] = steps[name] | {"figures": [], "not_run": [{"name": _titled(name), "reason": WITHHELD}]}
    return found | {"steps": steps}


def _result(wrong: list[tuple[str, str]]) -> str:
    if not wrong:
        return "**Nothing is wrong.**"
    more = f"\n\nand {len(wrong) - MOST_SHOWN} more" if len(wrong) > MOST_SHOWN else ""
    rows = [(f"`{name}`", how) for name, how in wrong[:MOST_SHOWN]]
    return f"**{len(wrong)} wrong:**\n\n" + _table(("what", "how"), rows) + more


def _checks(found: Json) -> str:
    rows = []
    for step in found["steps"].values():
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
            (f["name"], f"{f['value']:.3g}", _wanted(f), _met(f), *(_words(f["detail"].get(d, "")) for d in details))
            for f in rows
        ]
        parts += [f"### {group[0].upper()}{group[1:]}", _table(("", "measured", "wanted", "", *details), table)]
    return parts


def _not_run(found: Json) -> str:
    by_reason: dict[str, dict[str, None]] = {}
    for name in STEPS:
        step = found["steps"].get(name)
        if step is None:
            by_reason.setdefault("the step was not requested", {})[_titled(name)] = None
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
    found: dict[str, list[Json]] = {}
    for row in rows:
        found.setdefault(row["group"], []).append(row)
    return found


def _wanted(figure: Json) -> str:
    if not figure["wanted"]:
        return ""
    sign, number = figure["wanted"]
    return f"{'at least' if sign == '>=' else 'at most'} {number:g}"


def _met(figure: Json) -> str:
    if not figure["wanted"]:
        return ""
    sign, number = figure["wanted"]
    return "met" if (figure["value"] >= number if sign == ">=" else figure["value"] <= number) else "missed"


def _share(detail: Json) -> float:
    error, limit = detail.get("error", 0.0), detail.get("limit", 0.0)
    return error / limit if isinstance(error, float) and isinstance(limit, float) and limit else 0.0


def _end(step: Json) -> str:
    return step["error"] or "it was stopped, by its time limit or by a crash: see check.log"


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
    found = json.loads(check.read_text())
    name = re.sub(r"[^a-z0-9]+", "-", found["steps"]["environment"]["machine"]["name"].lower()).strip("-")
    docs.mkdir(parents=True, exist_ok=True)
    (docs / f"{name}.json").write_text(check.read_text())
    (docs / f"{name}.md").write_text(page(found))
    print(docs / f"{name}.md")


def main(arguments: list[str]) -> int:
    match arguments:
        case ["steps"]:
            for name, kind in STEPS.items():
                print(name, kind.seconds, "measures" if kind.measures else "checks")
            return 0
        case ["finish", folder, steps]:
            return finish(Path(folder), steps.split())
        case ["withhold", folder, step]:
            return withhold(Path(folder), step)
        case ["page", check, docs]:
            publish(Path(check), Path(docs))
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
