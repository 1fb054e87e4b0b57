"""Does the plugin start, and train, on the commits of a Megatron-LM clone?

    ci/megatron/replay.py --repo DIRECTORY --since 2026-03-01 --every 22 [--train] [--out out/replay.json]
    ci/megatron/replay.py --repo DIRECTORY COMMIT... [--train]

Each commit is unpacked into a temporary folder. There the models of ``CASES`` run on forked CPU ranks, each in a
process of its own whose path has this Megatron first: to the end of the first step, or with --train, where it is two
steps compared with one rank, in full. The JSON file is written after each commit; commits that are in it are skipped,
so that a run can be continued.
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
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cp_plugin.engine.common.versions import MEGATRON_RANGE, megatron_supported

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("megatron", ":(glob)*.py")
"""Of a commit, what is unpacked: the package, and the scripts beside it."""
VERSION = "megatron/core/package_info.py"
HELPER = "megatron/core/datasets/helpers_cpp*.so"
"""The compiled dataset helper; a tree without one compiles it at its first start."""
MORE = "--micro-batch-size 1 --global-batch-size 2 --clip-grad 1e9 --calculate-per-token-loss --cp-device cpu"
"""Flags beside the model, data and optimizer of ``tests/training.py``."""
STATES = (
    "--mamba-state-dim 8 --mamba-head-dim 16 --mamba-num-heads 4 --mamba-num-groups 2 "
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 16 --linear-num-key-heads 4 "
    "--linear-num-value-heads 4"
)
STACK = f"--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec {STATES} --hybrid-layer-pattern"
DIVIDED = "--context-parallel-size 2 --cp-provider striped"
TIMEOUT_S = 300.0
"""Of a training run; a case has three times as long."""
ENDS = {
    "refused": r"cp_plugin\.|ValueError: .*(cp_plugin|--cp-)",
    "lacks": "ModuleNotFoundError: No module named '(?!megatron|cp_)|ValueError: .*, which is not installed",
}
"""State -> how the last exception begins."""
Result = dict[str, Any]
"""What became of a case on one commit. ``state``: passed; refused: by a message of the plugin; differs: from one rank;
lacks: a package that this Megatron imports; alone: fails on one rank without a provider, or as Megatron imports its own
modules; failed: by anything else. ``message``, ``seconds``; of a training the ``losses`` with context parallelism, and
the largest relative differences of ``loss``, ``norm`` and ``gradient``."""
Entry = dict[str, Any]
"""One commit: see ``examine``; and its ``name`` as given, HEAD for those of ``--since``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tiny model and the script that trains it."""

    flags: str = ""
    script: str = "pretrain_gpt.py"
    """In the tree."""
    holds: tuple[str, str] = ("pretrain_gpt.py", "")
    """(file, text): a tree has the model if this file of it contains this text."""
    trained: bool = False

    def known_to(self, tree: Path) -> bool:
        file, text = self.holds
        return (tree / self.script).is_file() and (tree / file).is_file() and text in (tree / file).read_text("utf-8")


HYBRID = {"script": "pretrain_hybrid.py", "trained": True}
CASES = {
    "gpt": Case(),
    "packed": Case(
        flags="--dataloader-inter-document-masking",
        holds=("pretrain_gpt.py", "dataloader_inter_document_masking"),  # since 0.19
        trained=True,
    ),
    "moe": Case(flags="--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none"),
    "hybrid": Case(
        flags=f"{STACK} M*-", holds=("megatron/core/models/hybrid/hybrid_model.py", "class HybridModel"), **HYBRID
    ),
    "delta net": Case(
        flags=f"{STACK} MG*-", holds=("megatron/core/models/hybrid/hybrid_block.py", "gdn_layer"), **HYBRID
    ),
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", metavar="COMMIT")
    parser.add_argument("--repo", type=Path, required=True, help="a local clone of Megatron-LM, bare or not")
    parser.add_argument("--since", metavar="DATE", help="first-parent commits of HEAD from this date on")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th of them (default: all)")
    parser.add_argument("--train", action="store_true", help="also train two steps, and compare them with one rank")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "replay.json", help="default: out/replay.json")
    args = parser.parse_args(argv)
    if bool(args.since) == bool(args.commits):
        parser.error("give --since DATE, or names of commits, and not both")
    commits = chosen(args.repo, args.since, args.every, args.commits)
    known: dict[str, Entry] = json.loads(args.out.read_text())["commits"] if args.out.exists() else {}
    kinds = ("start", "train") if args.train else ("start",)
    left = [commit for commit in commits if not known.get(commit, {}).keys() >= {*kinds}]
    print(f"{len(commits)} commits, {len(commits) - len(left)} of them in {args.out}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for number, commit in enumerate(left, 1):
        entry = known[commit] = known.get(commit, {}) | {"name": commits[commit]} | examine(args.repo, commit, kinds)
        part = args.out.with_name(f"{args.out.name}.part")
        part.write_text(json.dumps({"commits": known}, indent=1) + "\n")
        part.replace(args.out)
        states = [f"{kind} {name}: {shown(result)}" for kind in kinds for name, result in entry[kind].items()]
        print(
            f"[{number}/{len(left)}] {commit[:10]} {entry['date']} {entry['version']}: {', '.join(states)}", flush=True
        )
    print("\n" + summary({commit: known[commit] for commit in commits}, kinds))
    return 0


def chosen(repo: Path, since: str | None, every: int, commits: Sequence[str]) -> dict[str, str]:
    """Hash of each commit -> how it was named: these, or every ``every``-th first-parent commit of HEAD from a date on,
    oldest first, the newest included."""
    if since is None:
        return {git(repo, "rev-parse", "--verify", f"{name}^{{commit}}").strip(): name for name in commits}
    listed = git(repo, "log", "--first-parent", f"--since={since}", "--format=%H", "HEAD")
    return dict.fromkeys(listed.split()[::every][::-1], "HEAD")


def git(repo: Path, *words: str) -> str:
    """Return what git prints; its error ends the program."""
    done = subprocess.run(["git", "-C", str(repo), *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"replay.py: {done.stderr.strip()}")
    return done.stdout


def examine(repo: Path, commit: str, kinds: Sequence[str]) -> Entry:
    """What a commit is, and what the plugin does on it.

    Returns:
        version, date, subject; broken: symbols whose contract does not hold -> why; start and train: case ->
        ``Result``, for the models that the commit has; none for a version outside the supported range.
    """
    date, _, subject = git(repo, "show", "-s", "--format=%cs %s", commit).strip().partition(" ")
    installed = find_spec("megatron.core")
    helpers = Path(str(installed.origin)).parents[2].glob(HELPER) if installed else ()
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        tree = Path(folder)
        archive = ["git", "-C", str(repo), "archive", commit, "--", *PARTS]
        packed = subprocess.run(archive, stdout=subprocess.PIPE, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(folder, filter="data")
        for helper in helpers:
            shutil.copy(helper, tree / "megatron" / "core" / "datasets")
        entry: Entry = {"version": version_of(tree), "date": date, "subject": subject, **{kind: {} for kind in kinds}}
        for name, case in CASES.items() if megatron_supported(entry["version"]) else ():
            if not case.known_to(tree):
                continue
            kind = "train" if "train" in kinds and case.trained else "start"
            result = entry[kind][name] = run(tree, name, kind)
            if kind == "train":
                starts = result["state"] in ("passed", "differs")
                entry["start"][name] = {"state": "passed", "message": ""} if starts else result
        entry["broken"] = run(tree).get("broken", {})
    return entry


def run(tree: Path, *case: str) -> Result:
    """Run one case, of a name and a kind, in a process of its own; none: ``broken_contracts``."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__)), "process", str(tree), *case]
    paths = filter(None, map(str, (tree, ROOT, ROOT / "kernels", os.environ.get("PYTHONPATH", ""))))
    world = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    try:
        ended = subprocess.run(
            command, env=world, capture_output=True, text=True, errors="replace", timeout=3 * TIMEOUT_S
        )
        printed, failure = (text.strip().splitlines() or [""] for text in (ended.stdout, ended.stderr))
        result = {"state": "failed", "message": failure[-1] or f"exit status {ended.returncode}"}
        result = json.loads(printed[-1]) if printed[-1].startswith("{") else result
    except subprocess.TimeoutExpired:
        result = {"state": "failed", "message": f"no result after {3 * TIMEOUT_S:.0f} s"}
    return result | {"seconds": round(time.monotonic() - begin, 3)}


def broken_contracts() -> dict[str, str]:
    """Find the symbols that a run would need otherwise, and why; in this process, which has imported no Megatron yet.

    Raises ValueError for an unsupported version, and if contracts of CPU mode do not hold.
    """
    from cp_plugin.megatron.cpu import mode as cpu

    cpu.activate()
    from cp_plugin.megatron.patches.hooks import OF_RUN, START_UP
    from cp_plugin.megatron.patches.patching import examine

    return {patch.target: why for patch in (*START_UP, *OF_RUN) if (why := examine(patch).broken)}


def version_of(tree: Path) -> str:
    """Read the version of a tree."""
    text = (tree / VERSION).read_text(encoding="utf-8")
    values = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?(\w*)['\"]?$", text, re.MULTILINE))
    return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values['PRE_RELEASE']}"


def shown(result: Result) -> str:
    if result["state"] == "passed" and "loss" in result:
        return f"{max(result['loss'], result['norm']):.0e}"
    return result["state"]


def summary(known: dict[str, Entry], kinds: Sequence[str]) -> str:
    """How many commits start and train, and each message with the commits and cases that it ended."""
    supported = sum(megatron_supported(entry["version"]) for entry in known.values())
    lines = [f"{supported} of {len(known)} commits are of megatron-core{MEGATRON_RANGE}"]
    messages: dict[str, dict[str, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
    for kind in kinds:
        title, what = ("{}", "start") if kind == "start" else ("{}, trained", "as one rank")
        for name in CASES:
            results = {commit: entry[kind][name] for commit, entry in known.items() if name in entry[kind]}
            failed = {commit: result for commit, result in results.items() if result["state"] != "passed"}
            if results:
                lines.append(f"{title.format(name)}: {len(results) - len(failed)} of {len(results)} {what}")
            for commit, result in failed.items():
                messages[result["message"]][commit[:10]][name] = None
    for message, commits in messages.items():
        lines += ["", message, *(f"    {commit} ({', '.join(names)})" for commit, names in commits.items())]
    return "\n".join(lines)


def train_case(tree: Path, name: str, kind: str) -> Result:
    """Start or train a case in this process, which has imported no Megatron yet."""
    from cp_plugin.testing.launch import RankError

    flags = CASES[name].flags
    os.environ["CP_PLUGIN_TEST_SCRIPT"] = str(tree / CASES[name].script)  # read by ``training``
    try:
        from cp_plugin.megatron import activate

        activate(["--cp-device", "cpu"])
        import torch._dynamo  # noqa: F401  (every rank's first step would import it)
    except Exception as error:
        got = ended_by(f"{type(error).__name__}: {error}")
        inside = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(f"{tree.resolve()}{os.sep}")
        own = got["state"] == "failed" and isinstance(error, ImportError) and inside
        return got | ({"state": "alone"} if own else {})
    from training import GRADIENT, LOSS, SGD, SHORT, gap, train

    def ranks(number: int, flags: str) -> list[Any] | Result:
        steps = {"start": 1, "train": 2}[kind]
        try:
            return train(number, flags, steps=steps, training=f"{SGD} {MORE}", documents=SHORT, timeout=TIMEOUT_S)
        except RankError as error:
            return ended_by(error.traceback)
        except AssertionError as error:  # a rank left early
            return {"state": "failed", "message": str(error)}

    got = ranks(2, f"{flags} {DIVIDED}")
    if isinstance(got, dict):
        alone = got["state"] == "failed" and isinstance(ranks(1, flags), dict)
        return got | ({"state": "alone"} if alone else {})
    if kind == "start":
        return {"state": "passed", "message": ""}
    want = ranks(1, flags)
    if isinstance(want, dict):
        return want
    try:
        off = gap(got, want)
    except ValueError as error:
        return {"state": "differs", "message": str(error)}
    numbers = {"losses": next(one.losses for one in got if one.losses), "loss": off.loss, "norm": off.norm}
    if off.loss <= LOSS and off.norm <= LOSS and off.grad <= GRADIENT:
        return {"state": "passed", "message": "", **numbers, "gradient": off.grad}
    message = f"beyond {LOSS:.0e} (loss, gradient norm) or {GRADIENT:.0e} ({off.where})"
    return {"state": "differs", "message": message, **numbers, "gradient": off.grad}


def ended_by(report: str) -> Result:
    """What a report that ends with an exception, as a traceback does, says of a case."""
    errors = list(re.finditer(r"^[\w.]+(?:Error|Exception): ", report, re.MULTILINE))
    message = report[errors[-1].start() :].rstrip() if errors else report.strip()
    state = next((state for state, pattern in ENDS.items() if re.match(pattern, message, re.DOTALL)), "failed")
    return {"state": state, "message": message.removeprefix("ValueError: ")}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["process", _]:
            print(json.dumps({"broken": broken_contracts()}), flush=True)
        case ["process", tree, name, kind]:
            print(json.dumps(train_case(Path(tree), name, kind)), flush=True)
        case argv:
            raise SystemExit(main(argv))
