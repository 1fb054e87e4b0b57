"""Does the plugin start, and train, on the commits of a Megatron-LM clone?

    ci/megatron/replay.py --repo DIRECTORY --since 2026-03-01 --every 22 [--train] [--out out/replay.json]
    ci/megatron/replay.py --repo DIRECTORY COMMIT... [--train]

Each commit is unpacked into a temporary folder. There the cases of ``replay_case`` run on forked CPU ranks, each in a
process of its own: to the end of the first step, or with --train, where it is two steps compared with one rank, in
full. The JSON file is written after each commit; commits that are in it are skipped, so that a run can be continued.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import replay_case
from replay_case import CASES, ROOT

from cp_plugin.engine.common.versions import MEGATRON_RANGE, megatron_supported

PARTS = ("megatron", ":(glob)*.py")
"""Of a commit, what is unpacked: the package, and the scripts beside it."""
VERSION = "megatron/core/package_info.py"
HELPER = "megatron/core/datasets/helpers_cpp*.so"
TIMEOUT_S = 3 * replay_case.TIMEOUT_S
Entry = dict[str, Any]
"""One commit: see ``examine``; and its ``name`` as given, HEAD for those of ``--since``."""


def main(argv: Sequence[str]) -> int:
    try:
        given = _parser().parse_args(argv)
        commits = chosen(given.repo, given.since, given.every, given.commits)
        known = read(given.out)
        helper = compiled_helper()
    except ValueError as error:
        print(f"replay.py: {error}", file=sys.stderr)
        return 2
    kinds = ("start", "train") if given.train else ("start",)
    left = [commit for commit in commits if not done(known.get(commit, {}), kinds)]
    print(f"{len(commits)} commits, {len(commits) - len(left)} of them in {given.out}", flush=True)
    writing = threading.Lock()

    def work(commit: str) -> None:
        entry = examine(given.repo, commit, kinds, helper)
        with writing:
            known[commit] = known.get(commit, {}) | {"name": commits[commit]} | entry
            write(given.out, known)
            print(f"[{sum(done(known.get(c, {}), kinds) for c in left)}/{len(left)}] {line(commit, entry)}", flush=True)

    with ThreadPoolExecutor(given.jobs) as pool:
        try:
            for future in [pool.submit(work, commit) for commit in left]:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    print("\n" + table({commit: known[commit] for commit in commits}, kinds))
    return 0


def chosen(repo: Path, since: str | None, every: int, commits: Sequence[str]) -> dict[str, str]:
    """Hash of each commit -> how it was named, oldest first.

    Args:
        since: every ``every``-th first-parent commit of HEAD from this date on, the newest included.
        commits: or these.

    Raises:
        ValueError: for a folder without a repository, an unknown commit, and none or both of the two.
    """
    if git(repo, "rev-parse", "--git-dir").returncode:
        raise ValueError(f"--repo {repo}: no git repository: give a clone of Megatron-LM, bare or not")
    if (since is None) == (not commits):
        raise ValueError("give --since DATE, or names of commits, and not both")
    if since is not None:
        listed = git(repo, "log", "--first-parent", f"--since={since}", "--format=%H", "HEAD")
        names = dict.fromkeys(listed.stdout.split()[::every][::-1], "HEAD")
        if not names:
            raise ValueError(f"--since {since}: no commit of {repo} is that new; write a date such as 2026-03-01")
    else:
        dated: list[tuple[int, str, str]] = []
        for name in commits:
            shown = git(repo, "show", "-s", "--format=%H %ct", f"{name}^{{commit}}")
            if shown.returncode:
                raise ValueError(f"{name}: {repo} has no such commit; fetch it first")
            commit, date = shown.stdout.split()
            dated.append((int(date), commit, name))
        names = {}
        for _, commit, name in sorted(dated, key=lambda one: one[0]):
            names.setdefault(commit, name)
    for commit in names:
        if git(repo, "cat-file", "-e", f"{commit}:{VERSION}").returncode:
            raise ValueError(f"{commit[:10]} has no {VERSION}: it is not of Megatron-LM, or too old")
    return names


def examine(repo: Path, commit: str, kinds: Sequence[str], helper: Path | None) -> Entry:
    """What a commit is, and what the plugin does on it.

    Returns:
        version, date, subject; broken: symbols whose contract does not hold -> why;
        start and train: case -> ``replay_case.Result``, for the models that the commit has; none for a version
        outside the supported range.
    """
    date, _, subject = git(repo, "show", "-s", "--format=%cs %s", commit).stdout.strip().partition(" ")
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        tree = Path(folder)
        unpack(repo, commit, tree)
        if helper is not None:
            shutil.copy(helper, tree / "megatron" / "core" / "datasets")
        entry: Entry = {"version": version_of(tree), "date": date, "subject": subject}
        here = [name for name, case in CASES.items() if case.known_to(tree) and megatron_supported(entry["version"])]
        trained = {name: run(tree, name, "train") for name in here if "train" in kinds and CASES[name].trained}
        entry["start"] = {
            name: started(trained[name]) if name in trained else run(tree, name, "start") for name in here
        }
        if "train" in kinds:
            entry["train"] = trained
        found = contracts(tree)
    entry["broken"] = {row["symbol"]: row["broken"] for row in found if row["state"] == "broken"}
    return entry


def unpack(repo: Path, commit: str, folder: Path) -> None:
    archive = subprocess.run(
        ["git", "-C", str(repo), "archive", commit, "--", *PARTS], stdout=subprocess.PIPE, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")


def git(repo: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(repo), *words], capture_output=True, text=True)


def run(tree: Path, name: str, kind: str) -> Entry:
    """The result of one case, in a process that has this tree's Megatron first in its path."""
    command = [sys.executable, "-W", "ignore", str(Path(replay_case.__file__)), str(tree), name, kind]
    begin = time.monotonic()
    try:
        ended = subprocess.run(
            command, env=environment(tree), capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
        found = last_json(ended.stdout) or {
            "state": "failed",
            "message": (ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[-1],
        }
    except subprocess.TimeoutExpired:
        found = {"state": "failed", "message": f"no result after {TIMEOUT_S:.0f} s"}
    return found | {"seconds": round(time.monotonic() - begin, 3)}


def started(trained: Entry) -> Entry:
    """The result of a start, of that of a training."""
    return {"state": "passed", "message": ""} if trained["state"] in ("passed", "differs") else trained


def contracts(tree: Path) -> list[Entry]:
    """What ``cp-plugin doctor --megatron`` finds of every symbol in this tree."""
    command = [sys.executable, "-m", "cp_plugin.tools", "doctor", "--megatron", str(tree), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        return [{"symbol": "", "state": "unsupported", "broken": done.stderr.strip().removeprefix("error: ")}]
    return list(json.loads(done.stdout)["symbols"])


def environment(tree: Path) -> dict[str, str]:
    paths = (tree, ROOT, ROOT / "kernels", os.environ.get("PYTHONPATH", ""))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
        "OMP_NUM_THREADS": "1",
    }


def last_json(output: str) -> Entry | None:
    lines = output.strip().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None


def version_of(tree: Path) -> str:
    """What the tree calls itself."""
    text = (tree / VERSION).read_text(encoding="utf-8")
    values = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?(\w*)['\"]?$", text, re.MULTILINE))
    return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values['PRE_RELEASE']}"


def compiled_helper() -> Path | None:
    """The installed Megatron's compiled dataset helper; a tree without one compiles it at its first start."""
    spec = find_spec("megatron.core")
    found = list(Path(str(spec.origin)).parents[2].glob(HELPER)) if spec and spec.origin else []
    return found[0] if found else None


def done(entry: Entry, kinds: Sequence[str]) -> bool:
    return all(kind in entry for kind in kinds)


def read(file: Path) -> dict[str, Entry]:
    """Commit -> entry; ValueError for a file of something else."""
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["commits"]
        return dict(found.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"--out {file}: not a file of this program; give another name") from None


def write(file: Path, known: dict[str, Entry]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps({"commits": known}, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def line(commit: str, entry: Entry) -> str:
    """One commit as a line of the progress."""
    states = [f"{kind} {name}: {_cell(result)}" for kind in ("start", "train") for name, result in _of(entry, kind)]
    return f"{commit[:10]} {entry['date']} {entry['version']}: {', '.join(states)}"


def _of(entry: Entry, kind: str) -> list[tuple[str, Entry]]:
    return list(entry.get(kind, {}).items())


def _cell(result: Entry | None) -> str:
    if result is None:
        return "-"
    if result["state"] == "passed" and result.get("loss") is not None:
        return f"{max(result['loss'], result['norm']):.0e}"
    return "yes" if result["state"] == "passed" else result["state"]


def table(known: dict[str, Entry], kinds: Sequence[str]) -> str:
    """All commits, how many of them start and train, and each message with the commits and cases that it ended."""
    columns = [(kind, name) for kind in kinds for name, case in CASES.items() if kind == "start" or case.trained]
    titles = [name if kind == "start" else f"{name}, trained" for kind, name in columns]
    rows = [["commit", "date", "version", *titles, "broken"]]
    messages: dict[str, dict[str, list[str]]] = {}
    for commit, entry in known.items():
        broken = len(entry["broken"])
        cells = [_cell(entry[kind].get(name)) for kind, name in columns]
        rows.append([commit[:10], entry["date"], entry["version"], *cells, str(broken)])
        for kind, name in columns:
            result = entry[kind].get(name)
            if result is not None and result["state"] != "passed":
                cases = messages.setdefault(result["message"], {}).setdefault(commit[:10], [])
                cases += [name] if name not in cases else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    outside = sum(not megatron_supported(entry["version"]) for entry in known.values())
    lines += ["", f"{len(known) - outside} of {len(known)} commits are of megatron-core{MEGATRON_RANGE}"]
    for (kind, name), title in zip(columns, titles, strict=True):
        states = [entry[kind][name]["state"] for entry in known.values() if name in entry[kind]]
        done = "start" if kind == "start" else "as one rank"
        lines.append(f"{title}: {states.count('passed')} of {len(states)} {done}")
    for message, commits in messages.items():
        lines += ["", message, *(f"    {commit} ({', '.join(cases)})" for commit, cases in commits.items())]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", metavar="COMMIT")
    parser.add_argument("--repo", type=Path, required=True, help="a local clone of Megatron-LM, bare or not")
    parser.add_argument("--since", metavar="DATE", help="first-parent commits of HEAD from this date on")
    parser.add_argument("--every", type=_positive, default=1, metavar="N", help="every N-th of them (default: all)")
    parser.add_argument("--train", action="store_true", help="also train two steps, and compare them with one rank")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "replay.json", help="default: out/replay.json")
    parser.add_argument("--jobs", type=_positive, default=1, metavar="N", help="commits at a time")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
