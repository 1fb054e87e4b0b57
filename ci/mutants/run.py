"""Mutation tests: plant small bugs in the core, one at a time, and check that a test fails.

    ci/mutants.sh                      all mutants (mutants.toml)
    ci/mutants.sh rope-stale-cache ... these
    ci/mutants.sh --list               names, files, and the effect on a user
    ci/mutants.sh --sample 60          60 random changes of operators, numbers and conditions, which cosmic-ray makes

A mutant is one replacement in one file. It is made in a copy of the working tree, and its tests run file by file until
one fails.

Exits with 1 if a mutant survives, if its text is not in its file exactly once, or if its tests cannot run or do not
end, which proves nothing on a busy machine. A sample always exits with 0: some random changes are no bugs.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from difflib import ndiff
from itertools import count, groupby, islice
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PASSED, FAILED, NONE_RAN, NO_END = 0, 1, 5, -1
"""pytest's status; any other means that the tests cannot run."""
SAMPLED = ("core", "comm", "methods", "linear")
"""Rooms of cp_plugin/engine."""
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
        if (times := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its text is in {self.file} {times} times, and must be there once")
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
    """Read all mutants, by name."""
    listed = tomllib.loads((HERE / "mutants.toml").read_text())["mutant"]
    return {entry["name"]: Mutant(**entry) for entry in listed}


def sampled(seed: int) -> Iterator[Mutant]:
    """Random changes of ``SAMPLED``, without end; a file is drawn by its size, then a kind of change."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    names = sorted(name for name in operator_names() if not NO_BUG.search(name))
    kinds = [list(kind) for _, kind in groupby(names, key=lambda name: name.partition("_")[0])]
    files = [file.relative_to(ROOT) for each in SAMPLED for file in sorted(ROOT.glob(f"cp_plugin/engine/{each}/*.py"))]
    draw, sizes = random.Random(seed), [(ROOT / file).stat().st_size for file in files]
    for number in count(1):
        new, source = None, ""
        while new is None or new.count("strict=True") < source.count("strict=True"):
            (file,) = draw.choices(files, sizes)
            source, operator = (ROOT / file).read_text(), get_operator(draw.choice(draw.choice(kinds)))()
            positions = [place for node in ast_nodes(get_ast(source)) for place in operator.mutation_positions(node)]
            new = mutate_code(source, operator, draw.randrange(len(positions))) if positions else None
        change = " ".join(line.strip() for line in ndiff(source.split("\n"), new.split("\n")) if line[0] in "+-")
        yield Mutant(f"{file.stem}-{number}", str(file), source, new, f"{file}: {change}", tests_near(file))


def tests_near(path: Path) -> list[str]:
    """The tests that name a module most often, themselves or in their text, and those of all methods."""
    rooms = ("engine", "strict", "fake_cuda")
    files = [file for room in rooms for file in sorted(ROOT.glob(f"tests/{room}/**/test_*.py"))]
    word = re.compile(rf"(?:\b|_){path.stem}(?:\b|_)")
    named = {str(x.relative_to(ROOT)): len(word.findall(f"{x.stem} " * 99 + x.read_text())) for x in files}
    near = sorted(filter(named.get, named), key=lambda test: -named[test])[:5]
    every = (f"tests/engine/{name}.py" for name in ("comm/test_mesh", "linear/test_linear", "methods/test_methods"))
    return list(dict.fromkeys((*near, *every)))


def copy_tree(to: Path) -> Path:
    """Copy the working tree, and link the environment."""
    shutil.copytree(ROOT, to, symlinks=True, ignore=shutil.ignore_patterns(".*", "out", "__pycache__"))
    (to / ".venv").symlink_to(ROOT / ".venv")
    return to


def run_tests(tree: Path, tests: str, limit: float) -> tuple[int, str]:
    """pytest's status or ``NO_END``, and the first failed test or the last line of output; ``NONE_RAN``: all skipped.

    The suite of every change must find a mutant, also at night. The CI profile of hypothesis is deterministic and has
    no deadline.
    """
    longer = ("CP_PLUGIN_NIGHTLY", "CP_PLUGIN_PRODUCT")
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


def run(mutants: list[Mutant], trees: list[Path], limit: float) -> list[Outcome]:
    """Judge the mutants, one at a time in each tree, and print a line for each as it ends."""
    outcomes, own, left = list[Outcome](), threading.local(), list(trees)
    width = max(len(mutant.name) for mutant in mutants)
    with ThreadPoolExecutor(len(trees), initializer=lambda: vars(own).update(tree=left.pop())) as pool:
        for done in as_completed([pool.submit(lambda m: judge(m, own.tree, limit), mutant) for mutant in mutants]):
            name, verdict, seconds, by = outcome = done.result()
            outcomes.append(outcome)
            number = f"{len(outcomes)}/{len(mutants)}"
            print(f"{number:>7}  {verdict:8} {seconds:6.1f} s  {name:{width}}  {by}", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="default: all")
    parser.add_argument("-n", type=int, default=1, metavar="PROCESSES", help="mutants in parallel")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for one file of tests")
    parser.add_argument("--list", action="store_true", help="print the mutants without running any")
    parser.add_argument("--sample", type=int, metavar="MUTANTS", help="random ones, made by cosmic-ray")
    parser.add_argument(
        "--seed", type=int, default=int(time.strftime("%Y%m%d")), help="of the sample (default: the date)"
    )
    args = parser.parse_args()
    known = load()
    if unknown := sorted(set(args.names) - known.keys()):
        parser.error(f"no mutant {', '.join(unknown)}: see --list")
    mutants = [known[name] for name in args.names] or list(known.values())
    if args.sample:
        print(f"--sample {args.sample} --seed {args.seed}")
        mutants = list(islice(sampled(args.seed), args.sample))
    if args.list:
        print("\n".join(f"{mutant.name}  {mutant.file}\n    {mutant.why}" for mutant in mutants))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [copy_tree(Path(folder) / str(number)) for number in range(max(1, args.n))]
        outcomes = run(mutants, trees, args.limit)
    alive = [outcome for outcome in outcomes if outcome.verdict != "killed"]
    killed, seconds = len(outcomes) - len(alive), sum(outcome.seconds for outcome in outcomes)
    print(f"killed {killed} of {len(outcomes)} in {seconds:.0f} s of one core")
    why = {mutant.name: mutant.why for mutant in mutants}
    for outcome in alive:
        print(f"{outcome.verdict}: {outcome.name}: {why[outcome.name]}")
    return int(bool(alive) and not args.sample)


if __name__ == "__main__":
    raise SystemExit(main())
