"""``docs/wins.md`` and the README's excerpt: up to date, with ties and losses named as such."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from evidence import regimes
from evidence.regimes import REGIMES, Regime, verdict
from nightly import nightly, slow

from cp_plugin.planner.asked import MOST
from cp_plugin.planner.errors import typical_error
from cp_plugin.planner.search import Plan

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
    assert page.stale() == [], "run python docs/generate.py"


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


def test_stock_repeats_attention_and_divides_kv_heads() -> None:
    regime = Regime(name="few heads", model="llama3-8b", devices=16, tokens=2**16, cluster="h100-1-per-node")
    found = regimes.beside(regime)
    assert found.same.repeats > 0 and found.ours.repeats == 0
    assert found.run_ratio > found.same_ratio
    ranks = found.run.candidate.setup.options.head_parallel or 1
    assert 8 % ranks == 0 and found.run.candidate.name == "upstream a2a+p2p", "8 key/value heads, not 16"
    packed = regimes.beside(replace(regime, documents="chat"))
    assert packed.run.candidate.setup.problem.seq_length > 2**16, "documents are padded"


def test_each_side_has_its_own_best_shape() -> None:
    """Stock, too, may keep attention's output, use other ranks, and do without context parallelism."""
    node = next(one for one in REGIMES if one.name == "one node")
    kept = regimes.apart(node)
    assert kept.stock.parallel.recompute == "selective" and kept.stock.repeats == 0
    assert kept.ratio < regimes.beside(node).run_ratio
    short = regimes.apart(replace(node, tokens=2**13))
    assert short.stock.parallel.context == 1 and short.ratio == pytest.approx(1)
    shapes = [found.parallel for found in (kept.ours, kept.stock, short.ours, short.stock)]
    assert shapes[0].global_batch == shapes[1].global_batch and shapes[2].global_batch == shapes[3].global_batch
    assert all(s.global_batch * s.seq_length <= MOST for s in shapes)


def test_no_lower_bound_is_shown_as_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method is simulated, hopeless ones too."""
    planned, plan = [], regimes.plan

    def kept(*asked: Any, **how: Any) -> Plan:
        planned.append(plan(*asked, **how))
        return planned[-1]

    monkeypatch.setattr(regimes, "plan", kept)
    slow_rings = Regime(name="rings wait", model="llama2-7b", cluster="h100-1-per-node", tokens=2**18)
    found = regimes.beside.__wrapped__(slow_rings)
    assert all(p.events > 0 for p in (found.ours, found.same, found.run))
    assert [one.lost for one in planned] == [[]]


def test_record_of_virtual_clusters_is_complete(page: ModuleType) -> None:
    content = json.loads(page.RECORD.read_text())
    source = (ROOT / "ci" / "cluster" / "regimes.py").read_text()
    assert list(content) == re.findall(r'^    "([\w-]+)": \($', source, re.MULTILINE)
    for found in content.values():
        assert all(run["correct"] for run in found["runs"])
        for way, times in (("same recomputation", 0), ("as people run it", 1)):
            ours = min(run["measured"][1] for run in found["runs"] if run["ours"])
            stock = min(run["measured"][1] + times * run["measured"][0] for run in found["runs"] if run["stock"])
            assert found[way]["measured"] == pytest.approx(stock / ours)
