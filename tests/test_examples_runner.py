"""Examples: configurations, the flags that follow, resizing, scaled runs, and faulty process groups."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cp_plugin.cli.app import app
from cp_plugin.cli.examples import config, groups
from cp_plugin.cli.examples.command import Changes, Command, command, resized, scaled_shape
from cp_plugin.cli.examples.config import BASE, load
from cp_plugin.cli.examples.scaled import FIRST_STEP, HALF, scaled
from cp_plugin.cli.examples.sizes import usable
from cp_plugin.cli.examples.training import Iteration, disagreements, not_falling, read_log
from cp_plugin.comm import axis_groups, coordinates
from cp_plugin.core.options import Options
from cp_plugin.megatron.planned_groups import MEGATRONS, Group, Member

PLAIN = {"attention-dropout": 0, "hidden-dropout": 0, "position-embedding-type": "rope"}
GRID: dict[str, Any] = {
    "title": "a grid",
    "about": "what it shows",
    "paper": "attention2d",
    "cluster": {"profile": "dgx-a100", "nodes": 2, "per_node": 8},
    "model": {"num-layers": 4, "hidden-size": 64, "num-attention-heads": 16, "vocab-size": 257, **PLAIN},
    "parallel": {"context-parallel-size": 16, "cp-provider": "attention2d", "cp-grid": "4x4"},
    "training": {"bf16": True, "micro-batch-size": 1, "global-batch-size": 1, "lr": 0.1, "train-iters": 10},
    "lengths": [1024, 4096],
    "variants": {
        "fp8": {"parallel": {"cp-fp8": "comm"}, "lengths": [2048]},
        "1/4": {"training": {"bf16": False}, "cluster": {"nodes": 4}, "parallel": {"context-parallel-size": 32}},
    },
    "scaled": {"seq-length": 128, "model": {"num-layers": 2, "vocab-size": None}},
}
LINEAR = {"context-parallel-size": 16, "cp-linear-attention": "gla"}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., str]:
    """Writes GRID with changes to a folder; returns its path."""

    def make(**changes: Any) -> str:
        found = {name: value for name, value in {**GRID, **changes}.items() if value is not None}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(found, sort_keys=False))
        return str(tmp_path)

    return make


def test_an_example_in_a_folder(folder: Callable[..., str]) -> None:
    example = load(folder())
    assert example.variants == [BASE, "fp8", "1/4"]
    flags = command(example).flags
    assert " ".join(flags).endswith("--seq-length 1024 --max-position-embeddings 1024")
    assert "--bf16" in flags and flags[flags.index("--cp-grid") + 1] == "4x4"
    other = command(example, "1/4")
    assert "--bf16" not in other.flags and other.devices == 32
    assert command(example, "fp8").seq_length == 2048 and command(example, "FP8").experiment.variant == "fp8"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lenghts": [1]}, "lenghts: unknown field: did you mean lengths"),
        ({"variants": {"x": {"modell": {}}}}, r"variants.x.modell: unknown field: did you mean model"),
        ({"training": {"num-layers": 2}}, "num-layers is in both model and training: write it once"),
        ({"training": {"--lr": 1}}, "--lr: write the flag without leading dashes"),
        ({"training": {"global_batch_size": 1}}, "global_batch_size: write the flag without leading dashes"),
        ({"cluster": {**GRID["cluster"], "nodes": 0}}, "cluster.nodes: .*greater than or equal to 1"),
        ({"lengths": []}, "lengths: .*at least 1"),
        ({"parallel": {"cp-provider": "ring"}}, "parallel: context-parallel-size is missing"),
        ({"model": {"num-layers": 2}}, "model: vocab-size is missing"),
        ({"variants": {"base": {}}}, "base stands for the example without a variant"),
        ({"title": None}, "title: Field required"),
        ({"lengths": [0]}, "lengths.0: .*greater than or equal to 1"),
        ({"lengths": [True]}, "lengths.0: .*valid integer"),
        ({"cluster": {**GRID["cluster"], "nodes": "2"}}, "cluster.nodes: .*valid integer"),
        ({"data": 0}, "data: .*valid dictionary"),
        ({"model": {"vocab-size": 9, "num-layers": -1}}, "model: num-layers -1: write a whole number, 1 or more"),
        ({"model": {"vocab-size": 9, "num-layers": False}}, "num-layers: there is no inherited value to remove"),
        ({"model": {"vocab-size": 9, "hidden-size": "8"}}, "model: hidden-size 8: write a whole number, 1 or more"),
        ({"training": {"lr": float("nan")}}, "training.lr.*finite number"),
    ],
)
def test_invalid_configurations(folder: Callable[..., str], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(folder(**changes))


def test_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown example 'lasp2': did you mean lasp2-64xa100\?"):
        load("lasp2")
    with pytest.raises(ValueError, match=r"this folder has no config.yaml"):
        load(str(tmp_path))
    for text, message in (
        ("title: [", r"config.yaml is not valid YAML: .*line 1"),
        ("only words", "fields are missing: title"),
        ("title: a\ntitle: b", r"config.yaml is not valid YAML: duplicate key title"),
    ):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ValueError, match=message):
            load(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"unknown example ''"):
        load("")


def test_another_method(folder: Callable[..., str]) -> None:
    example = load(folder())
    ring = command(example, changes=Changes(provider="ring", options=Options(layout="zigzag", head_parallel=2)))
    ours = {flag: value for flag, value in ring.values.items() if flag.startswith("cp-")}
    assert ours == {"cp-provider": "ring", "cp-layout": "zigzag", "cp-head-parallel": 2}
    assert command(example, changes=Changes(options=Options(grid=(2, 8)))).value("cp-grid") == "2x8"
    linear = load(folder(parallel=LINEAR))
    assert command(linear, changes=Changes(provider="lasp1")).value("cp-linear-provider") == "lasp1"


def test_more_flags(folder: Callable[..., str]) -> None:
    more = ("--lr", "0.1", "--num-layers=8", "--context-parallel-size", "4", "--moe-layer-freq", "1", "0")
    found = command(load(folder()), changes=Changes(more=more))
    assert found.value("num-layers") == 8 and found.size("context-parallel-size") == 4
    assert found.data_parallel == 4 and found.flags.count("--num-layers") == 1
    assert found.value("lr") == "0.1" and found.value("moe-layer-freq") == [1, 0]
    assert command(load(folder()), changes=Changes(more=("--seq-length", "5000"))).seq_length == 5000


@pytest.mark.parametrize(
    ("parallel", "variant", "seq_length", "changes", "message"),
    [
        (None, "fp9", None, {}, r"unknown variant of .* 'fp9': did you mean fp8\?"),
        (None, None, 5000, {}, r"--seq-length 5000: .* has 1024, 4096 \(nearest: 4096\); pass any other"),
        (None, None, None, {"provider": "rink"}, r"--provider rink: did you mean ring"),
        (None, None, None, {"more": ("0.1",)}, r"0\.1: only Megatron's flags may follow --"),
        (
            LINEAR,
            None,
            None,
            {"provider": "ring"},
            "the layers have linear attention; use one of lasp2, linear_ring, zeco, lasp1",
        ),
        (LINEAR, None, None, {"options": Options(intra_size=2)}, "--intra-size has no effect: all layers have linear"),
        ({**LINEAR, "cp-linear-attention": 1e9}, None, None, {"nodes": 1}, r"attention 1000000000\.0: choose one of"),
    ],
)
def test_refusals(
    folder: Callable[..., str], parallel: Any, variant: Any, seq_length: Any, changes: Any, message: str
) -> None:
    example = load(folder(**({} if parallel is None else {"parallel": parallel})))
    with pytest.raises(ValueError, match=message):
        usable(example, variant, seq_length, Changes(**changes))


@pytest.mark.parametrize(
    ("sizes", "ranks", "shape"),
    [
        *(((8, 8), 64, (8, 8)), ((8, 8), 8, (2, 4)), ((8, 8), 4, (2, 2)), ((8, 8), 2, (1, 2)), ((8, 8), 7, (1, 7))),
        *(((1, 8, 8), 8, (1, 2, 4)), ((1, 2, 8), 8, (1, 2, 4)), ((4, 4, 4), 8, (2, 2, 2)), ((1, 32, 1), 8, (1, 8, 1))),
    ],
)
def test_the_nearest_shape(sizes: tuple[int, ...], ranks: int, shape: tuple[int, ...]) -> None:
    assert scaled_shape(sizes, ranks) == shape
    assert math.prod(shape) == ranks


def test_rings_and_head_axes_stay_within_a_node() -> None:
    rings = {"context-parallel-size": 32, "cp-intra-size": 8}
    assert resized(dict(rings), 16, (8, 8))["cp-intra-size"] == 8
    assert resized(dict(rings), 32, (8, 4))["cp-intra-size"] == 4
    assert resized(dict(rings), 8)["cp-intra-size"] == 4
    heads = {"context-parallel-size": 64, "cp-head-parallel": 8}
    assert resized(dict(heads), 32, (8, 8)) == {"context-parallel-size": 32, "cp-head-parallel": 8}
    assert resized(dict(heads), 16)["cp-head-parallel"] == 4


def test_other_numbers_of_gpus(folder: Callable[..., str]) -> None:
    example = load(folder())
    found = usable(example, changes=Changes(nodes=1))
    assert (found.value("context-parallel-size"), found.value("cp-grid")) == (8, "2x4")
    assert found.notes == ("1 node x 8 GPUs instead of 2 x 8: --context-parallel-size 16 -> 8, --cp-grid 4x4 -> 2x4",)
    with pytest.raises(ValueError, match=r"--nodes 3 --per-node 8: .*\nsizes that fit:\n") as caught:
        usable(example, changes=Changes(nodes=3))
    assert "  --nodes 2 --per-node 8: context 16, grid 4x4, 64 tokens per GPU" in str(caught.value).splitlines()


def test_given_options_are_not_scaled(folder: Callable[..., str]) -> None:
    """Only the example's own sizes are scaled in proportion."""
    example = load(folder())

    def on_a_node(**options: Any) -> Command:
        return usable(example, changes=Changes(nodes=1, options=Options(**options)))

    assert on_a_node(grid=(8, 1)).value("cp-grid") == "8x1"
    heads = on_a_node(head_parallel=2)
    assert (heads.value("cp-head-parallel"), heads.value("cp-grid")) == (2, "2x2")
    typed = command(example, changes=Changes(nodes=1, more=("--cp-grid", "1x8")))
    assert typed.value("cp-grid") == "1x8"
    heads = load(folder(parallel={**GRID["parallel"], "cp-grid": None, "cp-head-parallel": 4}))
    auto = command(heads, changes=Changes(nodes=1, more=("--cp-grid", "auto")))
    assert (auto.value("cp-grid"), auto.value("cp-head-parallel")) == ("auto", 2), "what is inherited follows"
    for wrong, says in (({"grid": (3, 5)}, "3x5 does not hold 8"), ({"head_parallel": 0}, "write a whole number, 1")):
        with pytest.raises(ValueError, match=says) as caught:
            on_a_node(**wrong)
        assert "sizes that fit" not in str(caught.value), "there are none"


def test_few_ranks_of_the_same_shape(folder: Callable[..., str]) -> None:
    example = load(folder())
    of = scaled(command(example), 8)
    flags = of.many.flags
    assert flags[flags.index("--cp-grid") + 1] == "2x4" and "--bf16" not in flags
    assert of.changed["bf16"] == (True, None, "float32, in which equal gradients give equal losses")
    assert of.changed["cp-grid"][:2] == ("4x4", "2x4") and of.changed["seq-length"][:2] == (1024, 128)
    assert (of.one.devices, of.first) == (1, FIRST_STEP) and not any("--cp" in word for word in of.one.flags)
    assert of.many.values.keys() ^ of.command.values.keys() <= of.changed.keys(), "nothing is changed silently"
    fp8 = scaled(command(example, "fp8"), 4)
    assert fp8.tolerance == HALF and {"--bf16", "--cp-fp8"} <= set(fp8.many.flags)
    assert "--bf16" in fp8.one.flags and "--cp-fp8" not in fp8.one.flags
    with pytest.raises(ValueError, match="--ranks 1: use a multiple of 1, and at least 2"):
        scaled(command(example), 1)
    with pytest.raises(ValueError, match=r"--ranks 6: "):
        scaled(command(example), 6)


def members(tensor: int = 2, context: tuple[int, int] = (2, 2), data: int = 2) -> list[Member]:
    """The correct groups of every rank."""
    sizes = {"pp": 1, "dp": data, "cp": math.prod(context), "tp": tensor}
    axes = {"q": context[0], "kv": context[1]}
    world = range(math.prod(sizes.values()))
    places = {rank: coordinates(sizes, rank) for rank in world}
    made: list[dict[str, Group]] = [{} for _ in world]

    def put(name: str, lists: list[list[int]], along: dict[str, int], among: tuple[str, ...]) -> None:
        for ranks in lists:
            for rank in ranks:
                made[rank][name] = Group(ranks=tuple(ranks), axes=along, among=among, made=1)

    for name, n in sizes.items():
        lists = axis_groups(list(world), sizes).get(name) or [[rank] for rank in world]
        put(name, lists, {name: n}, MEGATRONS)
    for ranks in axis_groups(list(world), sizes)["cp"]:
        for name, lists in axis_groups(ranks, axes).items():
            put(name, lists, {name: axes[name]}, ("tp", "dp", "pp", "q", "kv"))
    return [
        Member(coordinates={**places[rank], **coordinates(axes, places[rank]["cp"])}, groups=made[rank], why=())
        for rank in world
    ]


SIZES = {"tp": 2, "cp": 4, "dp": 2, "pp": 1}


def regrouped(*ranks: int, name: str, of: list[Member] | None = None, **changes: Any) -> list[Member]:
    """A group's fields changed on some ranks."""
    found = members() if of is None else of
    for rank in ranks:
        groups = found[rank].groups
        found[rank] = replace(found[rank], groups={**groups, name: replace(groups[name], **changes)})
    return found


def test_right_groups() -> None:
    assert groups.faults(members(), SIZES) == []
    by_name = {summary.name: summary for summary in groups.summaries(members(), per_node=4)}
    assert (by_name["q"].groups, by_name["q"].size, by_name["q"].inside) == (8, 2, 0)
    assert (by_name["kv"].inside, by_name["tp"].inside, by_name["dp"].inside) == (8, 8, 0)
    assert by_name["kv"].example == (0, 2) and "pp" not in by_name


def exchanged() -> list[Member]:
    """Two columns that have swapped a member: sizes, positions and agreement are right, the ranks are not."""
    found = members(tensor=1, data=1)
    for ranks in ((0, 3), (2, 1)):
        found = regrouped(*ranks, name="kv", of=found, ranks=ranks)
    return found


def without(rank: int, name: str) -> list[Member]:
    found = members()
    found[rank] = replace(found[rank], groups={n: g for n, g in found[rank].groups.items() if n != name})
    return found


@pytest.mark.parametrize(
    ("wrong", "sizes", "message"),
    [
        (without(3, "cp"), SIZES, "cp: rank 3 is in no such group"),
        (exchanged(), {"tp": 1, "cp": 4, "dp": 1, "pp": 1}, r"kv: rank 0 has \[0, 3\]; .* along kv 2 are \[0, 1\]"),
        (regrouped(5, name="q", ranks=(5, 1)), SIZES, r"q: rank 5 has \[5, 1\]; .* are \[1, 5\]"),
        (regrouped(5, name="q", ranks=(1, 2)), SIZES, r"q: rank 5 has \[1, 2\]"),
        (regrouped(5, name="q", ranks=(1, 3, 5)), SIZES, r"q: rank 5 has \[1, 3, 5\]"),
        (
            regrouped(5, name="q", axes={"q": 4}),
            SIZES,
            r"q: rank 5 has \[1, 5\]; those that .* only along q 4 are \[1, 5\]",
        ),
        (regrouped(5, name="kv", made=2), SIZES, "kv: rank 5 is in 2 groups of that name"),
        (regrouped(5, name="q", heard=(1, 7)), SIZES, r"q: rank 5 has \[1, 5\], but \[1, 7\] answered"),
        (members(), {**SIZES, "tp": 4}, "are not 16 ranks"),
        (members(), {"tp": 4, "cp": 2, "dp": 2, "pp": 1}, "number 2 along cp, which has 2"),
    ],
)
def test_wrong_groups(wrong: list[Member], sizes: dict[str, int], message: str) -> None:
    found = groups.faults(wrong, sizes)
    assert found and re.search(message, "\n".join(found)), found


def test_comparing_losses() -> None:
    one = [Iteration(loss=loss, milliseconds=1.0) for loss in (6.0, 5.0)]
    assert disagreements(one, one, 2) == [] and not_falling(one) == []
    assert disagreements(one, one[:1], 2) == ["2 and 1 iterations were logged, not 2"]
    nan = [one[0], replace(one[1], loss=math.nan)]
    assert "1 loss differs by more than 1e-05" in disagreements(one, nan, 2)[0]
    assert not_falling(one[:1] * 2) == ["the loss did not fall: 6.000 to 6.000"]
    line = "elapsed time per iteration (ms): 12.5 | lm loss: 5.25E+00 |\n"
    assert read_log(line * 2) == [Iteration(loss=5.25, milliseconds=12.5)] * 2


def invoke(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["example", *words])
    return found.exit_code, found.output


def test_the_list_and_one_of_it() -> None:
    status, text = invoke()
    assert status == 0 and all(name in text for name in config.names())
    for name in config.names():
        status, text = invoke(name)
        example = load(name)
        assert status == 0 and example.config.title in text and all(v in text for v in example.variants)
        assert f"Next: cp-plugin example {name}" in text and "--dry-run" in text
        status, text = invoke(name, "--print", "flags")
        assert status == 0 and text.split() == command(example).flags


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dry-run"], "NAME is missing"),
        (["lasp2-64xa100", "--nodes", "2"], "--nodes 2 has no effect alone: add --dry-run"),
        (["lasp2-64xa100", "--dry-run", "--print", "sh"], "choose one of --dry-run"),
        (["lasp2-64xa100", "--dry-run", "--steps", "9"], "--steps 9 has no effect without --scaled"),
        (["lasp3-64xa100", "--dry-run"], "did you mean lasp2-64xa100"),
        (["lasp2-64xa100", "--print", "flags", "--seq-length", "3000"], "nearest: 2048"),
        (["lasp2-64xa100", "--print", "flags", "--grid", "8"], "write rows x columns"),
        (["burst-8xa100", "--scaled", "--ranks", "1" + "0" * 30], "give at most 1,000,000 ranks"),
        (["burst-8xa100", "--dry-run", "--nodes", "1" + "0" * 30], "--per-node 8: give at most 1,000,000 GPUs"),
        (["attention2d-64xa100", "--dry-run", "--provider", "auto"], "--provider auto: choose one of"),
    ],
)
def test_refusals_of_the_command(words: list[str], message: str) -> None:
    status, text = invoke(*words)
    assert status == 2 and message in text.replace("\n", " ")
