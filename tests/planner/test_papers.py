"""Published figures: all there, as printed; what is fitted, what is held out, and how errors are counted."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from evidence import data, situations, stacks
from evidence.command import reproduce_and_show
from evidence.data import Row
from evidence.experiment import predict
from evidence.fitting import minimise, misfit
from evidence.overlapped import OVERLAPPED
from evidence.reproduce import Reproduction, fit, names, reproduce
from evidence.score import Predicted, fitted, median_error, pairs
from evidence.stacks import Stack
from oracle import Case, assert_close
from pydantic import ValidationError
from rich.console import Console
from thread_ranks import on_threads
from typer.testing import CliRunner

from cp_plugin.cli import plan as plan_command
from cp_plugin.cli.app import app
from cp_plugin.planner.model import models
from cp_plugin.planner.price import price

ROWS = {name: data.rows(name) for name in data.NAMES}
PUBLISHED = {  # figures of each table, by counting those in the papers; out of memory and not given are figures, too
    "a2d-16": 20, "a2d-64": 20, "a2d-abstract": 2,
    "striped-2": 6, "striped-a100-s2": 49, "striped-a100-s4": 21, "striped-a100-s8": 4, "striped-tpu-v3-s4": 8,
    "striped-tpu-v3-s2": 8, "striped-tpu-v4-2x8": 21, "striped-tpu-v4-4x4": 21, "ring-flash": 12,
    "first-token-7b": 35, "first-token-13b": 35, "burst-headline": 1, "burst-training-32": 16, "burst-training-8": 9,
    "burst-training-memory": 12, "engine-main": 28, "engine-memory": 20, "engine-ablation": 12,
    "engine-ablation-memory": 2, "engine-weak-scaling": 7, "engine-older": 12, "engine-kernels": 16,
    "engine-kernels-again": 12, "burst-striped-forward": 4, "burst-striped": 4, "burst-readme": 10,
    "lasp2-2": 7, "lasp2-2-hybrid": 6, "lasp2-3": 4, "lasp2-5": 4, "lasp2-6": 48, "lasp2-6-memory": 48,
    "magi-causal-8": 16, "magi-causal-64": 16, "magi-documents-8": 16, "magi-documents-64": 16, "usp-llama3": 9,
    "others": 23,
}  # fmt: skip
ALL = [row for rows in ROWS.values() for row in rows]


def row(table: str, method: str, **where: object) -> Row:
    """The one row of a table with these fields."""
    fields = where.items()
    found = [r for r in ALL if (r.table, r.method) == (table, method) and all(getattr(r, k) == v for k, v in fields)]
    assert len(found) == 1
    return found[0]


def test_every_published_row_is_there() -> None:
    assert Counter(r.table for r in ALL) == PUBLISHED


def test_figures_are_the_printed_ones() -> None:
    assert row("a2d-64", "ATTENTION2D-NO", model="gpt3-13b", length=32768).published == 4.99
    assert row("striped-a100-s8", "Striped", length=196608).published == 1.37
    assert row("striped-tpu-v4-2x8", "Striped", model="striped-3b", length=786432).published == 1.65
    assert row("engine-main", "LoongTrain USP", model="burstengine-14b", devices=32).published == 99.73
    assert row("first-token-13b", "Burst", length=262144).published == 78.80
    assert row("lasp2-6", "LASP-2", devices=128, length=2097152).published == 769030
    assert row("magi-causal-64", "ring p2p", work="attention backward").published == 457
    assert row("lasp2-6", "LASP-2", devices=16, length=524288).published is None


def test_the_theoretical_maximum_of_striped_attention_is_the_papers_formula() -> None:
    """Section 2.4 of the notes: work of attention and of the rest, by the sequence-parallel degree."""
    bounded = [r for r in ROWS["striped"] if r.bound]
    for r in bounded:
        m = models()[r.model]
        rest = 2 * r.length * (4 * m.hidden**2 + 3 * m.hidden * m.ffn_hidden)
        attention = (2 if "a100" in r.cluster else 1) * 3.5 / 3 * 4 * r.length**2 * m.hidden
        ranks = r.devices // r.tensor
        bound = (rest + attention * (ranks - 0.5) / ranks) / (rest + attention / 2)
        assert bound == pytest.approx(r.bound, abs=0.02), r
    assert len(bounded) == 130


def test_every_row_that_counts_can_be_predicted_by_name() -> None:
    for r in ALL:
        if r.counts:
            assert data.method(r, r.method) and r.cluster in data.paper(r.paper).clusters and r.model in models()
            assert not r.baseline or data.method(r, r.baseline)
        elif r.published is not None:
            assert r.mark or r.excuse


def test_rows_that_contradict_others_do_not_count() -> None:
    marked = [r for r in ALL if r.mark.startswith("contradicts")]
    assert Counter(r.table for r in marked) == {
        "striped-2": 1, "striped-tpu-v3-s4": 4, "striped-tpu-v3-s2": 4, "striped-tpu-v4-2x8": 1, "lasp2-3": 1,
        "lasp2-5": 4, "lasp2-6": 1,
    }  # fmt: skip
    assert not any(r.counts for r in marked)
    assert not any(fitted(marked))


def test_parameters_are_fitted_to_every_second_row_of_a_machine() -> None:
    rows = ROWS["burst"]
    chosen = fitted(rows)
    for cluster in data.paper("burst").clusters:
        own = [use for r, use in zip(rows, chosen, strict=True) if r.cluster == cluster and r.can_be_fitted]
        assert own == [i % 2 == 0 for i in range(len(own))]
    assert not any(use for r, use in zip(rows, chosen, strict=True) if not r.counts)


def test_nothing_is_fitted_to_a_method_of_which_a_part_is_assumed() -> None:
    rows = ROWS["attention2d"]
    assert {r.method for r, use in zip(rows, fitted(rows), strict=True) if use} == {"ATTENTION2D-NO"}


def test_at_most_two_parameters_of_a_machine() -> None:
    assert max(len(s.fit) for name in data.NAMES for s in data.paper(name).clusters.values()) == stacks.MOST_FITTED == 2
    stack = data.paper("burst").clusters["burst-a800"]
    with pytest.raises(ValidationError, match="at most 2"):
        Stack(**stack.model_dump() | {"fit": [*stack.fit, stack.fit[0]]})


def test_errors_are_of_rows_that_are_held_out_and_count() -> None:
    one = row("burst-striped", "Burst, zigzag", length=262144)
    rows = [replace(one, published=value) for value in (1.0, 2.0, 4.0)]
    found = [Predicted(r, v) for r, v in zip(rows, (1.1, 1.0, 4.0), strict=True)]
    assert [p.error for p in found] == pytest.approx([0.1, -0.5, 0])
    assert median_error(found) == pytest.approx(0.1)
    assert median_error([*found, Predicted(rows[0], 99.0, fitted=True)]) == pytest.approx(0.1)
    assert median_error([*found, *[Predicted(replace(one, mark="contradicts: x"), 99.0)] * 3]) == pytest.approx(0.1)


def test_pairs_are_ranked_where_methods_differ_by_more_than_a_tenth() -> None:
    one = row("engine-older", "DS-Ulysses", length=131072)
    a, b, c = (replace(one, published=value) for value in (100.0, 109.0, 130.0))
    right = [Predicted(a, 90.0), Predicted(b, 80.0), Predicted(c, 140.0)]
    assert (pairs(right, held_out=True).right, pairs(right, held_out=True).all) == (2, 2)
    wrong = [Predicted(a, 90.0), Predicted(c, 80.0)]
    assert (pairs(wrong, held_out=True).right, pairs(wrong, held_out=True).all) == (0, 1)
    elsewhere = [Predicted(a, 90.0), Predicted(replace(c, length=1), 80.0)]
    assert pairs(elsewhere, held_out=True).all == 0
    speedup = row("a2d-16", "ATTENTION2D-NO", model="gpt3-760m", length=8192)
    assert pairs([Predicted(speedup, 0.9)], held_out=True).all == 1
    assert pairs([Predicted(speedup, 0.9)], held_out=True).right == 0
    assert pairs([Predicted(speedup, 0.9, fitted=True)], held_out=True).all == 0


def test_a_reproduction_passes_by_both_limits() -> None:
    one = row("engine-older", "DS-Ulysses", length=131072)
    slow, fast = replace(one, published=100.0), replace(one, published=130.0)
    assert Reproduction(("burst",), (Predicted(slow, 110.0), Predicted(fast, 120.0)), ()).ok
    assert not Reproduction(("burst",), (Predicted(slow, 140.0), Predicted(fast, 190.0)), ()).ok
    assert not Reproduction(("burst",), (Predicted(slow, 111.0), Predicted(fast, 110.0)), ()).ok
    assert not Reproduction(("burst",), (), ()).ok


def test_the_error_without_any_fit_is_of_the_same_rows() -> None:
    one = row("engine-older", "DS-Ulysses", length=131072)
    rows = (Predicted(replace(one, published=100.0), 110.0, unfitted=150.0), Predicted(one, 1.0, fitted=True))
    found = Reproduction(("burst",), rows, ())
    assert (found.error, found.unfitted_error) == (pytest.approx(0.1), pytest.approx(0.5))


def test_fitting_finds_what_was_planted() -> None:
    found = minimise(lambda x: abs(x[0] / 3e9 - 1) + abs(x[1] / 2e13 - 1), [(1e9, 1e11), (1e12, 1e15)])
    assert found == pytest.approx((3e9, 2e13), rel=0.05)
    assert misfit([2.0, 1.0], [1.0, 2.0]) == pytest.approx(0.6931, abs=1e-4)


def test_a_parameter_is_found_again_from_rows_that_it_made() -> None:
    stack = data.paper("magiattention").clusters["magi-h100"]
    made = (5e14, 2e12)
    rows = [r for r in ROWS["magiattention"] if r.table == "magi-causal-8" and r.counts]
    rows = [replace(r, published=predict(r, stacks.machine(stack, made))) for r in rows]
    found = fit(stack, rows)
    assert found == pytest.approx(made, rel=0.1)
    machine = stacks.machine(stack, found)
    assert max(abs(predict(r, machine) / (r.published or 1) - 1) for r in rows) < 0.01


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_the_overlapped_variant_computes_attention(size: int, causal: bool) -> None:
    """It is for the planner alone, but what is priced is attention."""
    case = Case(seq_length=8 * size, heads=2, kv_heads=2, causal=causal, batch=1)
    for result in on_threads(OVERLAPPED, size, case, grid=(int(size**0.5),) * 2, layout="striped"):
        assert_close(result, case.reference(), 1e-10, size)


def test_a_name_that_is_no_paper_is_refused_with_the_nearest() -> None:
    assert names("all") == data.NAMES and names("LASP2") == ("lasp2",)
    with pytest.raises(ValueError, match="did you mean striped"):
        names("stripd")


def test_figures_beside_upstreams_are_simulated_with_its_recomputation_and_without() -> None:
    small = situations.Situation(model="llama3-8b", cluster="dgx-h100", devices=8, tokens=2**16)
    found = small.plan()
    assert not found.lost, "no lower bound is shown as a value"
    p2p = next(p for p in found.found if p.candidate.name == "upstream p2p")
    shape = replace(small.shape, recompute_attention=True)
    again = price(p2p.candidate, {}, found.model, shape, found.cluster).iteration.seconds
    kept = again - found.model.layers * p2p.main.forward_s
    total = found.best.iteration.seconds
    assert situations.row(small).endswith(f"| {again / total:.2f}x; {kept / total:.2f}x † |")
    assert replace(small, tokens=2**15).keeps and not small.keeps


def test_without_the_repository_the_command_says_where_the_figures_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plan_command, "__file__", str(tmp_path / "cp_plugin/cli/plan.py"))
    done = CliRunner().invoke(app, ["plan", "--reproduce", "lasp2", "--reproduce", "burst"])
    assert done.exit_code == 2 and "in a checkout of it: python ci/papers lasp2 burst" in done.output


def test_the_command_prints_the_summary_last_and_says_whether_it_passes(tmp_path: Path) -> None:
    console = Console(file=(tmp_path / "out").open("w"), width=200)
    ok = reproduce_and_show(["magiattention"], console, tmp_path)
    console.file.close()
    last = (tmp_path / "out").read_text().strip().splitlines()[-1]
    assert last == str(reproduce(["magiattention"])) and last.startswith("PASS" if ok else "FAIL")
    assert (tmp_path / "magiattention.svg").read_text().startswith("<?xml")


def test_the_page_has_what_the_code_gives_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the quickest paper; ``docs/generate.py --check`` compares the others."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    import papers_page

    assert papers_page.has_section("magiattention"), "run python docs/generate.py"
    sys.modules.pop("papers_page")
