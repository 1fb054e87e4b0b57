"""Pictures: recorded calls cover every pair once, and their numbers are the theory's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from commands import cp_plugin
from faulty_rings import faulty
from method_cases import METHODS
from nightly import pairs_at_night

from cp_plugin.tools.draw.calls import Recording, record
from cp_plugin.tools.draw.cli import draw_method


def times_computed(recording: Recording) -> Counter[tuple[int, int, int]]:
    """(head, query, key) -> how often a kernel was given the visible pair."""
    seen = [set(recording.seen(query)) for query in range(recording.seq_length)]
    return Counter(
        (head, query, key)
        for call in recording.calls
        for query in call.queries.tolist()
        for key in seen[query].intersection(call.keys.tolist())
        for head in call.heads
    )


def all_pairs(recording: Recording) -> Counter[tuple[int, int, int]]:
    n = recording.seq_length
    return Counter(
        (head, query, key)
        for head in range(recording.setup.problem.heads)
        for query in range(n)
        for key in recording.seen(query)
    )


@pairs_at_night
@pytest.mark.parametrize(("provider", "layout"), METHODS, ids=["-".join(m) for m in METHODS])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_every_pair_of_every_head_is_computed_once(provider: str, layout: str, causal: bool) -> None:
    for size, kv_heads in ((1, 1), (4, 4), (8, 2)):
        got = record(provider, size, seq_length=32, heads=8, kv_heads=kv_heads, causal=causal, layout=layout)
        assert times_computed(got) == all_pairs(got), (size, kv_heads)
        assert sum(map(sum, got.work())) == len(all_pairs(got))
        assert sorted(p for held in got.held for p in held.tolist()) == list(range(32))


def test_a_dropped_block_shows() -> None:
    got = record(faulty("block"), 4, seq_length=32)
    assert len(times_computed(got)) < len(all_pairs(got))


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "c.png"):
        draw_method(tmp_path / name, "usp", 4, head_parallel=2)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()
    words = (tmp_path / "a.svg").read_text()
    assert "usp, 4 ranks (zigzag tokens, head parallel 2)" in words and "rank 2" in words and "head 3" in words


def test_refusals(tmp_path: Path) -> None:
    for provider, size, options, message in (
        ("ring", 16, {}, "16 ranks have no distinct colours"),
        ("attention2d", 4, {"grid": (3, 2)}, "--cp-grid 3x2 does not hold 4"),
        ("lasp2", 4, {}, r"'lasp2' is for linear layers.*cp-plugin traffic"),
    ):
        with pytest.raises(ValueError, match=message):
            draw_method(tmp_path / "x.png", provider, size, **options)
    for name, message in (("none/x.svg", "cannot be written"), ("x", "pictures are .svg, .png or .pdf files")):
        result = cp_plugin("draw", "--provider", "ring", "--plot", tmp_path / name)
        assert result.exit_code == 2 and message in result.output, result.output
    assert list(tmp_path.iterdir()) == []
