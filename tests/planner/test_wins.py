"""``docs/wins.md`` and the README's excerpt: up to date, with ties and losses named as such."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from evidence.regimes import REGIMES, verdict
from nightly import nightly, slow

from cp_plugin.planner.errors import typical_error

ROOT = Path(__file__).parents[2]
GENERATOR = "wins_page"


@pytest.mark.parametrize(
    "name", ["one node", pytest.param("a large model, short of memory", marks=slow, id="a large model")]
)
def test_row_is_up_to_date(page: ModuleType, name: str) -> None:
    regime = next(one for one in REGIMES if one.name == name)
    for cells in (page.row(regime), page.shapes(regime)):
        assert "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) in page.PAGE.read_text(), (
            "run docs/generate.py"
        )


@nightly
def test_page_is_up_to_date(page: ModuleType) -> None:
    assert all(path.read_text() == text for path, text in page.files().items()), "run python docs/generate.py"


def test_readme_quotes_the_page(page: ModuleType) -> None:
    """Three gains, each with the verdict of the page's row."""
    lines = page.front().splitlines()
    assert len(lines) == sum(regime.front for regime in REGIMES) == 3
    assert all(line in (ROOT / "README.md").read_text() for line in lines)
    for line in lines:
        name = line.removeprefix("- ").partition(" (")[0]
        row = next(row for row in page.PAGE.read_text().splitlines() if row.startswith(f"| {name} |"))
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        method = re.sub(r" heads over (\d+)", r" and `--cp-head-parallel \1`", cells[2])
        assert line.partition("): ")[2] == f"{cells[3]} with {method}, from: {cells[4]}; typical error {cells[-1]}"


def test_verdicts() -> None:
    """Within the typical error of the two methods a tie."""
    usual, worse = typical_error("usp"), typical_error("usp", "attention2d")
    assert verdict(1 + usual, "usp") == f"tie ({1 + usual:.2f}x)" and verdict(0.95, "usp") == "tie (0.95x)"
    assert verdict(1.24, "usp") == "**1.24x**" and verdict(0.8, "usp") == "loss: 0.80x"
    assert verdict(1 + worse, "usp", "attention2d").startswith("tie") and verdict(1 + worse, "usp") == "**1.28x**"
