"""``ci/test.sh --changed``: the tests affected by a change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from nightly import slow

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "ci"))

import changed  # noqa: E402

FILES = {str(f.relative_to(ROOT)) for folder in ("cp_plugin", "tests", "ci") for f in (ROOT / folder).rglob("*.*")}


@pytest.fixture(scope="module")
def used() -> dict[str, set[str]]:
    return changed.uses({file for file in FILES if "__pycache__" not in file})


@slow
@pytest.mark.parametrize(
    ("file", "touches", "leaves_alone"),
    [
        ("cp_plugin/core/tiles.py", "tests/core/test_tiles.py", "tests/test_site.py"),
        ("cp_plugin/methods/ring.py", "tests/core/test_methods.py", "tests/core/test_tiles.py"),
        ("cp_plugin/planner/search.py", "tests/planner/test_search.py", "tests/core/test_layout.py"),
        ("cp_plugin/megatron/flags/args.py", "tests/megatron/test_flags.py", "tests/core/test_methods.py"),
        ("tests/oracle.py", "tests/core/test_methods.py", "tests/megatron/test_flags.py"),
        ("ci/parity/cases.toml", "tests/test_parity_cases.py", "tests/core/test_methods.py"),
    ],
)
def test_what_a_file_touches(file: str, touches: str, leaves_alone: str, used: dict[str, set[str]]) -> None:
    assert file in FILES
    reached = changed.touched({file}, used)
    assert touches in reached and leaves_alone not in reached
