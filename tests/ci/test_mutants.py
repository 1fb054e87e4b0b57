"""Every mutant of ``ci/mutants`` can still be planted, and its tests exist; ci/mutants.sh runs them at night."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from nightly import nightly

ROOT = Path(__file__).parents[2]
MUTANTS = ROOT / "ci/mutants"


@pytest.fixture
def mutants(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("ci/mutants/run")


@functools.cache
def defined_in(file: str) -> set[str]:
    """Names of the tests in a file; empty if there is no such file."""
    path = ROOT / file
    tree = ast.parse(path.read_text() if path.is_file() else "")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_mutant_can_be_planted_and_has_its_tests(mutants: ModuleType) -> None:
    known = mutants.load().values()
    assert len(known) == (MUTANTS / "mutants.toml").read_text().count("[[mutant]]"), "two have the same name"
    for mutant in known:
        source = (ROOT / mutant.file).read_text()
        planted = mutant.planted_in(source)
        assert planted != source, mutant.name
        compile(planted, mutant.file, "exec")
        assert mutant.why.endswith("."), f"{mutant.name}: say what would go wrong"
        assert mutant.tests, mutant.name
        for tests in mutant.tests:
            file, _, name = tests.partition("::")
            there = defined_in(file)
            assert name.partition("[")[0] in there if name else there, f"{mutant.name}: there is no {tests}"


def test_the_tests_that_plant_a_fault_are_there() -> None:
    planted = tomllib.loads((MUTANTS / "faults.toml").read_text())
    listed = [(file, name) for file, tests in planted.items() for name in tests]
    assert not [f"{file}::{name}" for file, name in listed if name not in defined_in(file)]


@nightly
def test_verdicts(mutants: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("def two():\n    return 2\n")
    (tmp_path / "test_x.py").write_text("import x\n\ndef test_two():\n    assert x.two() == 2\n")
    (tmp_path / "test_y.py").write_text("def test_nothing():\n    pass\n")
    (tmp_path / "test_skipped.py").write_text("import pytest\n\n@pytest.mark.skip\ndef test_two():\n    pass\n")
    (tmp_path / "test_z.py").write_text("import x\n\ndef test_end():\n    while x.two() != 2:\n        pass\n")

    def verdict(old: str, *tests: str, limit: float = 60.0) -> tuple[str, str]:
        mutant = mutants.Mutant(name="three", file="x.py", old=old, new="return 3", why="", tests=list(tests))
        outcome = mutants.judge(mutant, tmp_path, limit)
        assert (tmp_path / "x.py").read_text() == "def two():\n    return 2\n", "the file is restored"
        return outcome.verdict, outcome.by

    assert verdict("return 2", "test_y.py", "test_x.py") == ("killed", "test_x.py::test_two")
    assert verdict("return 2", "test_y.py") == ("SURVIVED", "test_y.py")
    assert verdict("return 2", "test_z.py", limit=1.0) == ("NO END", "test_z.py: no end after 1 s")
    assert verdict("return 2", "test_none.py")[0] == "BROKEN"
    assert verdict("return 2", "test_skipped.py")[0] == "BROKEN", "a skipped test proves nothing"
    assert verdict("return 4", "test_x.py") == ("BROKEN", "three: its text is in x.py 0 times, and must be there once")
    assert verdict("r", "test_x.py") == ("BROKEN", "three: its text is in x.py 2 times, and must be there once")
