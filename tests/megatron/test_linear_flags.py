"""Flags of linear attention: parsing, and refusals of conflicting flags, providers and models."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import third_party
import torch

from cp_plugin import Options, Problem
from cp_plugin.megatron.flags.args import UPSTREAM, Settings, add_arguments, settings_from
from cp_plugin.megatron.flags.linear_flags import Linear
from cp_plugin.methods import registry as providers

MODEL = Problem(size=4, heads=4, kv_heads=2, head_dim=16, seq_length=64, batch=2, dtype=torch.float32, network="gloo")


def _linear(variant: str = "gla", layout: str = "contiguous", **fields: str) -> Linear:
    return Linear(variant=variant, options=Options(layout=layout, backend="auto"), **fields)


@pytest.mark.parametrize(
    ("flags", "provider", "layout", "fields", "of_linear", "of_softmax"),
    [
        ("", UPSTREAM, "contiguous", {}, {}, {}),
        (
            "--cp-layout zigzag --cp-linear-provider lasp1 --cp-layer-pattern LL --cp-backend chunked",
            UPSTREAM,
            "zigzag",
            {"provider": "lasp1", "pattern": "LL"},
            {"backend": "chunked"},
            {},
        ),
        (
            "--cp-linear-provider linear_ring --bf16 --cp-gradient-dtype model",
            UPSTREAM,
            "contiguous",
            {"provider": "linear_ring"},
            {"gradient_dtype": "model"},
            {},
        ),
        ("--cp-layer-pattern LN", "all_gather", "zigzag", {"pattern": "LN"}, {}, {}),  # the softmax provider's layout
        (
            "--cp-layer-pattern NL --cp-provider attention2d --cp-grid 2x2 --cp-backend sdpa",
            "attention2d",
            "zigzag",
            {"pattern": "NL"},
            {},
            {"grid": (2, 2), "backend": "sdpa"},
        ),
    ],
)
def test_valid_flags(
    validated: Callable[..., argparse.Namespace],
    flags: str,
    provider: str,
    layout: str,
    fields: dict[str, str],
    of_linear: dict[str, str],
    of_softmax: dict[str, Any],
) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.patches import patching

    variant = "basic" if "ring" in fields.get("provider", "") else "gla"
    validated(f"--context-parallel-size 4 --cp-linear-attention {variant} {flags}")
    linear = Linear(variant=variant, options=Options(**{"layout": layout, "backend": "auto"} | of_linear), **fields)
    options = Options(layout=layout, **of_softmax)
    assert runtime.settings() == Settings(provider=provider, linear=linear, options=options)
    assert runtime.model().problem == (replace(MODEL, dtype=torch.bfloat16) if "bf16" in flags else MODEL)
    assert any("num_floating_point_operations" in target for target in patching.installed())
    gated = any("get_query_key_value_tensors" in target for target in patching.installed())
    assert gated == linear.kind.gated


def test_one_rank_is_enough(validated: Callable[..., argparse.Namespace]) -> None:
    from cp_plugin.megatron import runtime

    args = validated("--cp-linear-attention basic", ranks=1)
    assert runtime.settings().active and runtime.kinds() == ["linear"]
    assert not args.calculate_per_token_loss, "all tokens are on one rank"
    assert not args.create_attention_mask_in_dataloader


def test_layer_pattern_repeats() -> None:
    linear = _linear(pattern="LLLN")
    assert [n for n in range(1, 17) if not linear.has(n)] == [4, 8, 12, 16]
    assert linear.layers(16) == 12 and linear.hybrid and not _linear().hybrid


PARTED = """
from dataclasses import replace
from cp_plugin.core.options import Option, whole_number
from cp_plugin.methods.lasp2 import LASP2

STATE_PARTS = Option(
    "state_parts", metavar="N", meaning="parts in which a state is sent", read=whole_number, write="a number of parts",
    every=lambda ranks: (1, 2),
)
PROVIDER = replace(LASP2, name="parted", options=(STATE_PARTS, "gradient_dtype"))
"""


@pytest.fixture
def parted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A third-party provider of linear layers with its own option and one shared with softmax providers."""
    third_party.install(tmp_path, "parted", PARTED, providers.ENTRY_POINTS, parted="PROVIDER")
    monkeypatch.syspath_prepend(str(tmp_path))
    with third_party.looked_for_anew():
        yield


@pytest.mark.parametrize(
    ("flags", "linear", "softmax"),
    [
        ("--cp-state-parts 2", {"state_parts": 2}, {}),
        ("--cp-layer-pattern LN --cp-state-parts 2", {"state_parts": 2}, {}),
        (
            "--cp-layer-pattern LN --cp-provider attention2d --cp-grid 2x2 --cp-state-parts 1",
            {"state_parts": 1},
            {"grid": (2, 2)},
        ),
        (
            "--cp-layer-pattern LN --cp-gradient-dtype model",
            {"gradient_dtype": "model"},
            {"gradient_dtype": "model"},
        ),
        (
            "--cp-layer-pattern LN --cp-provider auto --cp-cluster h100-ib-8rails --cp-state-parts 2",
            {"state_parts": 2},
            {},
        ),
    ],
)
def test_options_of_a_linear_provider_are_flags(
    parted: None, flags: str, linear: dict[str, object], softmax: dict[str, object]
) -> None:
    parser = add_arguments(argparse.ArgumentParser())
    args = parser.parse_args(f"--cp-linear-attention gla --cp-linear-provider parted {flags}".split())
    args.context_parallel_size = 4
    settings = settings_from(args)
    assert settings.linear is not None
    assert settings.linear.options.chosen == linear and settings.options.chosen == softmax
    assert providers.settle("parted", MODEL, settings.linear.options).options.chosen == linear


def test_options_of_other_providers_are_refused(parted: None) -> None:
    parser = add_arguments(argparse.ArgumentParser())
    (told,) = (action.help for action in parser._actions if "--cp-state-parts" in action.option_strings)
    assert (told or "").startswith("parts in which a state is sent; with --cp-linear-provider parted. Default: auto")
    for flags, message in (
        ("--cp-linear-attention gla --cp-state-parts 2", r"^--cp-state-parts has no effect: all layers of "),
        ("--cp-provider ring --cp-state-parts 2", r"^--cp-state-parts 2 has no effect with --cp-provider ring"),
        ("--cp-state-parts 2", r"^--cp-state-parts has no effect without a context-parallel provider"),
    ):
        args = parser.parse_args(flags.split())
        args.context_parallel_size = 4
        with pytest.raises(ValueError, match=message):
            settings = settings_from(args)
            providers.settle(settings.provider, MODEL, settings.options)


def test_planner_enumerates_options_of_a_linear_provider(parted: None) -> None:
    from cp_plugin.planner.candidates import linear_candidates

    flags = [one.flags for one in linear_candidates(replace(MODEL, decay="key", v_head_dim=16))]
    assert flags == [
        "--cp-linear-provider lasp2",
        "--cp-linear-provider zeco",
        "--cp-linear-provider lasp1",
        "--cp-linear-provider parted --cp-state-parts 1",
        "--cp-linear-provider parted --cp-state-parts 2",
    ]
