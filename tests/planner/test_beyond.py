"""``docs/beyond.md``: what of it is quick to work out is as committed, and the baselines are fair."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evidence import beyond
from evidence.beyond import Cell, Entry, contest, pays, with_kv_heads

from cp_plugin.planner.machine.hardware import cluster
from cp_plugin.planner.price import Priced
from cp_plugin.planner.trace.program import Post
from cp_plugin.planner.training.parallel import Parallel

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``docs/beyond_page.py`` as a module."""
    monkeypatch.syspath_prepend(str(DOCS))
    import beyond_page

    yield beyond_page
    sys.modules.pop("beyond_page", None)


@pytest.fixture(scope="module")
def entries() -> dict[str, Entry]:
    """Every method on 8 ranks."""
    shape = Parallel(devices=8, context=8, seq_length=2**15, recompute="full")
    return {e.name: e for e in contest(with_kv_heads(8), shape, cluster("h100-1-per-node"))}


def priced(entry: Entry) -> Priced:
    assert entry.simulated is not None
    return entry.simulated


@pytest.mark.parametrize("part", ["head_groups_section", "grids_section"])
def test_the_page_is_what_the_code_gives_now(page: Any, part: str) -> None:
    assert getattr(page, part)() in page.PAGE.read_text(), "run python docs/generate.py"


def test_every_table_says_that_it_is_predicted(page: Any) -> None:
    for section in page.PAGE.read_text().split("\n## ")[1:]:
        assert "Predicted." in section.split("\n|")[0], section[:40]


def test_the_pictures_are_there(page: Any) -> None:
    text = page.PAGE.read_text()
    for name in ("grids.svg", "map.svg"):
        assert f"images/beyond/{name}" in text and (page.PICTURES / name).exists()


def test_all_methods_and_all_of_upstreams_are_compared(entries: dict[str, Entry]) -> None:
    upstream = {f"upstream {name}" for name in ("p2p", "all_gather", "a2a", "a2a+p2p")}
    assert upstream <= set(entries) and {"attention2d", "burst", "usp", "ulysses"} <= set(entries)
    seconds = [e.seconds for e in entries.values()]
    assert seconds == sorted(seconds) and all(e.simulated is not None for e in entries.values())


def test_upstreams_sums_travel_in_two_bytes(entries: dict[str, Entry]) -> None:
    """A ring's backward sends k, v (2 bytes an element) and their sums: 2 bytes upstream, 4 here."""
    program = next(iter(priced(entries["upstream p2p"]).main.programs.values()))
    sent = sum(e.nbytes for e in program.backward if isinstance(e, Post))
    kv = 2 * 2**12 * 8 * 128 * 2
    assert sent == 7 * kv + 7 * kv, "k, v seven times, and their sums as often: a rank's own part stays"
    assert program.sent["backward", "cp"] == 7 * kv + 7 * 2 * kv


def test_what_is_hopeless_is_not_simulated() -> None:
    shape = Parallel(devices=8, context=8, seq_length=2**15, recompute="full")
    asked = {"hopeless": 0.5, "only": ("ulysses", "ring"), "tried": 1}
    found = contest(with_kv_heads(8), shape, cluster("h100-1-per-node"), **asked)  # type: ignore[arg-type]
    assert [e.simulated is not None for e in sorted(found, key=lambda e: e.simulated is None)] == [True, False]


def test_where_a_method_stops_paying(entries: dict[str, Entry]) -> None:
    some = entries["usp"]

    def entry(name: str, seconds: float, *, simulated: bool = True) -> Entry:
        return Entry(name=name, chosen="", seconds=seconds, simulated=some.simulated if simulated else None)

    row = [
        Cell(devices=8, tokens="1M", entries=[entry("a", 1.0), entry("b", 2.0), entry("c", 1.01, simulated=False)]),
        Cell(devices=8, tokens="3M", entries=[entry("a", 1.0), entry("b", 1.04), entry("c", 3.0)]),
        Cell(devices=8, tokens="10M", entries=[entry("a", 1.0), entry("b", 1.01), entry("c", 1.2)]),
        Cell(devices=8, tokens="30M", entries=[]),
    ]
    assert pays(row) == {"a": {8: "1M"}, "b": {8: "3M"}, "c": {8: "never"}}


def test_what_does_not_fit_is_not_compared() -> None:
    assert beyond.cell(64, "100M").entries == ()
