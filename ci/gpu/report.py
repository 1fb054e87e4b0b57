"""From what the steps wrote down to one file, and to a page.

    report.py steps                 every step: name, seconds, and "measures" or "checks"
    report.py finish FOLDER STEPS   step files -> FOLDER/check.json and FOLDER/page.md; status 1 if anything is wrong
    report.py withhold FOLDER STEP  status 1, and a step file that says why, if STEP measures what is not right
    report.py page CHECK.json DOCS  check.json -> DOCS/<GPU>.json and DOCS/<GPU>.md

Steps of an earlier call are in FOLDER/check.json, or in their own files, where that call was stopped.

A page says nothing that is not in the file.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """What a step is."""

    title: str
    seconds: int
    """After which it begins nothing more, less than ten minutes; ten seconds later it is stopped."""
    measures: bool = False
    """It says nothing of right and wrong: where it ends early the rest is not measured, and where anything is wrong
    nothing of it is reported."""


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
    "waiting": Kind("time that NCCL is waited for", 60, measures=True),
    "performance": Kind("speed", 300, measures=True),
    "tune": Kind("block sizes", 480, measures=True),
}
"""In their order; ``check.sh`` runs them."""
WITHHELD = "something is wrong, and then no timing is reported"
MOST_SHOWN = 40
"""Of what is wrong, or has not been run, for one reason."""


def finish(folder: Path, asked: list[str]) -> int:
    """One file instead of one for each step, and the page; 1 if anything is wrong."""
    found = _left(folder)
    for name in asked:
        if not (folder / f"{name}.json").exists():  # nor does what an earlier call had of it stand any more
            nothing = {"step": name, "finished": False, "error": "it left nothing", "seconds": 0.0}
            found["steps"][name] = nothing | {"checks": [], "figures": [], "not_run": []}
    found["asked"] = [name for name in STEPS if name in found["steps"]]
    found["steps"] = {name: found["steps"][name] for name in found["asked"]}
    text = json.dumps(found, separators=(",", ":"))
    (folder / "check.json").write_text(text)
    found = json.loads(text)
    (folder / "page.md").write_text(page(found))
    for name in STEPS:
        (folder / f"{name}.json").unlink(missing_ok=True)
    print(summary(found))
    return 1 if failures(found) else 0


def withhold(folder: Path, name: str) -> int:
    """1 if a step that measures must not run, which its file then says."""
    wrong = failures(_left(folder))
    if not wrong:
        return 0
    reason = f"{WITHHELD}: {len(wrong)} wrong, the first of them {wrong[0][0]}"
    row = {"name": f"{name} ({STEPS[name].title})", "reason": reason}
    nothing = {"step": name, "finished": True, "error": "", "seconds": 0.0, "checks": [], "figures": []}
    (folder / f"{name}.json").write_text(json.dumps(nothing | {"not_run": [row]}))
    print(f"{name}: {reason}")
    return 1


def _left(folder: Path) -> dict[str, Any]:
    """What there is of all steps; those of this call are in files of their own."""
    file = folder / "check.json"
    found = json.loads(file.read_text()) if file.exists() else {"steps": {}}
    for name in STEPS:
        if (folder / f"{name}.json").exists():
            found["steps"][name] = json.loads((folder / f"{name}.json").read_text())
    return found


def failures(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What is wrong, and how."""
    wrong = []
    for step in found["steps"].values():
        if not step["finished"] and not STEPS[step["step"]].measures:
            wrong.append((f"step {step['step']}", _end(step)))
        for check in step["checks"]:
            if not check["ok"]:
                wrong.append((f"{check['group']}: {check['name']}", _how(check["detail"])))
    return wrong


def page(found: dict[str, Any]) -> str:
    """Markdown."""
    found, here = _reported(found), found["steps"].get("environment", {})
    machine, made = here.get("machine", {}), here.get("made", {})
    parts = [f"# {machine.get('name', 'Unknown machine')}", _introduction(made, found), _result(found)]
    parts += ["## Machine and versions", _table(("", ""), [(k, _words(v)) for k, v in _facts(here).items()])]
    parts += ["## Correctness", _checks(found)]
    for step in found["steps"].values():
        if step["figures"]:
            parts += [f"## Measured: {STEPS[step['step']].title}", *_figures(step["figures"])]
    parts += ["## Not measured", _not_run(found)]
    return "\n\n".join(parts) + "\n"


def summary(found: dict[str, Any]) -> str:
    """The end of the output: a table of the steps, the figures that have a target, and what is wrong."""
    found = _reported(found)
    lines = [
        f"{'step':12} {'seconds':>8} {'checks':>7} {'wrong':>6} {'figures':>8} {'met':>5} {'missed':>7} {'not run':>8}"
    ]
    for name, step in found["steps"].items():
        wrong = sum(not check["ok"] for check in step["checks"])
        met = [_met(figure) for figure in step["figures"]]
        counts = (len(step["checks"]), wrong, len(met), met.count("met"), met.count("missed"), len(step["not_run"]))
        lines.append("{:12} {:8.1f} {:7} {:6} {:8} {:5} {:7} {:8}".format(name, step["seconds"], *counts))
    targets = [figure for step in found["steps"].values() for figure in step["figures"] if figure["wanted"]]
    for figure in targets:
        number = f"{figure['value']:.3f} wanted {_wanted(figure)}: {_met(figure)}"
        lines.append(f"{figure['group']}: {figure['name']}: {number}")
    wrong = failures(found)
    lines += [f"WRONG {name}: {how}" for name, how in wrong[:MOST_SHOWN]]
    lines.append(f"FAIL: {len(wrong)} wrong" if wrong else "PASS: nothing is wrong")
    return "\n".join(lines)


def _reported(found: dict[str, Any]) -> dict[str, Any]:
    """The same without figures of speed, if anything is wrong."""
    steps = dict(found["steps"])
    for name in steps if failures(found) else ():
        if STEPS[name].measures and steps[name]["figures"]:
            row = {"name": f"{name} ({STEPS[name].title})", "reason": WITHHELD}
            steps[name] = steps[name] | {"figures": [], "not_run": [row]}
    return found | {"steps": steps}


def _introduction(made: dict[str, str], found: dict[str, Any]) -> str:
    commits = {step["commit"] for step in found["steps"].values() if step.get("commit")}
    several = f" **Its steps ran on {len(commits)} commits:** {', '.join(sorted(commits))}." if len(commits) > 1 else ""
    return (
        f"Written by `ci/gpu/check.sh` on {made.get('date', 'an unknown date')}, at commit "
        f"{made.get('commit', 'not known')}, from the JSON file of the same name. Ratios are medians of calls that "
        f"took turns in one run. Targets are those of the project; a figure that misses one is no error.{several}"
    )


def _result(found: dict[str, Any]) -> str:
    wrong = failures(found)
    if not wrong:
        return "**Nothing is wrong.**"
    rows = [(f"`{name}`", how) for name, how in wrong[:MOST_SHOWN]]
    more = f"\n\nand {len(wrong) - MOST_SHOWN} more" if len(wrong) > MOST_SHOWN else ""
    return f"**{len(wrong)} wrong:**\n\n" + _table(("what", "how"), rows) + more


def _facts(here: dict[str, Any]) -> dict[str, Any]:
    return {**here.get("machine", {}), **here.get("versions", {})}


def _checks(found: dict[str, Any]) -> str:
    rows = []
    for step in found["steps"].values():
        for group, checks in _grouped(step["checks"]):
            right = sum(check["ok"] for check in checks)
            shares = [_share(check["detail"]) for check in checks]
            near = max(shares, default=0.0)
            rows.append((group, str(len(checks)), str(right), f"{near:.0%}" if near else ""))
    if not rows:
        return "Nothing was checked."
    note = "The last column is the largest error as a share of its limit, over out and the gradients of all cases."
    return _table(("what", "cases", "right", "error of its limit"), rows) + "\n\n" + note


def _figures(figures: list[dict[str, Any]]) -> list[str]:
    parts = []
    for group, rows in _grouped(figures):
        details = list(dict.fromkeys(name for figure in rows for name in figure["detail"]))
        table = [
            (
                figure["name"],
                f"{figure['value']:.3g}",
                _wanted(figure),
                _met(figure),
                *(_words(figure["detail"].get(name, "")) for name in details),
            )
            for figure in rows
        ]
        parts += [f"### {group[0].upper()}{group[1:]}", _table(("", "measured", "wanted", "", *details), table)]
    return parts


def _not_run(found: dict[str, Any]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name in STEPS:
        step = found["steps"].get(name)
        if step is None:
            by_reason.setdefault("the step was not asked for", []).append(f"{name} ({STEPS[name].title})")
            continue
        if not step["finished"]:
            by_reason.setdefault(_end(step), []).append(f"the rest of {name}")
        for left in step["not_run"]:
            by_reason.setdefault(left["reason"], []).append(left["name"])
    rows = []
    for reason, names in by_reason.items():
        names = list(dict.fromkeys(names))
        more = f"; and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
        rows.append(("; ".join(names[:MOST_SHOWN]) + more, reason))
    return _table(("what", "why not"), rows) if rows else "Everything was."


def _grouped(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """By group, in the order in which groups first come."""
    order = list(dict.fromkeys(row["group"] for row in rows))
    together = sorted(rows, key=lambda row: order.index(row["group"]))
    return [(group, list(of_group)) for group, of_group in groupby(together, key=lambda row: row["group"])]


def _wanted(figure: dict[str, Any]) -> str:
    if not figure["wanted"]:
        return ""
    sign, number = figure["wanted"]
    return f"{'at least' if sign == '>=' else 'at most'} {number:g}"


def _met(figure: dict[str, Any]) -> str:
    if not figure["wanted"]:
        return ""
    sign, number = figure["wanted"]
    return "met" if (figure["value"] >= number if sign == ">=" else figure["value"] <= number) else "missed"


def _share(detail: dict[str, Any]) -> float:
    error, limit = detail.get("error", 0.0), detail.get("limit", 0.0)
    return error / limit if isinstance(error, float) and isinstance(limit, float) and limit else 0.0


def _end(step: dict[str, Any]) -> str:
    return step["error"] or "it was stopped, by its time limit or by a crash: see check.log"


def _how(detail: dict[str, Any]) -> str:
    if "failure" in detail:
        return detail["failure"]
    return ", ".join(f"{name} {_words(value)}" for name, value in detail.items())


def _words(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def publish(check: Path, docs: Path) -> None:
    """The page and the file it is made from, under the name of the GPU."""
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
