"""Published figures: the data, how errors are counted, and ``docs/papers.md``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import papers_page
import pytest
from evidence import data, experiment
from evidence.data import Row
from evidence.experiment import predict
from evidence.overlapped import OVERLAPPED
from evidence.report import Aim, Predicted, aims
from nightly import nightly
from oracle import Case, assert_close
from thread_ranks import run_on_threads
from typer.testing import CliRunner

from cp_plugin.planner.errors import KNOWN_ERROR, OWN, SECONDS
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.training.model import models
from cp_plugin.tools import plan as plan_command
from cp_plugin.tools.app import app

ROWS = {name: data.rows(name) for name in data.NAMES}
PUBLISHED = {
    "attention2d": (3, 41),
    "striped": (9, 134),
    "burst": (14, 141),
    "lasp2": (5, 89),
    "magiattention": (3, 29),
}
"""Tables and figures with a prediction, counted in the papers."""
ALL = [row for rows in ROWS.values() for row in rows]


def row(table: str, method: str, **where: object) -> Row:
    """The one row of a table with these fields."""
    fields = where.items()
    matching = [r for r in ALL if (r.table, r.method) == (table, method) and all(getattr(r, k) == v for k, v in fields)]
    assert len(matching) == 1
    return matching[0]


def test_every_compared_row_is_there() -> None:
    assert data.names("all") == data.NAMES
    assert {name: (len({r.table for r in rows}), len(rows)) for name, rows in ROWS.items()} == PUBLISHED
    assert row("striped-tpu-v4-2x8", "Striped", model="striped-3b", length=786432).published == 1.65
    assert row("engine-main", "LoongTrain USP", model="burstengine-14b", devices=32).published == 99.73
    assert row("magi-causal-64", "ring p2p", work="attention backward").published == 457
    assert not [r for r in ROWS["lasp2"] if (r.table, r.devices, r.length) == ("lasp2-6", 16, 524288)], "out of memory"


def test_names_of_rows_resolve() -> None:
    """And every method and cluster has a row."""
    for r in ALL:
        assert data.method(r, r.method) and r.cluster in data.paper(r.paper).clusters and r.model in models()
        assert not r.baseline or data.method(r, r.baseline)
    for name, rows in ROWS.items():
        paper = data.paper(name)
        assert {n for r in rows for n in (r.method, r.baseline) if n} == set(paper.methods)
        assert {r.cluster for r in rows} == set(paper.clusters)


def as_if(one: Row, published: float, predicted: float) -> Predicted:
    """The row with another published figure and prediction."""
    return Predicted(replace(one, published=published), predicted)


def test_reproduction_passes_if_all_aims_are_reached() -> None:
    one = row("engine-older", "DS-Ulysses", length=131072)

    def reached(*figures: tuple[float, float]) -> list[bool]:
        return [aim.reached for aim in aims([as_if(one, *pair) for pair in figures])]

    assert reached((100.0, 109.0), (130.0, 125.0)) == [True, True]
    assert reached((100.0, 120.0), (130.0, 170.0)) == [False, True]
    assert reached((100.0, 109.0), (113.0, 108.0)) == [True, False]
    assert reached() == []
    assert str(Aim("error", 0.123, 0.1)) == "FAIL error: 12.3 % (aim: at most 10.0 %)"
    assert str(Aim("order", 0.9, 0.85, least=True)) == "PASS order: 90.0 % (aim: at least 85.0 %)"


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_overlapped_variant_computes_attention(size: int, causal: bool) -> None:
    case = Case(seq_length=8 * size, heads=2, kv_heads=2, causal=causal, batch=1)
    for result in run_on_threads(OVERLAPPED, size, case, grid=(int(size**0.5),) * 2, layout="striped"):
        assert_close(result, case.reference(), 1e-10, size)


def test_command_without_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plan_command, "__file__", str(tmp_path / "cp_plugin/tools/plan.py"))
    done = CliRunner().invoke(app, ["plan", "--reproduce", "lasp2", "--reproduce", "burst"])
    assert done.exit_code == 2 and "run it in a checkout" in done.output


@nightly
def test_every_prediction_is_on_the_page() -> None:
    """No profile constant, prediction or error can change unnoticed."""
    assert all(path.read_text() == text for path, text in papers_page.files().items()), "run python docs/generate.py"


def test_the_command_prints_the_summary_last_and_says_whether_it_passes() -> None:
    done = CliRunner().invoke(app, ["plan", "--reproduce", "MagiAttention"])
    assert done.exit_code == 1, done.output
    assert done.output.strip().splitlines()[-1] == "FAIL magiattention: 1 of 2 aims reached"


def swapped_links(c: Cluster) -> Cluster:
    intra, inter = c.intra.bytes_per_s, c.inter.bytes_per_s
    return hardware.override(c, intra={"bytes_per_s": inter}, inter={"bytes_per_s": intra})


def swapped_kernels(c: Cluster) -> Cluster:
    kernel = c.device.attention["bfloat16"]
    turned = {"forward": kernel.backward.model_dump(), "backward": kernel.forward.model_dump()}
    return hardware.override(c, device={"attention": {"bfloat16": turned}})


@pytest.mark.parametrize("swap", [swapped_links, swapped_kernels])
def test_two_figures_of_a_profile_that_are_swapped_change_the_page(
    swap: Callable[[Cluster], Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By more than the page rounds away."""
    one = row("magi-causal-64", "USP", work="attention forward")
    true, shown = experiment.cluster_of, Predicted(one, predict(one)).error
    monkeypatch.setattr(experiment, "cluster_of", lambda stack: swap(true(stack)))
    assert abs(Predicted(one, predict(one)).error - shown) > 0.01


def test_other_pages_and_the_planner_quote_the_page() -> None:
    page, results, changes = (
        (Path(__file__).parents[2] / name).read_text() for name in ("docs/papers.md", "docs/results.md", "CHANGELOG.md")
    )
    error, pairs = (re.search(f"^- .*{text}", page, re.M) for text in (r"of times: (.+? %)", r"\((\d+ of \d+) pairs\)"))
    times = re.search(r"^\| all \| times \| (\d+) \| (.+? %)", page, re.M)
    absolute = re.search(r"^\| all \| absolute times \| \d+ \| (.+? %)", page, re.M)
    assert error and pairs and times and absolute and times[2] == error[1]
    assert f"| {error[1]}, {pairs[1]} |" in results
    text = " ".join(changes.split())
    assert (
        f"{times[1]} published times with a median error of {error[1]} with nothing fitted (absolute ones {absolute[1]}"
        in text
    )
    ratios = re.search(r"^\| all \| \d+ \| \d+ of \d+ \| ([\d.]+) % \|$", page, re.M)
    assert ratios is not None and math.ceil(float(ratios[1])) / 100 == KNOWN_ERROR
    assert math.ceil(float(absolute[1].removesuffix(" %"))) / 100 == SECONDS
    every = re.findall(r"^\| `(\w+)` \| \d+ \|.*\| ([\d.]+) % \|$", page, re.M)
    own = {name: math.ceil(float(error)) / 100 for name, error in every}
    assert len(own) > 5 and {name: error for name, error in own.items() if error > KNOWN_ERROR} == OWN
