"""The papers' experiments: the catalogue's models, the published lengths, baselines that Megatron takes, the pages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from evidence import data
from typer.testing import CliRunner

from cp_plugin.cli import app as cli
from cp_plugin.cli.examples.command import Changes, command
from cp_plugin.cli.examples.config import BASE, Example, Experiment, examples, names
from cp_plugin.cli.examples.predicted import predict
from cp_plugin.megatron.planned.command import Planned, Refused
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.training.footprint import footprint
from cp_plugin.planner.training.model import Model, model
from cp_plugin.planner.training.weights import parameters

DOCS = Path(__file__).parent.parent / "docs"
NAMES = {
    *("attention2d-64xa100", "attention2d-64xh100", "striped-8xa100", "striped-16", "burst-8xa100", "burst-32xa100"),
    *("burstengine-32xa800", "burstengine-64xa800", "lasp2-64xa100"),
}
EXAMPLES = {one.name: one for one in examples()}
VARIANTS = [(name, variant) for name, one in EXAMPLES.items() for variant in one.variants]
EACH = pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=[f"{name}-{variant}" for name, variant in VARIANTS])
LASP2, MEMORY = ("lasp2-64xa100", "without-recomputation"), (1048576, 2097152)
MODULES = ("examples_page", "examples_predicted", "examples_tables", "published_rows")


@pytest.fixture(scope="module")
def pages() -> Iterator[ModuleType]:
    """``docs/examples_page.py``."""
    sys.path.insert(0, str(DOCS))
    import examples_page

    yield examples_page
    sys.path.remove(str(DOCS))
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def read(pages: ModuleType) -> dict[tuple[str, ...], Planned | Refused]:
    """What Megatron makes of all commands: of (example, variant), (example, variant, length), (example, options)."""
    import examples_predicted

    asked = {(name, variant): command(EXAMPLES[name], variant) for name, variant in VARIANTS}
    jobs = {key: (one.flags, one.devices) for key, one in asked.items()}
    for length in MEMORY:
        one = command(EXAMPLES[LASP2[0]], LASP2[1], changes=Changes(more=("--seq-length", str(length))))
        jobs[*LASP2, str(length)] = (one.flags, one.devices)
    for example in EXAMPLES.values():
        for options in _baselines(pages, example).values():
            run = CliRunner().invoke(cli.app, ["example", example.name, "--print", "flags", *options.split()])
            assert run.exit_code == 0, (example.name, options, run.output)
            jobs[example.name, options] = (run.stdout.split(), example.config.cluster.devices)
    return dict(zip(jobs, examples_predicted.read_flags(list(jobs.values())), strict=True))


def planned(read: dict[tuple[str, ...], Planned | Refused], *key: str) -> Planned:
    """What was not refused."""
    found = read[key]
    assert not isinstance(found, Refused), (key, found)
    return found


def experiment(name: str, variant: str = BASE) -> Experiment:
    return EXAMPLES[name].experiment(variant)


def test_all_nine_are_there_with_their_files() -> None:
    assert set(names()) == NAMES
    for one in EXAMPLES.values():
        found = {path.name for path in one.folder.iterdir()}
        assert found == {"config.yaml", "README.md", "dry-run.txt", "scaled.txt"}


@EACH
def test_the_flags_model_is_the_catalogues(
    name: str, variant: str, read: dict[tuple[str, ...], Planned | Refused]
) -> None:
    """But for positions, which GPT-3 learns up to 2048, and layers with other attention, which a variant names."""
    found, of = planned(read, name, variant).model, experiment(name, variant)
    wanted = model(of.planner_model)
    pattern = of.flags.get("cp-layer-pattern", wanted.attention_pattern)
    kind = of.flags.get("cp-linear-attention", wanted.linear)
    rotary = replace(
        wanted,
        name=found.name,
        source=found.source,
        positions=0,
        qkv_bias=wanted.bias,
        attention_pattern=str(pattern),
        linear=str(kind),
    )
    assert found == rotary
    assert parameters(found).total == parameters(rotary).total == _published_parameters(wanted, rotary)


def _published_parameters(wanted: Model, rotary: Model) -> int:
    """The catalogue's count without learned positions, with what other linear attention has of its own."""
    own = parameters(rotary).attention - parameters(wanted).attention
    return parameters(wanted).total - wanted.positions * wanted.hidden + own


@EACH
def test_the_published_tables_exist(name: str, variant: str) -> None:
    of = experiment(name, variant)
    known = {table.id for table in data.paper(of.config.paper).tables}
    assert set(of.published) <= known


@EACH
def test_the_lengths_are_the_published_ones(name: str, variant: str) -> None:
    of, base = experiment(name, variant), experiment(name)
    tensor = int(str(of.flags.get("tensor-model-parallel-size", 1)))
    found = {
        row.length
        for row in data.rows(of.config.paper)
        if row.table in of.published and row.published is not None and row.length
        if (row.devices, row.tensor) == (of.devices, tensor) and row.model == of.planner_model
        if row.table != "a2d-abstract"  # which does not say of what length its figure is
    }
    assert set(of.lengths) == (found or set(base.lengths))
    if not found:
        assert base.published == ["a2d-abstract"] or variant != BASE


def test_the_h100s_lengths_are_those_of_the_other_figures_of_the_paper() -> None:
    assert experiment("attention2d-64xh100").lengths == experiment("attention2d-64xa100").lengths


@EACH
def test_the_cluster_is_the_profiles(name: str, variant: str, read: dict[tuple[str, ...], Planned | Refused]) -> None:
    of, parallel = experiment(name, variant), planned(read, name, variant).parallel
    assert hardware.cluster(of.cluster.profile).per_node == of.cluster.per_node
    assert parallel.devices == of.devices == parallel.context * parallel.tensor
    assert parallel.global_batch == 1


@EACH
def test_every_length_fits_the_memory(name: str, variant: str, read: dict[tuple[str, ...], Planned | Refused]) -> None:
    """Without what attention makes on the way, which the page and the dry run add."""
    of, found = experiment(name, variant), planned(read, name, variant)
    has = hardware.cluster(of.cluster.profile).device.memory_bytes
    longest = replace(found.parallel, seq_length=max(of.lengths))
    assert footprint(found.model, longest).total <= has


def test_lasp2_without_recomputation_runs_out_of_memory_where_table_6_does(
    read: dict[tuple[str, ...], Planned | Refused],
) -> None:
    found = [predict(planned(read, *LASP2, str(length)), "dgx-a100", 8) for length in MEMORY]
    assert [one.fits for one in found] == [True, False]
    about = " ".join(EXAMPLES["lasp2-64xa100"].config.about.split())
    assert all(f"{one.priced.footprint.total / 1e9:.1f} GB" in about for one in found)
    published = {row.length: row for row in data.rows("lasp2") if row.table == "lasp2-6" and row.devices == 64}
    assert published[MEMORY[0]].published and published[MEMORY[1]].mark == "OOM"


def test_a_baseline_is_a_command_that_megatron_accepts(
    pages: ModuleType, read: dict[tuple[str, ...], Planned | Refused]
) -> None:
    """Each method of each paper for which the page names options: by that provider, or without one."""
    seen = set()
    for example in EXAMPLES.values():
        for options in _baselines(pages, example).values():
            found, words = planned(read, example.name, options), options.split()
            linear = found.settings.linear
            assert words[1] == (linear.provider if linear else found.settings.provider)
            seen.add(words[1])
    assert seen == {"upstream", "ring", "ulysses", "double_ring", "burst", "lasp1", "linear_ring"}


def _baselines(pages: ModuleType, example: Example) -> dict[str, str]:
    """Method -> the options on the page."""
    table = pages.baselines(example)
    rows = re.findall(r"^\| ([^|]+) \| `(--provider [^`]+)`", table, re.MULTILINE)
    return dict(rows)


def test_the_pages_are_up_to_date(pages: ModuleType) -> None:
    """All but what the planner takes long for, which `python docs/generate.py --check` compares, too."""
    assert pages.stale(quick=True) == [], "run python docs/examples_page.py"


def test_a_page_shows_what_is_published_and_what_both_runs_print(pages: ModuleType) -> None:
    for example in EXAMPLES.values():
        page = (example.folder / "README.md").read_text()
        for file, options in pages.RECORDS.items():
            record = (example.folder / file).read_text()
            assert record.startswith(f"$ cp-plugin example {example.name} {' '.join(options)}\n") and record in page
            assert re.search(rf"^PASS: {example.name} ", record, re.MULTILINE)
        for table in {one for variant in example.variants for one in example.experiment(variant).published}:
            (where,) = [t.where for t in data.paper(example.config.paper).tables if t.id == table]
            assert f"**{where}**" in page


def test_a_table_that_the_papers_page_lacks_is_refused(pages: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"attention2d has no table 'a2d-65' \(it has a2d-16"):
        pages.published_rows.shown("attention2d", ["a2d-65"], {64})
