"""Compare with an earlier commit what must stay while code is rearranged: results of trainings, messages, help, counts.

    python tests/frozen.py COMMIT                                     the refusals and every training of tests/megatron
    python tests/frozen.py COMMIT tests/megatron/flags/test_refusals.py ...    what these tests see

The tests run in both trees (CP_PLUGIN_NIGHTLY=1: more of them) and note by the way: of every training
of ``tests/training.py`` a digest of each rank's losses, gradient norms, weights and first gradients; the text of every
refusal that they expect, and of every rule's. Exits with 1 if a test of both has noted something else, or if a
command's ``--help``, or a file of exact counts, differs. What only one of the trees has is listed.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
COUNTS = ("exact.json", "sass.json", "budget.json")
TESTS = ("test_cases", "test_refusals", "test_bad_flags", "test_planned", "test_early")
NOTED: dict[str, list[str]] = defaultdict(list)
"""Test -> what it has seen."""


def note(text: str) -> None:
    """Add to what the current test has seen, without what differs from run to run."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    NOTED[test].append(re.sub(r"/tmp/[\w./-]+", "TMP", text.replace(os.getcwd(), "ROOT")))


def digest(record: Any) -> str:
    """Of the numbers of one rank, to the bit."""
    found = hashlib.sha256(repr((record.coordinates, record.losses, record.norms)).encode())
    for tensors in (record.weights, record.grads):
        for name, x in sorted(tensors.items()):
            found.update(name.encode() + x.contiguous().view(torch.uint8).numpy(force=True).tobytes())
    return found.hexdigest()[:16]


def pytest_collection_finish(session: Any) -> None:
    """As a plugin of pytest, in either tree: wrap what the tests call."""
    import _pytest.raises

    raised = _pytest.raises.RaisesExc.__exit__

    def and_noted(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        if error is not None and isinstance(error, ValueError | FileNotFoundError | ModuleNotFoundError):
            note(str(error))
        return raised(self, kind, error, trace)

    _pytest.raises.RaisesExc.__exit__ = and_noted
    if training := sys.modules.get("training"):
        run_ranks = training.run_ranks

        def and_digested(*args: Any, **more: Any) -> Any:
            records = run_ranks(*args, **more)
            note(" ".join(map(digest, records)))
            return records

        training.run_ranks = and_digested
    if rules := sys.modules.get("cp_plugin.megatron.rules.rule"):
        of = rules.Rule.of

        def and_said(self: Any, subject: Any) -> str | None:
            said = of(self, subject)
            if said is not None:
                note(f"{self.name}: {said}")
            return said

        rules.Rule.of = and_said


def pytest_sessionfinish() -> None:
    Path(os.environ["CP_PLUGIN_FROZEN"], f"{os.getpid()}.json").write_text(json.dumps(NOTED))


def seen(tree: Path, tests: list[str]) -> dict[str, list[str]]:
    """Run the tests in a tree, and its commands' ``--help``."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(__file__, folder)  # an earlier tree may have none
        path = f"{tree}:{tree}/kernels:{folder}"
        world = os.environ | {"PYTHONPATH": path, "CP_PLUGIN_FROZEN": folder, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        there = [test for test in tests if (tree / test.partition("::")[0]).exists()]
        words = [sys.executable, "-m", "pytest", "-q", "-p", "frozen", "-n", "2", "--dist", "loadfile", *there]
        subprocess.run(words, cwd=tree, env=world, check=True)
        found: dict[str, list[str]] = {}
        for file in Path(folder).glob("*.json"):
            found |= json.loads(file.read_text())
    commands = [""]
    for command in commands:  # grows
        words = [sys.executable, "-m", "cp_plugin.tools", *command.split(), "--help"]
        text = subprocess.run(words, cwd=tree, env=world, check=True, capture_output=True, text=True).stdout
        found[f"cp-plugin {command} --help"] = text.splitlines()
        below = text.partition("─ Commands ─")[2]
        commands += [f"{command} {name}".strip() for name in re.findall(r"^│ ([a-z]\S*) ", below, re.M)]
    return found | {x.name: x.read_text().splitlines() for name in COUNTS for x in tree.glob(f"[ct]*/**/{name}")}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    tests = sys.argv[2:] or [f"tests/megatron/{name}.py" for name in TESTS]
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", before, sys.argv[1]], cwd=ROOT, check=True)
        try:
            old, new = seen(before, tests), seen(ROOT, tests)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    changed = [name for name in old.keys() & new.keys() if old[name] != new[name]]
    for name in sorted(changed):
        print(*difflib.unified_diff(old[name], new[name], name, name, n=0, lineterm=""), sep="\n")
    for what, names in (("gone", old.keys() - new.keys()), ("new", new.keys() - old.keys())):
        print(f"{what}: {len(names)}", *sorted(names)[:20], sep="\n  ")
    print(
        f"{'FAIL' if changed else 'PASS'}: {len(changed)} of {len(old.keys() & new.keys())} differ from {sys.argv[1]}"
    )
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
