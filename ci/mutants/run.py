"""Mutation tests: plant small bugs in the core, one at a time, and check that a test fails.

    ci/mutants.sh                      all mutants (mutants.toml)
    ci/mutants.sh rope-stale-cache ... these
    ci/mutants.sh --list               names, files, and the effect on a user
    ci/mutants.sh --faults             the tests that plant a fault themselves (faults.toml)
    ci/mutants.sh --baseline           first run the same tests without a bug; they must pass
    ci/mutants.sh --sample 60          60 random changes of operators, numbers and conditions, which cosmic-ray makes

A mutant is one replacement in one file. It is made in a copy of the working tree, and its tests run file by file until
one fails.

Exits with 1 if a mutant survives, if its text is not in its file exactly once, or if its tests cannot run or do not
end, which proves nothing on a busy machine. A sample always exits with 0: some random changes are no bugs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from difflib import ndiff
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PASSED, FAILED, NONE_RAN, NO_END = 0, 1, 5, -1
"""pytest's status; any other means that the tests cannot run."""
SAMPLED = ("core", "comm", "methods", "linear")
"""Folders of cp_plugin."""
NO_BUG = re.compile(r"_BitOr_|Decorator|Exception|Variable|Is_Eq|IsNot_NotEq")
"""Operators of cosmic-ray that change annotations, caches, errors, or nothing."""


class Mutant(NamedTuple):
    """One replacement."""

    name: str
    file: str
    old: str
    """Source text that occurs in the file once."""
    new: str
    why: str
    """What would go wrong for a user."""
    tests: list[str]
    """Files or tests that should notice, the likeliest first."""

    def planted_in(self, source: str) -> str:
        """The source with the bug; ValueError if the text does not occur exactly once."""
        if (found := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its text is in {self.file} {found} times, and must be there once")
        return source.replace(self.old, self.new)


class Outcome(NamedTuple):
    """The result of a mutant."""

    name: str
    verdict: str
    """killed, SURVIVED, NO END, or BROKEN: its text is missing, or its tests cannot run."""
    seconds: float
    by: str
    """The first test that failed; otherwise what was tried."""


def load() -> dict[str, Mutant]:
    """All mutants by name."""
    mutants = [Mutant(**entry) for entry in tomllib.loads((HERE / "mutants.toml").read_text())["mutant"]]
    by_name = {mutant.name: mutant for mutant in mutants}
    if len(by_name) < len(mutants):
        raise ValueError("two mutants have the same name")
    return by_name


def sampled(seed: int) -> Iterator[Mutant]:
    """Random changes of ``SAMPLED``, without end; a file is drawn by its size, then a kind of change."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    draw, kinds, seen = random.Random(seed), defaultdict[str, list[str]](list), set[str]()
    for name in sorted(name for name in operator_names() if not NO_BUG.search(name)):
        kinds[name.partition("_")[0]].append(name)
    source_of = {file: file.read_text() for each in SAMPLED for file in sorted(ROOT.glob(f"cp_plugin/{each}/*.py"))}
    while True:
        (file, source), *_ = draw.choices(list(source_of.items()), [len(text) for text in source_of.values()])
        operator = get_operator(draw.choice(kinds[draw.choice(list(kinds))]))()
        positions = sum(len([*operator.mutation_positions(node)]) for node in ast_nodes(get_ast(source)))
        new = mutate_code(source, operator, draw.randrange(positions)) if positions else None
        if new is not None and new not in seen:
            seen.add(new)
            why = " ".join(line.strip() for line in ndiff(source.split("\n"), new.split("\n")) if line[0] in "+-")
            path = file.relative_to(ROOT)
            yield Mutant(f"{path.stem}-{len(seen)}", str(path), source, new, f"{path}: {why}", tests_near(path))


def tests_near(path: Path) -> list[str]:
    """The tests named after a module, those that import it, and those of all methods."""
    module = re.compile(rf"{'.'.join(path.with_suffix('').parts)}\b|{path.parent.name} import .*\b{path.stem}\b")
    tests = [str(file.relative_to(ROOT)) for file in sorted(ROOT.glob("tests/core/test_*.py"))]
    near = sorted((test for test in tests if path.stem in test), key=len)
    near += [test for test in tests if module.search((ROOT / test).read_text())]
    return list(dict.fromkeys((*near, *(f"tests/core/test_{all_of}.py" for all_of in ("linear", "methods", "mesh")))))


def planted_faults() -> dict[str, dict[str, str]]:
    """File -> test that plants a fault -> the fault."""
    return tomllib.loads((HERE / "faults.toml").read_text())


def copy_tree(to: Path) -> Path:
    """Copy the files of the working tree that git does not ignore, and link the environment."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    if not (to / ".venv").exists():
        (to / ".venv").symlink_to(ROOT / ".venv")
    return to


def run_tests(tree: Path, tests: str, limit: float) -> tuple[int, str]:
    """pytest's status or ``NO_END``, and the first failed test or the last line of output; ``NONE_RAN``: all skipped.

    The suite of every change must find a mutant, also at night. The CI profile of hypothesis is deterministic and has
    no deadline.
    """
    longer = ("CP_PLUGIN_ALL", "CP_PLUGIN_NIGHTLY", "CP_PLUGIN_PRODUCT")
    env = {name: value for name, value in os.environ.items() if name not in longer} | {
        "PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "kernels", tree / "tests"))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if tests.startswith("tests/kernels"):
        env["TRITON_INTERPRET"] = "1"
    python = str(ROOT / ".venv-huggingface/bin/python") if tests.startswith("tests/huggingface") else sys.executable
    command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=ci", tests]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=tree, env=env, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
            process.wait()
            return NO_END, f"{tests}: no end after {limit:g} s"
        said.seek(0)
        text = said.read()
    if status == PASSED and not re.search(r"\d+ passed", text):
        status = NONE_RAN
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)
    return status, failed[1] if failed else (text.strip().splitlines() or ["no output"])[-1]


def judge(mutant: Mutant, tree: Path, limit: float) -> Outcome:
    """Plant the bug, run its tests until one fails, and restore the file."""
    began, path = time.monotonic(), tree / mutant.file
    try:
        source = path.read_text()
        path.write_text(mutant.planted_in(source))
    except (OSError, ValueError) as error:
        return Outcome(mutant.name, "BROKEN", 0.0, str(error))
    try:
        for tests in mutant.tests:
            status, by = run_tests(tree, tests, limit)
            if status != PASSED:
                break
    finally:
        path.write_text(source)
    verdict = {PASSED: "SURVIVED", FAILED: "killed", NO_END: "NO END"}.get(status, "BROKEN")
    by = ", ".join(mutant.tests) if verdict == "SURVIVED" else by
    return Outcome(mutant.name, verdict, time.monotonic() - began, by)


def baseline(mutants: list[Mutant], tree: Path, limit: float) -> bool:
    """Whether all tests pass without a bug."""
    right = True
    for tests in dict.fromkeys(tests for mutant in mutants for tests in mutant.tests):
        began = time.monotonic()
        status, by = run_tests(tree, tests, limit)
        right = right and status == PASSED
        print(
            f"{'passes' if status == PASSED else 'FAILS':9} {time.monotonic() - began:6.1f}  {tests}  {by}", flush=True
        )
    return right


def run(mutants: list[Mutant], trees: list[Path], limit: float) -> list[Outcome]:
    """Judge the mutants, one at a time in each tree, and print a line for each as it ends."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(mutant: Mutant) -> Outcome:
        tree = free.get()
        try:
            return judge(mutant, tree, limit)
        finally:
            free.put(tree)

    outcomes = []
    width = max(len(mutant.name) for mutant in mutants)
    with ThreadPoolExecutor(len(trees)) as pool:
        for done in as_completed([pool.submit(one, mutant) for mutant in mutants]):
            name, verdict, seconds, by = found = done.result()
            outcomes.append(found)
            number = f"{len(outcomes)}/{len(mutants)}"
            print(f"{number:>7}  {verdict:8} {seconds:6.1f} s  {name:{width}}  {by}", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="default: all")
    parser.add_argument("-n", type=int, default=1, metavar="PROCESSES", help="mutants in parallel")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for one file of tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome to this file")
    parser.add_argument("--baseline", action="store_true", help="first run the tests without a bug")
    parser.add_argument("--list", action="store_true", help="print the mutants without running any")
    parser.add_argument("--faults", action="store_true", help="print the tests that plant a fault themselves")
    parser.add_argument("--sample", type=int, metavar="MUTANTS", help="random ones, made by cosmic-ray")
    parser.add_argument("--seed", type=int, help="of the sample (default: the date)")
    args = parser.parse_args()
    known = load()
    seed = int(time.strftime("%Y%m%d")) if args.seed is None else args.seed
    if unknown := sorted(set(args.names) - known.keys()):
        parser.error(f"no mutant {', '.join(unknown)}: see --list")
    mutants = [known[name] for name in args.names] or list(known.values())
    if args.sample:
        print(f"--sample {args.sample} --seed {seed}")
        mutants = list(islice(sampled(seed), args.sample))
    if args.list:
        print("\n".join(f"{mutant.name}  {mutant.file}\n    {mutant.why}" for mutant in mutants))
        return 0
    if args.faults:
        for file, tests in planted_faults().items():
            print("\n    ".join((file, *(f"{test}: {what}" for test, what in tests.items()))))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [copy_tree(Path(folder) / str(number)) for number in range(max(1, args.n))]
        if args.baseline and not baseline(mutants, trees[0], args.limit):
            print("a test fails without a bug: then its failure proves nothing")
            return 1
        outcomes = run(mutants, trees, args.limit)
    if args.json:
        args.json.write_text(json.dumps([outcome._asdict() for outcome in outcomes], indent=1) + "\n")
    alive = [outcome for outcome in outcomes if outcome.verdict != "killed"]
    killed, seconds = len(outcomes) - len(alive), sum(outcome.seconds for outcome in outcomes)
    print(f"killed {killed} of {len(outcomes)} in {seconds:.0f} s of one core")
    why = {mutant.name: mutant.why for mutant in mutants}
    for outcome in alive:
        print(f"{outcome.verdict}: {outcome.name}: {why[outcome.name]}")
    return int(bool(alive) and not args.sample)


if __name__ == "__main__":
    raise SystemExit(main())
