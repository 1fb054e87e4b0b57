"""Plant small bugs in the core, one at a time, and look whether a test fails.

    ci/mutants.sh                      all of them (mutants.toml)
    ci/mutants.sh ring-direction ...   these
    ci/mutants.sh --list               their names, files, and what each would do to a user
    ci/mutants.sh --faults             the tests that plant a fault themselves (faults.toml)
    ci/mutants.sh --baseline           first the same tests on the tree as it is, which must pass

A mutant is one replacement in one file. It is made in a copy of the working tree, never in the tree itself, and its
tests run file by file until one fails.

Ends with 1 when a mutant survives, when its text is no longer in its file exactly once, or when its tests cannot run or
do not end: on a busy machine that proves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PASSED, FAILED, NO_END = 0, 1, -1
"""Of pytest; another status is that of tests that cannot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One replacement."""

    name: str
    file: str
    old: str
    """Source text that is in the file once."""
    new: str
    why: str
    """What would go wrong for a user."""
    tests: tuple[str, ...]
    """Files or tests that ought to notice it, the likeliest first."""

    def planted_in(self, source: str) -> str:
        """The source with the bug; ValueError where the text is not there exactly once."""
        if (found := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its text is in {self.file} {found} times, and must be there once")
        return source.replace(self.old, self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a mutant."""

    name: str
    verdict: str
    """killed, SURVIVED, NO END, or BROKEN: its text is not there, or its tests cannot run."""
    seconds: float
    by: str
    """The first test that failed; otherwise what was tried."""


def load() -> dict[str, Mutant]:
    """All mutants by name, in the order of the file."""
    found = tomllib.loads((HERE / "mutants.toml").read_text())["mutant"]
    mutants = [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in found]
    by_name = {mutant.name: mutant for mutant in mutants}
    if len(by_name) < len(mutants):
        raise ValueError("two mutants have one name")
    return by_name


def planted_faults() -> dict[str, dict[str, str]]:
    """File -> test that plants a fault -> which fault."""
    return tomllib.loads((HERE / "faults.toml").read_text())


def copy_tree(to: Path) -> Path:
    """What git knows of the working tree, or does not ignore, and the environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    if not (to / ".venv").exists():
        (to / ".venv").symlink_to(ROOT / ".venv")
    return to


def run_tests(tree: Path, tests: str, limit: float) -> tuple[int, str]:
    """pytest's status or ``NO_END``, and the first test that failed or the last line that was printed.

    What every change runs must find a mutant, by night, too. Hypothesis tries the same examples each time, and takes no
    example for wrong because it took long.
    """
    longer = ("CP_PLUGIN_ALL", "CP_PLUGIN_NIGHTLY")
    env = {name: value for name, value in os.environ.items() if name not in longer} | {
        "PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "kernels", tree / "tests"))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if tests.startswith("tests/kernels"):
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=ci", tests]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=tree, env=env, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and the ranks that it has started
            process.wait()
            status = NO_END
            said.write(f"\n{tests}: no end after {limit:g} s\n")
        said.seek(0)
        text = said.read()
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)
    return status, failed[1] if failed else (text.strip().splitlines() or ["it said nothing"])[-1]


@contextlib.contextmanager
def planted(mutant: Mutant, tree: Path) -> Iterator[None]:
    """Inside the ``with`` block the tree has the bug."""
    path = tree / mutant.file
    source = path.read_text() if path.exists() else ""
    path.write_text(mutant.planted_in(source))
    try:
        yield
    finally:
        path.write_text(source)


def judge(mutant: Mutant, tree: Path, limit: float) -> Outcome:
    """Plant it, and run its tests until one fails."""
    began, status, by = time.monotonic(), PASSED, ""
    try:
        with planted(mutant, tree):
            for tests in mutant.tests:
                status, by = run_tests(tree, tests, limit)
                if status != PASSED:
                    break
    except (OSError, ValueError) as error:
        return Outcome(name=mutant.name, verdict="BROKEN", seconds=0.0, by=str(error))
    verdict = {PASSED: "SURVIVED", FAILED: "killed", NO_END: "NO END"}.get(status, "BROKEN")
    by = ", ".join(mutant.tests) if verdict == "SURVIVED" else by
    return Outcome(name=mutant.name, verdict=verdict, seconds=time.monotonic() - began, by=by)


def baseline(mutants: list[Mutant], tree: Path, limit: float) -> bool:
    """Whether the tests pass without a bug; says which do not."""
    right = True
    for tests in dict.fromkeys(tests for mutant in mutants for tests in mutant.tests):
        began = time.monotonic()
        status, by = run_tests(tree, tests, limit)
        right = right and status == PASSED
        shown = "passes" if status == PASSED else "FAILS"
        print(f"{shown:9} {time.monotonic() - began:6.1f}  {tests}  {by}", flush=True)
    return right


def run(mutants: list[Mutant], trees: list[Path], limit: float) -> list[Outcome]:
    """Judge them side by side, one in each tree, and print a line for each as it ends; in the order given."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def one(mutant: Mutant) -> Outcome:
        tree = free.get()
        try:
            return judge(mutant, tree, limit)
        finally:
            free.put(tree)

    outcomes: dict[str, Outcome] = {}
    width = max(len(mutant.name) for mutant in mutants)
    with ThreadPoolExecutor(len(trees)) as pool:
        for done in as_completed([pool.submit(one, mutant) for mutant in mutants]):
            found = done.result()
            outcomes[found.name] = found
            number = f"{len(outcomes)}/{len(mutants)}"
            print(
                f"{number:>7}  {found.verdict:8} {found.seconds:6.1f} s  {found.name:{width}}  {found.by}", flush=True
            )
    return [outcomes[mutant.name] for mutant in mutants]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="default: all")
    parser.add_argument("-n", type=int, default=1, metavar="PROCESSES", help="mutants at one time")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="for one file of tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome to this file")
    parser.add_argument("--baseline", action="store_true", help="first run the tests without a bug")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run none")
    parser.add_argument("--faults", action="store_true", help="print the tests that plant a fault themselves")
    args = parser.parse_args()
    known = load()
    if unknown := sorted(set(args.names) - known.keys()):
        parser.error(f"no mutant {', '.join(unknown)}: see --list")
    mutants = [known[name] for name in args.names] or list(known.values())
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
            print("a test fails without a bug: what it kills is no proof")
            return 1
        outcomes = run(mutants, trees, args.limit)
    if args.json:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    killed = sum(outcome.verdict == "killed" for outcome in outcomes)
    print(f"killed {killed} of {len(outcomes)} in {sum(outcome.seconds for outcome in outcomes):.0f} s of one core")
    for outcome in outcomes:
        if outcome.verdict != "killed":
            print(f"{outcome.verdict}: {outcome.name}: {known[outcome.name].why}")
    return int(killed < len(outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
