"""One question, one answer: README, ``docs/choose.md``, ``docs/wins.md`` and ``cp-plugin plan`` agree."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
from evidence import regimes
from evidence.regimes import CANONICAL
from typer.testing import CliRunner

from cp_plugin.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/choose.md", "docs/wins.md")


def test_the_front_pages_state_the_bytes_of_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the heads and ranks they hold for."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    share = importlib.import_module("front_picture").share
    front, index = (" ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/index.md"))
    mha, gqa, few = (f"{share(*of):.2f}" for of in ((64, 32), (64, 8), (8, 8)))
    assert f"with 32 key/value heads for 32 query heads {mha}, with 8 of them {gqa}, on 8 ranks {few}" in front
    assert f"it sends {gqa} of a ring's bytes on 64 ranks, and {few} on 8" in index


@pytest.fixture(scope="module")
def planned() -> dict[str, object]:
    """The answer of the command, as JSON."""
    done = CliRunner().invoke(app, [*CANONICAL.command, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["methods"][0]


@pytest.mark.parametrize("page", PAGES)
def test_the_example_has_one_answer(planned: dict[str, object], page: str) -> None:
    """The sentence with its constraint, and every row of a table for the example, name the method of the command."""
    text = (ROOT / page).read_text()
    assert regimes.sentence(CANONICAL) in text, f"{page}: run python docs/generate.py"
    rows = [line for line in text.splitlines() if line.startswith(f"| {CANONICAL.name} | {CANONICAL.example} |")]
    if page != "docs/wins.md":  # the others have no table
        return
    assert len(rows) == 1, f"{page} has no row for the example"
    named = str(planned["method"]).replace("upstream ", "stock `") + "`"
    assert re.search(r"^\| [^|]+ \| [^|]+ \| (.+?) \|", rows[0])[1] == named  # type: ignore[index]


def test_the_sentence_is_the_commands_answer(planned: dict[str, object]) -> None:
    told, sizes = regimes.sentence(CANONICAL), ("tensor", "context", "pipeline", "data")
    shape = " x ".join(f"{name} {planned[name]}" for name in sizes if planned[name] != 1)
    again = {"none": "nothing", "selective": " and ".join(planned["recompute_modules"]), "full": "all layers"}  # type: ignore[arg-type]
    answer, other = told.split(". `")
    assert regimes.CONSTRAINT in answer and "(typical error " in other
    assert other.startswith(f"{regimes.apart(CANONICAL).ours.candidate.name}`")
    assert answer.endswith(f"**, {shape}, recomputes {again[str(planned['recompute'])]}")
