"""Machine profiles: packaged ones against published figures, TOML round trips, and validation messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.hardware import Cluster, Kernel, Link, cluster, device, link, load, override, save

PACKAGED = sorted(hardware.clusters())
MINE = """
name = "mine"
device = "a100-80gb-sxm"
per_node = 8
nics = 8
intra = "nvlink3"

[inter]
latency_s = 20e-6
bytes_per_s = 24e9
"""
Times = list[tuple[int, int, int, bool, float]]
"""Tokens of a sequence, sequences, heads, causal, seconds; head size 128."""


def parts(profile: BaseModel) -> Iterator[BaseModel]:
    """The profile and all nested ones that have a source."""
    if "source" in type(profile).model_fields:
        yield profile
    for _, value in profile:
        for inner in value.values() if isinstance(value, dict) else [value]:
            if isinstance(inner, BaseModel):
                yield from parts(inner)


def test_packaged_profiles_have_sources_and_survive_a_round_trip(tmp_path: Path) -> None:
    presets = ["dgx-a100", "a100-4-per-node", "h100-1-per-node", "dgx-h100", "h200", "b200", "a800", "a100-pcie-roce"]
    assert set(presets) <= set(PACKAGED)
    profiles = (*hardware.clusters().values(), *hardware.devices().values(), *hardware.links().values())
    every = [part for profile in profiles for part in parts(profile)]
    assert len(every) > 80 and all(part.source.strip() for part in every)
    measured = {"verbs": {"all_gather": {"latency_s": 1e-3, "bytes_per_s": 5e8}}}
    for profile in (*map(cluster, PACKAGED), override(cluster("cpu"), inter=measured)):
        save(profile, path := tmp_path / f"{profile.name}.toml")
        assert load(path) == cluster(str(path)) == profile


@pytest.mark.parametrize(
    ("look_up", "name", "said"),
    [
        (cluster, "a100", "did you mean a100-4-per-node, a100-pcie-roce or dgx-a100?"),
        (link, "hdr", "unknown link 'hdr': did you mean hdr200?"),
        (device, "xyzzy", "unknown device 'xyzzy': choose one of a100-40gb-sxm, "),
    ],
)
def test_names(look_up: object, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        look_up(name)  # type: ignore[operator]
    assert cluster("DGX_A100") is cluster("dgx a100") is hardware.clusters()["dgx-a100"]


def tflops(values: list[float], causal: bool, factor: float, first: int, heads: int, sequences: int = 0) -> Times:
    """Seconds from TFLOP/s for sequences of ``first``, 2 ``first``, ... tokens; 0 sequences: 16k tokens in all."""
    times = []
    for i, value in enumerate(values):
        n = first << i
        batch = sequences or 16384 // n
        flops = factor * 4 * n * n * 128 * heads * batch / (2 if causal else 1)
        times.append((n, batch, heads, causal, flops / (value * 1e12)))
    return times


def micro(values: list[float], causal: bool, first: int, heads: int, sequences: int) -> Times:
    return [(first << i, sequences, heads, causal, us * 1e-6) for i, us in enumerate(values)]


def predicted(kernel: Kernel, case: tuple[int, int, int, bool, float], passes: tuple[str, ...]) -> float:
    """Seconds by the formula of the profile, for head size 128."""
    n, batch, heads, causal, _ = case
    rows, columns = kernel.block
    seen = [-(-min(n, i + rows) // columns) if causal else n // columns for i in range(0, n, rows)]
    pairs = sum(seen) * rows * columns * batch
    per_pair = {"forward": 2 * (128 + 128), "backward": 2 * (3 * 128 + 2 * 128)}
    times = (getattr(kernel, p).seconds(pairs * heads * per_pair[p], batch * n * heads) for p in passes)
    return sum(times)


A100 = [
    *tflops([151, 173, 187, 196, 201, 203], False, 3.5, 512, 16),
    *tflops([99, 133, 155, 173, 182, 189], True, 3.5, 512, 16),
]
H100_FORWARD = [
    *tflops([467, 565, 625, 638, 646, 648], False, 1, 512, 16),
    *tflops([292, 423, 521, 579, 602, 616], True, 1, 512, 16),
]
H100_BACKWARD = [
    *tflops([313.324, 434.825, 519.827, 561.410], False, 2.5, 1024, 48, 4),
    *micro([709.66, 1631.26, 4643.46, 15308.16], True, 1024, 48, 4),
]
B200_FORWARD = micro([1433], False, 8192, 16, 4) + micro([775], True, 8192, 16, 4)
B200_BACKWARD = micro([4043], False, 8192, 16, 4) + micro([2274], True, 8192, 16, 4)


@pytest.mark.parametrize(
    ("name", "passes", "published", "within"),
    [
        ("a100-80gb-sxm", ("forward", "backward"), A100, 0.04),
        ("h100-80gb-sxm", ("forward",), H100_FORWARD, 0.052),
        ("h100-80gb-sxm", ("backward",), H100_BACKWARD, 0.066),
        ("b200-180gb-sxm", ("forward",), B200_FORWARD, 0.01),
        ("b200-180gb-sxm", ("backward",), B200_BACKWARD, 0.01),
    ],
)
def test_published_attention_times(name: str, passes: tuple[str, ...], published: Times, within: float) -> None:
    """The figures that the profile names as its source, within the error that it states."""
    kernel = device(name).attention["bfloat16"]
    errors = {case[:4]: predicted(kernel, case, passes) / case[4] - 1 for case in published}
    assert max(map(abs, errors.values())) <= within, errors


def test_overrides() -> None:
    old = cluster("dgx-a100")
    new = override(old, per_node=4, nics=1, inter="roce100", device="h100-80gb-sxm", intra={"latency_s": 1e-6})
    assert (new.per_node, new.nics, new.inter, new.device) == (4, 1, link("roce100"), device("h100-80gb-sxm"))
    assert new.intra == old.intra.model_copy(update={"latency_s": 1e-6})
    assert old == cluster("dgx-a100") and override(old) == old
    assert isinstance(override(old, device={"memory_bytes": 40e9}), Cluster)


BAD = [
    ("bytes_per_s = 24e9", "bytes_per_s = 200", "[inter] bytes_per_s = 200 is below 1e+06: expected bytes per second"),
    ("bytes_per_s = 24e9", "bytes_per_s = nan", "[inter] bytes_per_s = nan: input should be a finite number"),
    ("latency_s = 20e-6", "latencys = 20e-6", "[inter] latencys is unknown: did you mean latency_s?"),
    (
        "nics = 8",
        "nics = 400",
        "nics = 400 for 8 devices of a node: write the network cards of one node, at most 4 per",
    ),
    ('"a100-80gb-sxm"', '"a100"', "device: unknown device 'a100': did you mean a100-40gb-sxm, "),
    ("per_node = 8", "per_node 8", "is not TOML: Expected '=' after a key"),
    ("per_node = 8", "per_node = \xff", "is not TOML: 'utf-8' codec can't decode"),
    ("per_node = 8\nnics = 8", "pernode = 8\nnics = '8'", "per_node is missing\n  nics = '8': "),
]


@pytest.mark.parametrize(("good", "bad", "said"), BAD)
def test_mistakes_in_a_file_are_named(tmp_path: Path, good: str, bad: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    assert cluster(str(path)).inter == Link(latency_s=20e-6, bytes_per_s=24e9)
    path.write_bytes(MINE.replace(good, bad).encode("latin-1"))
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        cluster(str(path))
    assert str(error.value).startswith(f"profile {path}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gemm_flops_per_s": {"bfloat16": 3e17}}, "bfloat16 = 3e+17 is above 2e+16: expected FLOP/s, such as 250e12"),
        ({"gemm_flops_per_s": {"bf16": 3e14}}, "[device.gemm_flops_per_s] bf16 is unknown: expected 'bfloat16'"),
        (
            {"attention": {"bfloat16": {"block": (0, 64)}}},
            "[device.attention.bfloat16] block = 0 is below 1: expected a",
        ),
    ],
)
def test_mistakes_in_an_override_are_named(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        override(cluster("dgx-a100"), device=change)
    assert str(error.value).startswith("cluster dgx-a100: ")
