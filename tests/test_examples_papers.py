"""The papers' experiments: models, lengths and clusters as published, baselines that Megatron accepts, the pages."""

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
from cp_plugin.cli.examples.config import BASE, Example, Experiment, examples
from cp_plugin.cli.examples.dry_run import predict
from cp_plugin.megatron.planned.command import Planned, Refused
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.training.footprint import footprint
from cp_plugin.planner.training.model import model
from cp_plugin.planner.training.weights import parameters

DOCS = Path(__file__).parent.parent / "docs"
EXAMPLES = {one.name: one for one in examples()}
VARIANTS = [(name, variant) for name, one in EXAMPLES.items() for variant in one.variants]
EACH = pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=[f"{name}-{variant}" for name, variant in VARIANTS])
LASP2, MEMORY = ("lasp2-64xa100", "without-recomputation"), (1048576, 2097152)
MODULES = ("examples_page", "examples_predicted", "examples_tables", "published_rows")
type Read = dict[tuple[str, ...], Planned | Refused]


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
def read(pages: ModuleType) -> Read:
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


def planned(read: Read, *key: str) -> Planned:
    """A command that was accepted."""
    found = read[key]
    assert not isinstance(found, Refused), (key, found)
    return found


def experiment(name: str, variant: str = BASE) -> Experiment:
    return EXAMPLES[name].experiment(variant)


def test_all_nine_are_there_with_their_files() -> None:
    assert len(EXAMPLES) == 9
    for one in EXAMPLES.values():
        found = {path.name for path in one.folder.iterdir()}
        assert found == {"config.yaml", "README.md", "dry-run.txt", "scaled.txt"}


@EACH
def test_the_flags_describe_the_model_of_the_catalogue(name: str, variant: str, read: Read) -> None:
    """Except positions, which GPT-3 learns up to 2048, and layers with other attention, which a variant names."""
    found, of = planned(read, name, variant).model, experiment(name, variant)
    wanted = model(of.planner_model)
    changes = {"name": found.name, "source": found.source, "positions": 0, "qkv_bias": wanted.bias}
    changes["attention_pattern"] = str(of.flags.get("cp-layer-pattern", wanted.attention_pattern))
    changes["linear"] = str(of.flags.get("cp-linear-attention", wanted.linear))
    rotary = replace(wanted, **changes)
    assert found == rotary
    own = parameters(rotary).attention - parameters(wanted).attention  # of linear attention
    published = parameters(wanted).total - wanted.positions * wanted.hidden + own
    assert parameters(found).total == parameters(rotary).total == published


@EACH
def test_tables_and_lengths_are_the_published_ones(name: str, variant: str) -> None:
    of, base = experiment(name, variant), experiment(name)
    assert set(of.published) <= {table.id for table in data.paper(of.config.paper).tables}
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
    if name == "attention2d-64xh100":
        assert base.lengths == experiment("attention2d-64xa100").lengths, "as in the paper's other figures"


@EACH
def test_cluster_and_memory(name: str, variant: str, read: Read) -> None:
    """The memory is that without attention's working memory, which the page and the dry run add."""
    of, found = experiment(name, variant), planned(read, name, variant)
    parallel, profile = found.parallel, hardware.cluster(of.cluster.profile)
    assert profile.per_node == of.cluster.per_node
    assert parallel.devices == of.devices == parallel.context * parallel.tensor
    assert parallel.global_batch == 1
    longest = replace(parallel, seq_length=max(of.lengths))
    assert footprint(found.model, longest).total <= profile.device.memory_bytes


def test_lasp2_without_recomputation_runs_out_of_memory_where_table_6_does(read: Read) -> None:
    found = [predict(planned(read, *LASP2, str(length)), "dgx-a100", 8) for length in MEMORY]
    assert [one.fits for one in found] == [True, False]
    about = " ".join(EXAMPLES["lasp2-64xa100"].config.about.split())
    assert all(f"{one.priced.footprint.total / 1e9:.1f} GB" in about for one in found)
    published = {row.length: row for row in data.rows("lasp2") if row.table == "lasp2-6" and row.devices == 64}
    assert published[MEMORY[0]].published and published[MEMORY[1]].mark == "OOM"


def test_megatron_accepts_every_baseline(pages: ModuleType, read: Read) -> None:
    """Each method of each paper for which the page names options."""
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
    return dict(re.findall(r"^\| ([^|]+) \| `(--provider [^`]+)`", table, re.MULTILINE))


def test_the_pages_are_up_to_date(pages: ModuleType) -> None:
    """Except the planner's slow parts, which `python docs/generate.py --check` compares as well."""
    assert pages.stale(quick=True) == [], "run python docs/generate.py"


def test_recorded_runs_pass_and_unknown_tables_are_refused(pages: ModuleType) -> None:
    for example in EXAMPLES.values():
        for file, options in pages.RECORDS.items():
            record = (example.folder / file).read_text()
            assert record.startswith(f"$ cp-plugin example {example.name} {' '.join(options)}\n")
            assert f"({file})" in (example.folder / "README.md").read_text()
            assert re.search(rf"^PASS: {example.name} ", record, re.MULTILINE)
    with pytest.raises(ValueError, match=r"attention2d has no table 'a2d-65' \(it has a2d-16"):
        pages.published_rows.ratios("attention2d", ["a2d-65"], {64})
