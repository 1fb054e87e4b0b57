"""The papers' experiments: models, lengths and clusters as published, in flags that Megatron accepts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from evidence import data

from cp_plugin.engine.attention.calls import settled
from cp_plugin.engine.methods import registry as providers
from cp_plugin.megatron.planned.command import SECONDS, with_arguments
from cp_plugin.megatron.planned.sizes import from_args
from cp_plugin.planner.candidates import Candidate
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.price import place_on, price
from cp_plugin.planner.training.footprint import footprint, whole
from cp_plugin.planner.training.model import LINEAR, model
from cp_plugin.planner.training.parallel import problem
from cp_plugin.planner.training.weights import attention
from cp_plugin.testing.launch import run_ranks
from cp_plugin.tools.examples.config import BASE, experiment, load, names, words

PAGE = Path(__file__).parents[2] / "docs" / "examples.md"
VARIANTS = [(name, variant) for name in names() for variant in load(name)]
EACH = pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=[f"{name}-{variant}" for name, variant in VARIANTS])
LASP2, MEMORY = ("lasp2-64xa100", "without-recomputation"), (1048576, 2097152)
type Read = dict[tuple[str, ...], tuple | ValueError]


@pytest.fixture(scope="module")
def read() -> Read:
    """What Megatron makes of all commands: of (example, variant), and of (example, variant, length)."""
    commands = {key: (experiment(*key).with_length(), experiment(*key).devices) for key in VARIANTS}
    for length in MEMORY:
        flags, devices = commands[LASP2]
        commands[*LASP2, str(length)] = (flags | {"seq-length": length, "max-position-embeddings": length}, devices)
    jobs = [([word for line in words(flags) for word in line], devices) for flags, devices in commands.values()]
    (results,) = run_ranks(_read, 1, args=(jobs,), timeout=SECONDS)  # importing Megatron takes most of the time
    return dict(zip(commands, results, strict=True))


def _read(jobs: list[tuple[list[str], int]]) -> list[tuple | ValueError]:
    results = []
    for flags, devices in jobs:
        os.environ["WORLD_SIZE"] = str(devices)
        results.append(with_arguments(flags, lambda args, settings: (*from_args(args, settings), settings)))
    return results


def planned(read: Read, *key: str) -> tuple:
    """The model, parallel sizes and settings of a command that was accepted."""
    result = read[key]
    assert not isinstance(result, ValueError), (key, result)
    return result


@EACH
def test_the_flags_describe_the_model_of_the_catalogue(name: str, variant: str, read: Read) -> None:
    """Except positions, which GPT-3 learns up to 2048, and layers with other attention, which a variant names."""
    parsed, of = planned(read, name, variant)[0], experiment(name, variant)
    wanted = model(of.planner_model)
    changes = {"name": parsed.name, "source": parsed.source, "positions": 0, "qkv_bias": wanted.bias}
    changes["attention_pattern"] = str(of.flags.get("cp-layer-pattern", wanted.attention_pattern))
    changes["linear"] = str(of.flags.get("cp-linear-attention", wanted.linear))
    rotary = replace(wanted, **changes)
    assert parsed == rotary
    own = sum(attention(rotary, n).total - attention(wanted, n).total for n in rotary.all_layers)  # of linear ones
    published = whole(wanted).total - wanted.positions * wanted.hidden + own
    assert whole(parsed).total == whole(rotary).total == published


@EACH
def test_tables_and_lengths_are_the_published_ones(name: str, variant: str) -> None:
    of, base = experiment(name, variant), experiment(name)
    assert set(of.published) <= {table.id for table in data.paper(of.paper).tables}
    tensor = int(str(of.flags.get("tensor-model-parallel-size", 1)))
    published = {
        said["length"]
        for table in data.paper(of.paper).tables
        if table.id in of.published and table.id != "a2d-abstract"  # which does not say of what length its figure is
        for _, said, value in data.figures(table)
        if value not in ("OOM", "not given")
        if (said["devices"], said.get("tensor", 1), said["model"]) == (of.devices, tensor, of.planner_model)
    }
    assert set(of.lengths) == (published or set(base.lengths))
    if not published:
        assert base.published == ["a2d-abstract"] or variant != BASE
    if name == "attention2d-64xh100":
        assert base.lengths == experiment("attention2d-64xa100").lengths, "as in the paper's other figures"


@EACH
def test_cluster_and_memory(name: str, variant: str, read: Read) -> None:
    """The memory is that without attention's working memory; the page has the numbers of devices."""
    base = experiment(name)
    assert f"/{name}/config.yaml): {base.title} | {base.devices} |" in PAGE.read_text()
    of, (parsed, parallel, _) = experiment(name, variant), planned(read, name, variant)
    profile = hardware.cluster(of.cluster.profile)
    assert profile.per_node == of.cluster.per_node
    assert parallel.devices == of.devices == parallel.context * parallel.tensor
    assert parallel.global_batch == 1
    longest = replace(parallel, seq_length=max(of.lengths))
    assert footprint(parsed, longest).total <= profile.device.memory_bytes


def test_lasp2_without_recomputation_runs_out_of_memory_where_table_6_does(read: Read) -> None:
    cluster, totals = hardware.cluster("dgx-a100"), []
    for length in MEMORY:
        of, parallel, settings = planned(read, *LASP2, str(length))
        its = place_on(problem(of, parallel, LINEAR), cluster, parallel.tensor)
        setup = settled(providers.get(settings.linear.provider), its, settings.linear.options)
        one = Candidate(name=setup.provider.name, setup=setup, flags="")
        totals.append(price(one, of, parallel, cluster).footprint.total)
    assert [total <= cluster.device.memory_bytes for total in totals] == [True, False]
    about = " ".join(experiment("lasp2-64xa100").about.split())
    assert all(f"{total / 1e9:.1f} GB" in about for total in totals)
    (table,) = (table for table in data.paper("lasp2").tables if table.id == "lasp2-6")
    published = {said["length"]: value for _, said, value in data.figures(table) if said["devices"] == 64}
    assert published[MEMORY[0]] != "OOM" and published[MEMORY[1]] == "OOM"
