"""README, ``docs/choose.md``, ``docs/wins.md`` and ``cp-plugin plan`` agree, with ties and losses named as such."""

from __future__ import annotations

import json
import re
from pathlib import Path

import wins_page as page
from evidence import regimes
from evidence.regimes import CANONICAL, REGIMES, verdict
from front_picture import share
from nightly import nightly
from typer.testing import CliRunner

from cp_plugin.planner.errors import typical_error
from cp_plugin.tools.app import app

ROOT = Path(__file__).parents[2]


def test_a_row_is_up_to_date() -> None:
    regime = next(one for one in REGIMES if one.name == "one node")
    for cells in (page.row(regime), page.shapes(regime)):
        assert "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) in page.PAGE.read_text(), (
            "run docs/generate.py"
        )


@nightly
def test_page_is_up_to_date() -> None:
    assert all(path.read_text() == text for path, text in page.files().items()), "run python docs/generate.py"


def test_verdicts() -> None:
    """Within the typical error of the two methods a tie."""
    usual, worse = typical_error("usp"), typical_error("usp", "attention2d")
    assert verdict(1 + usual, "usp") == f"tie ({1 + usual:.2f}x)" and verdict(0.95, "usp") == "tie (0.95x)"
    assert verdict(1.24, "usp") == "**1.24x**" and verdict(0.8, "usp") == "loss: 0.80x"
    assert verdict(1 + worse, "usp", "attention2d").startswith("tie") and verdict(1 + worse, "usp") == "**1.28x**"


def test_the_front_pages_state_the_bytes_of_a_grid() -> None:
    """With the heads and ranks they hold for."""
    front, index = (" ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/index.md"))
    mha, gqa, few = (f"{share(*of):.2f}" for of in ((64, 32), (64, 8), (8, 8)))
    assert f"with 32 key/value heads for 32 query heads {mha}, with 8 of them {gqa}, on 8 ranks {few}" in front
    assert f"it sends {gqa} of a ring's bytes on 64 ranks, and {few} on 8" in index


def test_the_example_has_one_answer() -> None:
    """The command's method, shape and recomputation are the sentence's, and the method is that of the page's row."""
    example = {"model": CANONICAL.model, "cluster": CANONICAL.cluster, "devices": CANONICAL.devices}
    words = [f"--{name}={value}" for name, value in {**example, "seq-length": CANONICAL.tokens}.items()]
    done = CliRunner().invoke(app, ["plan", *words, "--json"])
    assert done.exit_code == 0, done.output
    planned = json.loads(done.stdout)["methods"][0]
    told, sizes = regimes.sentence(CANONICAL), ("tensor", "context", "pipeline", "data")
    text = page.PAGE.read_text()
    assert told in text, "run python docs/generate.py"
    (row,) = re.findall(rf"^\| {CANONICAL.name} \| [^|]+ \| (.+?) \| .* \| {CANONICAL.example} \|$", text, re.MULTILINE)
    assert row == planned["method"].replace("stock ", "stock `") + "`"
    shape = " x ".join(f"{name} {planned[name]}" for name in sizes if planned[name] != 1)
    again = {"none": "nothing", "selective": " and ".join(planned["recompute_modules"]), "full": "all layers"}
    answer, other = told.split(". `")
    assert regimes.CONSTRAINT in answer and "(typical error " in other
    assert other.startswith(f"{regimes.apart(CANONICAL).ours.candidate.name}`")
    assert answer.endswith(f"**, {shape}, recomputes {again[str(planned['recompute'])]}")
