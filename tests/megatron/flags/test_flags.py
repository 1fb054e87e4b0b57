"""The plugin's flags through Megatron's own parser and validation."""

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
from cp_plugin.engine.methods import registry as providers
from cp_plugin.megatron.flags.args import Settings, add_arguments, settings_from
from cp_plugin.megatron.flags.linear_flags import Linear
from cp_plugin.megatron.flags.option_flags import shown

RING = "--context-parallel-size 4 --cp-provider ring --cp-layout contiguous"


def test_valid_run(validated: Callable[..., argparse.Namespace], capsys: pytest.CaptureFixture[str]) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.patches import patching

    args = validated(
        f"{RING} --cp-layout zigzag --cp-backend reference --cp-selfcheck off --cp-verbose --cp-check-every 100"
    )
    assert runtime.settings() == Settings(
        provider="ring",
        options=Options(layout="zigzag", backend="reference"),
        selfcheck=False,
        check_every=100,
        verbose=True,
    )
    assert any("training_log" in target for target in patching.installed())
    unneeded = ("mtp_loss", "checkpoint", "moe", "ssm", "finalize_model_grads")
    assert [t for t in patching.installed() if any(t.endswith(x) or f".{x}" in t for x in unneeded)] == [
        "megatron.training.checkpointing:_load_base_checkpoint"
    ]
    assert runtime.settings().kinds == ["softmax"]
    assert args.cp_comm_type == ["p2p"]
    assert "--calculate-per-token-loss" not in capsys.readouterr().out
    assert not args.calculate_per_token_loss, "zigzag is Megatron's own layout"


def test_settings_that_change_and_flags_without_effect_are_announced(
    validated: Callable[..., argparse.Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    """What rules say: ``test_refusals``."""
    fp8 = "--bf16 --cp-fp8 compute --cp-backend float8 --fp8-format hybrid --fp8-recipe mxfp8"
    args = validated(f"--context-parallel-size 4 --cp-provider striped {fp8}")
    lines = capsys.readouterr().out.splitlines()
    (said,) = [line for line in lines if "setting --calculate-per-token-loss" in line]
    assert "striped layout" in said and args.calculate_per_token_loss and not args.create_attention_mask_in_dataloader
    assert any(line.startswith("cp_plugin: --fp8-recipe mxfp8 applies to linear layers only: ") for line in lines)


@pytest.mark.parametrize("flags", ["", "--cp-provider upstream"])
def test_upstream_is_stock_megatron(validated: Callable[..., argparse.Namespace], flags: str) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.patches import hooks, patching

    args = validated(flags, ranks=1)
    assert not runtime.settings().active
    assert patching.installed() == [patch.target for patch in hooks.START_UP]
    assert args.create_attention_mask_in_dataloader
    assert not args.calculate_per_token_loss


AUTO = " ".join(
    f"--cp-{flag} auto"
    for flag in ("layout", "backend", "grid", "head-parallel", "intra-size", "backward", "head-groups")
)
MODEL = Problem(size=4, heads=4, kv_heads=2, head_dim=16, seq_length=64, batch=2, dtype=torch.float32).with_transport(
    network="gloo"
)


def linear(layout: str, variant: str = "gla", pattern: str = "L", provider: str = "lasp2", **more: Any) -> Linear:
    options = Options(layout=layout, **{"backend": "auto"} | more)
    return Linear(variant=variant, pattern=pattern, provider=provider, options=options)


READ: dict[str, Settings] = {
    "--cp-provider attention2d --cp-grid 2x2 --cp-head-groups 2": Settings(
        provider="attention2d", options=Options(grid=(2, 2), head_groups=2)
    ),
    **{f"--cp-provider {name} {AUTO}": Settings(provider=name) for name in providers.names()},
    "--bf16 --cp-linear-attention basic --cp-layer-pattern LN --cp-fp8 comm": Settings(
        provider="all_gather",
        linear=linear("zigzag", "basic", pattern="LN"),
        options=Options(layout="zigzag", fp8="comm"),
    ),
    "--cp-linear-attention gla": Settings(linear=linear("contiguous"), options=Options(layout="contiguous")),
    "--cp-linear-attention gla --cp-layout zigzag --cp-linear-provider lasp1 --cp-layer-pattern LL --cp-backend "
    "chunked": Settings(
        linear=linear("zigzag", pattern="LL", provider="lasp1", backend="chunked"), options=Options(layout="zigzag")
    ),
    "--cp-linear-attention basic --cp-linear-provider linear_ring --bf16 --cp-gradient-dtype model": Settings(
        linear=linear("contiguous", "basic", provider="linear_ring", gradient_dtype="model"),
        options=Options(layout="contiguous"),
    ),
    "--cp-linear-attention gla --cp-layer-pattern LN": Settings(  # the softmax provider's layout
        provider="all_gather", linear=linear("zigzag", pattern="LN"), options=Options(layout="zigzag")
    ),
    "--cp-linear-attention gla --cp-layer-pattern NL --cp-provider attention2d --cp-grid 2x2 --cp-backend "
    "sdpa": Settings(
        provider="attention2d",
        linear=linear("zigzag", pattern="NL"),
        options=Options(layout="zigzag", grid=(2, 2), backend="sdpa"),
    ),
}


@pytest.mark.parametrize("flags", READ)
def test_flags_as_they_are_read(validated: Callable[..., argparse.Namespace], flags: str) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.patches import patching

    validated(f"--context-parallel-size 4 {flags}")
    assert runtime.settings() == READ[flags]
    assert all(
        f"{flag} {value}" in flags for flag, value in shown(READ[flags].options).items() if flag != "--cp-layout"
    )
    assert runtime.model().problem == replace(MODEL, dtype=torch.bfloat16 if "bf16" in flags else torch.float32)
    linear, replaced = READ[flags].linear, " ".join(patching.installed())
    assert ("num_floating_point_operations" in replaced) == (linear is not None)
    assert ("get_query_key_value_tensors" in replaced) == (linear is not None and linear.kind.gated)


PARTED = """
from dataclasses import replace
from cp_plugin.engine.core.options import Option, whole_number
from cp_plugin.engine.methods.lasp2 import LASP2

STATE_PARTS = Option(
    "state_parts", metavar="N", meaning="parts in which a state is sent", read=whole_number, write="a number of parts",
    every=lambda ranks: (1, 2),
)
PROVIDER = replace(LASP2, name="parted", options=(STATE_PARTS, "gradient_dtype"))
"""


@pytest.fixture
def parted(tmp_path: Path) -> Iterator[None]:
    """A third-party provider of linear layers with its own option and one shared with softmax providers."""
    with third_party.installed(tmp_path, "parted", PARTED, providers.ENTRY_POINTS, parted="PROVIDER"):
        yield


PARTED_FLAGS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "--cp-state-parts 2": ({"state_parts": 2}, {}),
    "--cp-layer-pattern LN --cp-provider attention2d --cp-grid 2x2 --cp-state-parts 1": (
        {"state_parts": 1},
        {"grid": (2, 2)},
    ),
    "--cp-layer-pattern LN --cp-gradient-dtype model": ({"gradient_dtype": "model"}, {"gradient_dtype": "model"}),
    "--cp-layer-pattern LN --cp-provider auto --cp-cluster h100-ib-8rails --cp-state-parts 2": ({"state_parts": 2}, {}),
}
"""Of linear layers and of softmax layers."""


def test_options_of_a_linear_provider_are_flags(parted: None) -> None:
    parser = add_arguments(argparse.ArgumentParser())
    (told,) = (action.help for action in parser._actions if "--cp-state-parts" in action.option_strings)
    assert (told or "").startswith("parts in which a state is sent; with --cp-linear-provider parted. Default: auto")
    for flags, (of_linear, of_softmax) in PARTED_FLAGS.items():
        args = parser.parse_args(f"--cp-linear-attention gla --cp-linear-provider parted {flags}".split())
        args.context_parallel_size = 4
        settings = settings_from(args)
        assert settings.linear is not None
        assert (settings.linear.options.chosen, settings.options.chosen) == (of_linear, of_softmax)
        assert providers.settle("parted", MODEL, settings.linear.options).options.chosen == of_linear


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
