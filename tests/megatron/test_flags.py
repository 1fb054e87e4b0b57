"""The plugin's flags through Megatron's own parser and validation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nightly import one_case

from cp_plugin import Options, Problem
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.methods import registry as providers

RING = "--context-parallel-size 4 --cp-provider ring --cp-layout contiguous"


def test_help_group(adapter: None) -> None:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    group = next(g for g in parser._action_groups if g.title == "context parallelism (cp_plugin)")
    flags = [option for action in group._group_actions for option in action.option_strings]
    expected = """
        --cp-provider --cp-cluster --cp-layout --cp-backend --cp-grid --cp-head-groups --cp-intra-size --cp-backward
        --cp-head-parallel --cp-fp8 --cp-gradient-dtype --cp-linear-attention --cp-layer-pattern --cp-linear-provider
        --cp-device --cp-selfcheck --cp-check-every --cp-pad-sequence --cp-verbose
        --cp-recompute-attention
    """
    assert flags == expected.split()
    text = " ".join(parser.format_help().split())
    assert f"upstream, auto, {', '.join(providers.names())}. auto: the method that the planner predicts" in text
    assert "--cp-cluster NAME|FILE.toml with --cp-provider auto: the cluster to plan for" in text
    assert "rows and columns of the grid of ranks; with attention2d. Default: auto, the grid that" in text
    in_front = ", ".join(name for name in providers.names() if name != "ulysses")
    assert f"in front of the method; with {in_front}. Default: auto" in text


def test_valid_run(validated: Callable[..., argparse.Namespace], capsys: pytest.CaptureFixture[str]) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.patches import hooks, patching
    from cp_plugin.megatron.patches.patching import Run

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
    run = Run(settings=runtime.settings(), args=args)
    patches = [*hooks.START_UP, *(patch for patch in hooks.OF_RUN if patch.when(run))]
    assert patching.installed() == [p.target for p in patches if patching.examine(p).state != "absent"]
    assert any("training_log" in target for target in patching.installed())
    unneeded = ("mtp_loss", "checkpoint", "moe", "ssm", "finalize_model_grads")
    assert [t for t in patching.installed() if any(t.endswith(x) or f".{x}" in t for x in unneeded)] == [
        "megatron.training.checkpointing:_load_base_checkpoint"
    ]
    assert runtime.kinds() == ["softmax"]
    assert args.cp_comm_type == ["p2p"]
    assert "--calculate-per-token-loss" not in capsys.readouterr().out
    assert not args.calculate_per_token_loss, "zigzag is Megatron's own layout"


@pytest.mark.parametrize(
    ("provider", "layout"), [("ring --cp-layout contiguous", "contiguous"), ("striped", "striped")]
)
def test_loss_per_token_is_switched_on_where_the_layout_needs_it(
    validated: Callable[..., argparse.Namespace], capsys: pytest.CaptureFixture[str], provider: str, layout: str
) -> None:
    args = validated(f"--context-parallel-size 4 --cp-provider {provider}")
    assert args.calculate_per_token_loss
    lines = [line for line in capsys.readouterr().out.splitlines() if "setting --calculate-per-token-loss" in line]
    assert len(lines) == 1
    assert f"{layout} layout" in lines[0]
    assert not args.create_attention_mask_in_dataloader


@pytest.mark.parametrize("flags", ["", "--cp-provider upstream"])
def test_upstream_is_stock_megatron(validated: Callable[..., argparse.Namespace], flags: str) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.patches import hooks, patching

    args = validated(flags, ranks=1)
    assert not runtime.settings().active
    assert patching.installed() == [patch.target for patch in hooks.START_UP]
    assert args.create_attention_mask_in_dataloader
    assert not args.calculate_per_token_loss


@pytest.mark.parametrize("flag", ["--seq-length", "--encoder-seq-length"])
def test_lengths_not_divisible_for_zigzag_only(validated: Callable[..., argparse.Namespace], flag: str) -> None:
    args = validated(f"{RING} {flag} 60", without="--seq-length 64")
    assert args.seq_length == args.encoder_seq_length == 60
    with pytest.raises(ValueError, match=r"^--seq-length 60, --context-parallel-size 4: seq-length should be"):
        validated(f"{RING} --seq-length 60 --encoder-seq-length 60")


def test_yaml_file_is_refused(adapter: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from megatron.training import arguments

    monkeypatch.setattr(sys, "argv", ["x", "--yaml-cfg", str(tmp_path / "a.yaml"), "--cp-provider=ring"])
    with pytest.raises(ValueError, match=r"--yaml-cfg .*a.yaml makes Megatron ignore .*, including --cp-provider:"):
        arguments.parse_args()


FLAGS = ("layout", "backend", "grid", "head-parallel", "intra-size", "backward", "head-groups")
AUTO = " ".join(f"--cp-{flag} auto" for flag in FLAGS)


@one_case
@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("attention2d --cp-grid 2x2 --cp-head-groups 2", Options(grid=(2, 2), head_groups=2)),
        ("attention2d --cp-grid 1x2 --cp-head-parallel 2", Options(grid=(1, 2), head_parallel=2)),
        ("burst --cp-intra-size 2 --cp-backward q", Options(intra_size=2, backward="q")),
        ("usp --cp-head-parallel 4 --cp-layout striped", Options(head_parallel=4, layout="striped")),
        ("ring --cp-head-parallel 1", Options(head_parallel=1)),
        *[(f"{name} {AUTO}", Options()) for name in providers.names()],
    ],
)
def test_valid_options(validated: Callable[..., argparse.Namespace], flags: str, options: Options) -> None:
    from cp_plugin.megatron import runtime

    validated(f"--context-parallel-size 4 --cp-provider {flags}")
    assert runtime.settings() == Settings(provider=flags.split()[0], options=options)
    assert runtime.model().problem == Problem(
        size=4, heads=4, kv_heads=2, head_dim=16, seq_length=64, batch=2, dtype=torch.float32, network="gloo"
    )
