"""``docs/beyond.md``: the cheap parts are up to date, and the baselines are fair."""

from __future__ import annotations

from typing import Any

import pytest
from evidence import beyond
from evidence.beyond import Cell, Entry, contest, pays, with_kv_heads

from cp_plugin.planner.machine.hardware import cluster
from cp_plugin.planner.trace.program import Post
from cp_plugin.planner.training.parallel import Parallel

GENERATOR = "beyond_page"
SHAPE = Parallel(devices=8, context=8, seq_length=2**15, recompute="full")


@pytest.fixture(scope="module")
def entries() -> dict[str, Entry]:
    """Every method on 8 ranks."""
    return {e.name: e for e in contest(with_kv_heads(8), SHAPE, cluster("h100-1-per-node"))}


def test_page_is_up_to_date(page: Any) -> None:
    text = page.PAGE.read_text()
    for section in (page.head_groups_section(), page.grids_section()):
        assert section in text, "run python docs/generate.py"
    for section in text.split("\n## ")[1:]:
        assert "Predicted." in section.split("\n|")[0], section[:40]
    for name in ("grids.svg", "map.svg"):
        assert f"images/beyond/{name}" in text and (page.PICTURES / name).exists()


def test_all_methods_are_compared(entries: dict[str, Entry]) -> None:
    upstream = {f"upstream {name}" for name in ("p2p", "all_gather", "a2a", "a2a+p2p")}
    assert upstream | {"attention2d", "burst", "usp", "ulysses"} <= set(entries)
    seconds = [e.seconds for e in entries.values()]
    assert seconds == sorted(seconds) and all(e.simulated is not None for e in entries.values())


def test_upstream_sums_gradients_in_16_bits(entries: dict[str, Entry]) -> None:
    """A ring's backward sends k, v (2 bytes an element) and their sums: 2 bytes upstream, 4 here."""
    simulated = entries["upstream p2p"].simulated
    assert simulated is not None
    program = next(iter(simulated.main.programs.values()))
    sent = sum(e.nbytes for e in program.backward if isinstance(e, Post))
    kv = 2 * 2**12 * 8 * 128 * 2
    assert sent == 7 * kv + 7 * kv, "k, v and their sums seven times each: a rank's own part stays"
    assert program.sent["backward", "cp"] == 7 * kv + 7 * 2 * kv


def test_hopeless_methods_are_not_simulated() -> None:
    asked = {"hopeless": 0.5, "only": ("ulysses", "ring"), "tried": 1}
    found = contest(with_kv_heads(8), SHAPE, cluster("h100-1-per-node"), **asked)  # type: ignore[arg-type]
    assert sorted(e.simulated is not None for e in found) == [False, True]
    assert beyond.cell(64, "100M").entries == (), "does not fit"


def test_length_from_which_a_method_pays(entries: dict[str, Entry]) -> None:
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
