"""Layouts partition the sequence; invalid lengths are refused. Numbers of shards: ``test_fuzz_calls``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_plugin.engine.core.layout import LAYOUTS, join_adjacent, sort_positions
from cp_plugin.engine.placement.documents import get_layout

names = st.sampled_from(sorted(LAYOUTS))


@given(names, st.integers(1, 16), st.integers(1, 8))
def test_layouts_partition_the_sequence(name: str, size: int, times: int) -> None:
    layout = get_layout(name)
    seq_length = times * layout.divisor(size)
    owned = [p for i in range(size) for s in layout.segments(seq_length, size, i) for p in s]
    assert sorted(owned) == list(range(seq_length))
    assert {len(layout.positions(seq_length, size, i)) for i in range(size)} == {seq_length // size}


def test_the_drawn_layouts() -> None:
    """The drawing in the module docstring."""
    eight = {name: [LAYOUTS[name].positions(8, 2, i).tolist() for i in range(2)] for name in LAYOUTS}
    assert eight == {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
        "striped": [[0, 2, 4, 6], [1, 3, 5, 7]],
    }


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_shard_is_never_a_view(name: str) -> None:
    whole = torch.zeros(24)
    get_layout(name).shard(whole, 0, 3, 1).fill_(1.0)
    assert not whole.any()


def test_bad_input_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"--cp-layout zebra: choose one of contiguous, zigzag, striped"):
        get_layout("zebra")
    with pytest.raises(ValueError, match=r"30 cannot be split evenly across 4 .*zigzag.*multiple of 8 \(nearest: 32\)"):
        get_layout("zigzag").segments(30, 4, 0)
    with pytest.raises(ValueError, match="multiple of 4"):
        get_layout("striped").shard(torch.zeros(2, 7), 1, 4, 0)
    with pytest.raises(ValueError, match=r"index 4 is outside 0\.\.3"):
        get_layout("striped").segments(8, 4, 4)
    with pytest.raises(ValueError, match="sequence length 0"):
        get_layout("contiguous").segments(0, 2, 0)


def test_adjacent_segments_are_joined() -> None:
    assert join_adjacent([range(0, 4), range(4, 6), range(8, 9)]) == (range(0, 6), range(8, 9))
    assert join_adjacent([range(0, 8, 4), range(8, 16, 4)]) == (range(0, 16, 4),)
    assert join_adjacent([range(0, 8, 4), range(8, 10)]) == (range(0, 8, 4), range(8, 10))
    assert len(get_layout("zigzag").segments(16, 4, 3)) == 1, "the last rank's two chunks touch"


@given(data=st.data())
def test_sorted_shards_are_few_runs(data: st.DataObject) -> None:
    """Shards gathered in any order: the same positions sorted, in no more runs than needed."""
    layout = data.draw(st.sampled_from(list(LAYOUTS.values())))
    size = data.draw(st.integers(2, 8))
    n = 2 * size * data.draw(st.sampled_from([1, 2, 3, 8]))
    ranks = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True))
    segments = tuple(s for rank in ranks for s in layout.segments(n, size, rank))
    runs, order = sort_positions(segments, torch.device("cpu"))
    stored = [p for s in segments for p in s]
    expected = stored if order is None else [stored[i] for i in order]
    assert [p for run in runs for p in run] == expected
    assert order is None or (expected == sorted(stored) and len(runs) < len(segments))


def test_the_fewest_runs_are_found() -> None:
    """The gap between two runs belongs to neither; stripes that take turns are one run."""
    zigzag = LAYOUTS["zigzag"]
    segments = (*zigzag.segments(64, 4, 1), *zigzag.segments(64, 4, 0))
    assert sort_positions(segments, torch.device("cpu"))[0] == (range(16), range(48, 64))
    interleaved = (range(0, 8, 2), range(40, 48, 2), range(1, 8, 2), range(41, 48, 2))
    assert sort_positions(interleaved, torch.device("cpu"))[0] == (range(8), range(40, 48))
    stripes = tuple(s for rank in (6, 2, 0, 4) for s in LAYOUTS["striped"].segments(64, 8, rank))
    runs, order = sort_positions(stripes, torch.device("cpu"))
    assert runs == (range(0, 63, 2),) and order is not None
    assert torch.equal(torch.cat([torch.tensor(s) for s in stripes])[order], torch.arange(0, 64, 2))
