"""The layout picture is drawn from the layouts' own tiles, and its numbers are the theory's."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cp_plugin.cli import app
from cp_plugin.draw import critical_path, draw_layouts, ring_work
from cp_plugin.layout import LAYOUTS


def test_all_work_is_drawn() -> None:
    for layout in LAYOUTS.values():
        assert sum(map(sum, ring_work(layout, 4, 64))) == 64 * 65 // 2


def test_striped_and_zigzag_balance_what_the_contiguous_ring_does_not() -> None:
    """Striped Attention, section 3: speedup towards 2 - 1/P over the contiguous ring."""
    for size, limit in ((2, 1.5), (4, 1.75), (8, 1.875)):
        ring = critical_path(ring_work(LAYOUTS["contiguous"], size, 4096))
        for balanced in ("striped", "zigzag"):
            speedup = ring / critical_path(ring_work(LAYOUTS[balanced], size, 4096))
            assert limit - 0.01 <= speedup <= limit + 0.01, (balanced, size, speedup)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_command_writes_a_picture(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"layouts.{suffix}"
    result = CliRunner().invoke(app, ["draw", str(path), "--ranks", "2"])
    assert result.exit_code == 0, result.output
    start = path.read_bytes()[:100]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in start


def test_too_many_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="16 ranks cannot be told apart"):
        draw_layouts(tmp_path / "x.png", size=16)
