"""``docs/measured.md`` is up to date, and bad measurement files are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from evidence import measured, measured_report
from evidence.measured import Errors
from evidence.measurements import Calls, Row
from nightly import nightly

from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.hardware import Cluster, override

ROOT = Path(__file__).parents[2]
GENERATOR = "measured_page"
GOOD = """
title = "T"
source = "S"
cluster = "dgx-h100"
[[messages]]
verb = "all_gather"
ranks = 2
kib = [1, 1024]
microseconds = [7, 13]
"""
CALL = """
microseconds = [7, 13]
[[calls]]
direction = "forward"
heads = 64
head_dim = 128
packed = 8192
tokens = [4096]
milliseconds = [0.8]
"""


def test_page_is_up_to_date(page: ModuleType) -> None:
    assert page.stale() == [], "run python docs/generate.py"
    pictures = {path.stem for path in page.PICTURES.glob("*.svg")}
    assert pictures == {name for name in measured.names() if not measured.source(name).not_predicted}


@nightly
def test_command_prints_the_errors_of_the_page() -> None:
    done = subprocess.run([sys.executable, "ci/papers", "raw"], cwd=ROOT, capture_output=True, text=True, check=True)
    printed = done.stdout.splitlines()[-len(measured_report.summary(measured.names())) :]
    on_page = (ROOT / "docs" / "measured.md").read_text()
    for line, cells in zip(printed, measured_report.summary(measured.names()), strict=True):
        assert line.split() == " ".join(cells).split()
        assert f"| {' | '.join(cells)} |" in on_page


def _exchanged(profile: Cluster) -> Cluster:
    return override(profile, intra=profile.inter.model_dump(), inter=profile.intra.model_dump())


def _turned(profile: Cluster) -> Cluster:
    kernels = {
        dtype: kernel.model_copy(update={"forward": kernel.backward, "backward": kernel.forward})
        for dtype, kernel in profile.device.attention.items()
    }
    return profile.model_copy(update={"device": profile.device.model_copy(update={"attention": kernels})})


@pytest.mark.parametrize(
    ("fault", "name"),
    [(_exchanged, "dgx-h100"), (_exchanged, "h200"), (_turned, "dgx-a100"), (_turned, "b200")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_two_figures_of_a_profile_that_are_swapped_change_the_page(
    page: ModuleType, monkeypatch: pytest.MonkeyPatch, fault, name: str
) -> None:
    true = hardware.cluster
    monkeypatch.setattr(hardware, "cluster", lambda asked: fault(true(asked)) if asked == name else true(asked))
    assert page.stale() == ["docs/measured.md", "docs/measured.json"]


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("[7, 13]", "[7]", "messages.0: all_gather: 1 values for 2 sizes"),
        ("[7, 13]", "[7, -13]", "messages.0.microseconds.1: Input should be greater than 0"),
        ("[7, 13]", "[7, inf]", "microseconds.1: Input should be a finite number"),
        ("[7, 13]", "[7, 0.000013]", "bytes per second; is the time in another unit?"),
        ("[1, 1024]", "[1024, 1]", "sizes must ascend"),
        ("all_gather", "gather", "messages.0.verb: Input should be 'all_gather'"),
        ("ranks = 2", "ranks = 1", "messages.0.ranks: Input should be greater than 1"),
        ("ranks = 2", "ranks = 16", "messages of 16 ranks: dgx-h100 has 8 on a node"),
        ("ranks = 2", "ranks = 2\nbusbw = 3", "messages.0.busbw: Extra inputs are not permitted"),
        ("dgx-h100", "dgx-h10", "unknown cluster 'dgx-h10'"),
        ('source = "S"', 'source = "S"\nnot_predicted = "why"', "says in not_predicted why it has none"),
        ("title", "title = [", "x.toml: "),
        ("microseconds = [7, 13]", CALL.replace("packed = 8192", "packed = 6000"), "no whole number of such documents"),
        ("microseconds = [7, 13]", CALL.replace("[0.8]", "[0.0008]"), "FLOPs per second; is the time in another unit?"),
    ],
)
def test_bad_rows_are_refused(tmp_path: Path, good: str, bad: str, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(GOOD)
    assert len(list(measured.load(path).rows("x"))) == 4
    path.write_text(GOOD.replace(good, bad))
    with pytest.raises(ValueError) as refused:
        measured.load(path)
    assert str(refused.value).startswith("x.toml: ") and message in str(refused.value)


def test_median_and_worst_error() -> None:
    def row(published: float, predicted: float) -> Row:
        return Row(
            source="x", panel="", series="", axis="", size=1, what="", unit="s",
            published=published, predicted=predicted, short=False, part="all",
        )  # fmt: skip

    found = Errors.of([row(1.0, 1.1), row(1.0, 0.5), row(2.0, 2.2)])
    assert str(found) == "10 % (-50 %)" and Errors.of([]) is None


def test_zigzag_part_is_that_of_an_average_rank() -> None:
    whole, part = (
        Calls(direction="forward", heads=1, head_dim=128, tokens=(4096,), parts=parts, milliseconds=(1.0,)).shape(4096)
        for parts in (1, 8)
    )
    assert (whole.rows, whole.keys, whole.diagonal) == (4096, 4096, 0)
    assert (part.rows, part.keys, part.diagonal) == (512, 2304, 1792)


def test_pack_of_two_documents_takes_twice_as_long() -> None:
    def seconds(packed: int) -> float:
        call = Calls(direction="forward", heads=8, head_dim=128, tokens=(4096,), packed=packed, milliseconds=(1.0,))
        (row,) = call.rows("x", hardware.cluster("dgx-h100"), "bfloat16")
        return row.predicted / 1e3

    launch = hardware.cluster("dgx-h100").device.attention["bfloat16"].forward.overhead_s
    assert seconds(8192) - launch == pytest.approx(2 * (seconds(0) - launch))
