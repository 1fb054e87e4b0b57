"""Published figures: the data, what is fitted to which rows, how errors are counted, and ``docs/papers.md``."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from evidence import data, fitting, stacks
from evidence.calls import _skipped
from evidence.command import reproduce_and_show
from evidence.data import Row
from evidence.experiment import predict
from evidence.fitting import best, grid, misfit, with_a_paper_left_out, with_a_table_left_out
from evidence.overlapped import OVERLAPPED
from evidence.report import COLUMNS, cells
from evidence.reproduce import Aim, Reproduction, names, reproduce
from evidence.score import (
    PLANNER,
    Predicted,
    Share,
    in_order,
    median_error,
    neighbours,
    over_baseline,
    ratio_error,
)
from evidence.stacks import Machine, Stack
from nightly import nightly, slow
from oracle import Case, assert_close
from pydantic import ValidationError
from rich.console import Console
from thread_ranks import on_threads
from typer.testing import CliRunner

from cp_plugin.cli import plan as plan_command
from cp_plugin.cli.app import app
from cp_plugin.planner.errors import KNOWN_ERROR, OWN, SECONDS
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.events import Attention, Shape
from cp_plugin.planner.training.model import models

GENERATOR = "papers_page"
ROWS = {name: data.rows(name) for name in data.NAMES}
PUBLISHED = {
    "attention2d": (3, 42),
    "striped": (9, 150),
    "burst": (17, 235),
    "lasp2": (6, 117),
    "magiattention": (6, 96),
}
"""Tables and figures counted in the papers; "out of memory" and "not given" count as figures."""
ALL = [row for rows in ROWS.values() for row in rows]


def row(table: str, method: str, **where: object) -> Row:
    """The one row of a table with these fields."""
    fields = where.items()
    found = [r for r in ALL if (r.table, r.method) == (table, method) and all(getattr(r, k) == v for k, v in fields)]
    assert len(found) == 1
    return found[0]


def test_every_published_row_is_there() -> None:
    assert {name: (len({r.table for r in rows}), len(rows)) for name, rows in ROWS.items()} == PUBLISHED
    assert row("striped-tpu-v4-2x8", "Striped", model="striped-3b", length=786432).published == 1.65
    assert row("engine-main", "LoongTrain USP", model="burstengine-14b", devices=32).published == 99.73
    assert row("magi-causal-64", "ring p2p", work="attention backward").published == 457
    assert row("lasp2-6", "LASP-2", devices=16, length=524288).published is None


def test_bound_of_striped_attention_is_the_papers_formula() -> None:
    """Work of attention and of the rest, by the sequence-parallel degree."""
    bounded = [r for r in ROWS["striped"] if r.bound]
    for r in bounded:
        m = models()[r.model]
        rest = 2 * r.length * (4 * m.hidden**2 + 3 * m.hidden * m.ffn_hidden)
        attention = (2 if "a100" in r.cluster else 1) * 3.5 / 3 * 4 * r.length**2 * m.hidden
        ranks = r.devices // r.tensor
        bound = (rest + attention * (ranks - 0.5) / ranks) / (rest + attention / 2)
        assert bound == pytest.approx(r.bound, abs=0.02), r
    assert len(bounded) == 130


def test_names_of_counted_rows_resolve() -> None:
    for r in ALL:
        if r.counts:
            assert data.method(r, r.method) and r.cluster in data.paper(r.paper).clusters and r.model in models()
            assert not r.baseline or data.method(r, r.baseline)
        elif r.published is not None:
            assert r.mark or r.excuse


def test_contradictory_rows_do_not_count() -> None:
    marked = [r for r in ALL if r.mark.startswith("contradicts")]
    assert Counter(r.paper for r in marked) == {"striped": 10, "lasp2": 6}
    assert not any(r.counts or r.can_be_fitted for r in marked)


def tripled(rows: list[Row], *, table: str = "", paper: str = "") -> list[Row]:
    """With other published figures in one table or paper."""
    return [
        replace(r, published=3 * r.published) if r.published and (r.table == table or r.paper == paper) else r
        for r in rows
    ]


@nightly
def test_no_table_is_fitted_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> dict[str, list[object]]:
        by_table: dict[str, list[object]] = {}
        for p in reproduce(["magiattention"]).predicted:
            by_table.setdefault(p.row.table, []).append([p.values.get(way) for way in PLANNER])
        return by_table

    given, before = data.rows, found()
    monkeypatch.setattr(data, "rows", lambda name: tripled(given(name), table="magi-causal-8"))
    after = found()
    assert after["magi-causal-8"] == before["magi-causal-8"]
    assert after["magi-causal-64"] != before["magi-causal-64"], "it is fitted to the other one"


def test_no_paper_is_fitted_to_itself() -> None:
    few = [r for name in ("attention2d", "lasp2", "magiattention") for r in ROWS[name] if r.counts][::4]
    assert {r.paper for r in few} == {"attention2d", "lasp2", "magiattention"}
    found = with_a_paper_left_out("lasp2", few)
    assert with_a_paper_left_out("lasp2", tripled(few, paper="lasp2")) == found
    assert with_a_paper_left_out("lasp2", tripled(few, paper="magiattention")) != found


def test_nothing_is_fitted_to_assumed_methods_or_uncounted_rows() -> None:
    rows = ROWS["attention2d"]
    found = with_a_table_left_out("attention2d", "attention2d-a100", "a2d-64", rows)
    sure = [r for r in rows if r.method != "ATTENTION2D-O"]
    assert with_a_table_left_out("attention2d", "attention2d-a100", "a2d-64", sure) == found != ()
    marked = [replace(r, mark="contradicts: x") for r in rows]
    assert with_a_table_left_out("attention2d", "attention2d-a100", "a2d-64", marked) == ()


def test_fits_stay_in_the_plausible_range() -> None:
    for name in data.NAMES:
        for cluster, stack in data.paper(name).clusters.items():
            for fit, before in zip(stack.fit, stacks.assumed(stack), strict=True):
                low, high = fit.plausible
                assert low <= before <= high, (cluster, fit.parameter)
                assert all(low <= x <= high * (1 + 1e-9) for (x,) in grid([fit.plausible], (before,), 9))
                assert fit.parameter in stacks.PARAMETERS and fit.why
    assert all(low < high == 1.0 for low, high in (one.plausible for one in stacks.SHARED))
    with pytest.raises(ValidationError, match="no range of positive figures"):
        stacks.Fit(parameter="attention", plausible=(1e13, 1e12), why="")
    stack = data.paper("burst").clusters["burst-a100-pcie"]
    assert len(stack.fit) == stacks.MOST_FITTED == 2
    with pytest.raises(ValidationError, match="at most 2"):
        Stack(**stack.model_dump() | {"fit": [*stack.fit, stack.fit[0]]})


def ways(one: Row, published: float, zero_fit: float) -> Predicted:
    """The row with another published figure, predicted with zero fit."""
    return Predicted(replace(one, published=published), {"zero fit": zero_fit})


def test_errors_are_of_rows_that_count() -> None:
    one = row("burst-striped", "Burst, zigzag", length=262144)
    found = [ways(one, *pair) for pair in ((1.0, 1.1), (2.0, 1.0), (4.0, 4.0))]
    assert [p.error("zero fit") for p in found] == pytest.approx([0.1, -0.5, 0])
    assert median_error(found, "zero fit") == pytest.approx(0.1)
    assert median_error(
        [*found, *[ways(replace(one, mark="contradicts: x"), 1.0, 99.0)] * 3], "zero fit"
    ) == pytest.approx(0.1)
    assert median_error(found, "a paper left out") is None


def test_methods_within_a_tenth_are_not_ranked() -> None:
    one = row("engine-older", "DS-Ulysses", length=131072)
    a, b, c = (100.0, 90.0), (109.0, 80.0), (130.0, 140.0)
    assert in_order([ways(one, *x) for x in (a, b, c)], "zero fit") == Share(2, 2)
    assert in_order([ways(one, 100.0, 90.0), ways(one, 130.0, 80.0)], "zero fit") == Share(0, 1)
    assert in_order([ways(one, *a), ways(replace(one, length=1), *c)], "zero fit").all == 0
    speedup = row("a2d-16", "ATTENTION2D-NO", model="gpt3-760m", length=8192)
    assert in_order([ways(speedup, 2.0, 0.9)], "zero fit").all == 0, "its baseline is no second method"
    assert over_baseline([ways(speedup, 2.0, 0.9), ways(speedup, 1.5, 1.1)], "zero fit") == Share(1, 2)
    assert over_baseline([ways(speedup, 0.95, 1.1), ways(one, 2.0, 0.9)], "zero fit").all == 0


def test_ratio_errors() -> None:
    one = row("engine-older", "DS-Ulysses", length=131072)
    slow, fast = ways(one, 100.0, 200.0), ways(one, 120.0, 300.0)
    assert ratio_error([slow, fast], "zero fit") == ratio_error([fast, slow], "zero fit") == pytest.approx(0.25)
    memory = replace(one, figure="GB")
    assert ratio_error([ways(memory, 1.0, 1.0), ways(memory, 2.0, 2.0)], "zero fit") is None


def test_neighbours() -> None:
    one = row("striped-a100-s4", "Striped", model="striped-7b", length=131072)
    found = neighbours(one, ALL)
    assert found == {"copied: same table": 1.35, "copied: another table": 1.25}, (
        "as long: of 1B here, and there on 8 devices, too"
    )
    assert neighbours(row("burst-headline", "Burst"), ALL) == {}
    backward = row("magi-causal-8", "USP", work="attention backward")
    assert neighbours(backward, ALL) == {"copied: another table": 571}


def test_reproduction_passes_if_all_aims_are_reached() -> None:
    one = row("engine-older", "DS-Ulysses", length=131072)

    def of(*figures: tuple[float, float]) -> Reproduction:
        rows = (Predicted(replace(one, published=x), {"zero fit": y, "a paper left out": y}) for x, y in figures)
        return Reproduction(("burst",), tuple(rows), (), {})

    assert of((100.0, 109.0), (130.0, 125.0)).ok
    assert not of((100.0, 120.0), (130.0, 170.0)).ok
    assert not of((100.0, 109.0), (113.0, 108.0)).ok, "the order"
    assert not of().ok
    copied = Predicted(one, {"zero fit": 1.0, "a paper left out": 1.0, "copied: another table": one.published or 0.0})
    assert not Reproduction(("burst",), (copied,), (), {}).ok
    assert str(Aim("error", 0.123, 0.1)) == "FAIL error: 12.3 % (aim: at most 10.0 %, missed by 2.3 points)"
    assert str(Aim("order", 0.9, 0.85, least=True)) == "PASS order: 90.0 % (aim: at least 85.0 %)"


def test_grid_search_keeps_assumptions_that_rows_do_not_determine() -> None:
    one = row("engine-older", "DS-Ulysses", length=131072)
    rows = [replace(one, published=7.0, table="a"), replace(one, published=9.0, table="b")]
    points = grid([(1.0, 10.0), (1.0, 10.0)], (2.0, 3.0), 10)
    assert points[0] == (2.0, 3.0) and len(points) == 121
    first, second = best(rows, points, lambda r, at: at[0], lambda r: r.table)
    assert 7.0 <= first <= 9.0 and second == 3.0
    assert misfit([replace(one, published=1.0), replace(one, published=2.0)], [2.0, 1.0]) == pytest.approx(
        0.6931, abs=1e-4
    )

    rows = [replace(one, published=1.0, table="a")] * 9 + [replace(one, published=x, table=str(x)) for x in (4.0, 4.1)]
    assert best(rows, [(1.0,), (4.0,)], lambda r, at: at[0], lambda r: r.table) == (4.0,), "groups weigh the same"


def test_known_parameters_are_recovered() -> None:
    stack = data.paper("magiattention").clusters["magi-h100"]
    made = grid([fit.plausible for fit in stack.fit], stacks.assumed(stack), fitting.POINTS)[-12]
    rows = [r for r in ROWS["magiattention"] if r.table == "magi-causal-8" and r.counts]
    rows = [replace(r, published=predict(r, stacks.machine(stack, made))) for r in rows]
    assert with_a_table_left_out("magiattention", "magi-h100", "magi-causal-64", rows) == made


def test_skipped_tiles_cost_memory_traffic() -> None:
    machine = stacks.machine(data.paper("striped").clusters["striped-a100"])
    rate = machine.cluster.device.memory_bytes_per_s
    event = Attention("forward", (Shape(4096, 4096, 0),), 4096, 3, 64, 64, "float32")
    assert machine.kernel.block == (2048, 4096)
    assert _skipped(event, machine) == 0.0, "both tiles have visible pairs"
    hidden = event._replace(shapes=(Shape(4096, 4096, -2048),))
    assert _skipped(hidden, machine) == pytest.approx(3 * 2 * 4 * (4096 * 128 + 2048 * 64) / rate)
    back = hidden._replace(direction="backward")
    assert _skipped(back, machine) == pytest.approx(3 * 2 * 4 * (2 * 4096 * 128 + 2048 * 64) / rate)
    assert _skipped(hidden, replace(machine, visits_all_tiles=False)) == 0.0


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_overlapped_variant_computes_attention(size: int, causal: bool) -> None:
    case = Case(seq_length=8 * size, heads=2, kv_heads=2, causal=causal, batch=1)
    for result in on_threads(OVERLAPPED, size, case, grid=(int(size**0.5),) * 2, layout="striped"):
        assert_close(result, case.reference(), 1e-10, size)


def test_unknown_paper_is_refused_with_the_nearest() -> None:
    assert names("all") == data.NAMES and names("LASP2") == ("lasp2",)
    with pytest.raises(ValueError, match="did you mean striped"):
        names("stripd")


def test_command_without_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plan_command, "__file__", str(tmp_path / "cp_plugin/cli/plan.py"))
    done = CliRunner().invoke(app, ["plan", "--reproduce", "lasp2", "--reproduce", "burst"])
    assert done.exit_code == 2 and "run python ci/papers lasp2 burst in a checkout" in done.output


@nightly
def test_the_command_prints_the_summary_last_and_says_whether_it_passes(tmp_path: Path) -> None:
    console = Console(file=(tmp_path / "out").open("w"), width=200)
    ok = reproduce_and_show(["magiattention"], console, tmp_path)
    console.file.close()
    last = (tmp_path / "out").read_text().strip().splitlines()[-1]
    assert last == str(reproduce(["magiattention"])) and last.startswith("PASS" if ok else "FAIL")
    assert (tmp_path / "magiattention.svg").read_text().startswith("<?xml")


def test_quickest_section_is_up_to_date(page: ModuleType) -> None:
    assert page.has_section("magiattention"), "run python docs/generate.py"


def test_every_prediction_with_zero_fit_is_on_the_page(page: ModuleType) -> None:
    """No profile constant can change unnoticed."""
    from published_rows import rows_of

    for name in data.NAMES:
        for table in data.paper(name).tables:
            rows = [r for r in ROWS[name] if r.table == table.id]
            shown = [row["predicted"] for row in rows_of(name, table)]
            predicted = ({"zero fit": fitting.predicted(r)} if r.published and not r.excuse else {} for r in rows)
            found = (cells(Predicted(r, values)) for r, values in zip(rows, predicted, strict=True))
            assert shown == [cell[COLUMNS.index("predicted")] for cell in found], (name, table.id)


def test_other_pages_and_the_planner_quote_the_page() -> None:
    page, results, changes = (
        (Path(__file__).parents[2] / name).read_text() for name in ("docs/papers.md", "docs/results.md", "CHANGELOG.md")
    )
    error, pairs = (re.search(f"^- .*{text}", page, re.M) for text in (r"zero fit: (.+? %)", r"\((\d+ of \d+) pairs\)"))
    times = re.search(r"^\| all \| times \| (\d+) \| (.+? %)", page, re.M)
    absolute = re.search(r"^\| all \| absolute times \| \d+ \| (.+? %)", page, re.M)
    assert error and pairs and times and absolute and times[2] == error[1]
    assert f"| {error[1]}, {pairs[1]} |" in results
    text = " ".join(changes.split())
    assert (
        f"{times[1]} published times with a median error of {error[1]} with nothing fitted (absolute ones {absolute[1]}"
        in text
    )
    found = re.search(r"pairs\): median error ([\d.]+) % with zero fit", page)
    assert found is not None and math.ceil(float(found[1])) / 100 == KNOWN_ERROR
    assert math.ceil(float(absolute[1].removesuffix(" %"))) / 100 == SECONDS
    every = re.findall(r"^\| `(\w+)` \| \d+ \| ([\d.]+) % \|", page, re.M)
    own = {name: math.ceil(float(error)) / 100 for name, error in every}
    assert len(own) > 5 and {name: error for name, error in own.items() if error > KNOWN_ERROR} == OWN


@slow
def test_page_is_up_to_date(page: ModuleType) -> None:
    assert page.stale() == [], "run python docs/generate.py"


def swapped_links(m: Machine) -> Machine:
    intra, inter = m.cluster.intra.bytes_per_s, m.cluster.inter.bytes_per_s
    changed = hardware.override(m.cluster, intra={"bytes_per_s": inter}, inter={"bytes_per_s": intra})
    return replace(m, cluster=changed)


def swapped_kernels(m: Machine) -> Machine:
    kernel = m.kernel
    return stacks._with_kernel(m, kernel.model_copy(update={"forward": kernel.backward, "backward": kernel.forward}))


@nightly
@pytest.mark.parametrize("swap", [swapped_links, swapped_kernels])
def test_swapped_profile_constants_change_the_page(
    swap: object, page: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = stacks._assumed
    monkeypatch.setattr(stacks, "_assumed", lambda stack: swap(given(stack)) if "h100" in stack else given(stack))
    monkeypatch.setattr(fitting, "_machine", fitting._machine.__wrapped__)
    kept, anew = fitting.predicted, fitting.predicted.__wrapped__
    monkeypatch.setattr(
        fitting, "predicted", lambda row, *values: (anew if row.paper == "magiattention" else kept)(row, *values)
    )
    assert not page.has_section("magiattention")
