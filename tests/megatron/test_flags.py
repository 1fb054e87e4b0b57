"""The plugin's flags, and every bad input refused before training, through Megatron's own parser and validation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cp_plugin import Options
from cp_plugin.megatron.flags.args import Settings, add_arguments, peek, settings_from
from cp_plugin.methods import registry as providers

RING = "--context-parallel-size 4 --cp-provider ring"
ATTENTION_DROPOUT = "--attention-dropout 0"


def test_the_flags_have_their_own_help_group(adapter: None) -> None:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    group = next(g for g in parser._action_groups if g.title == "context parallelism (cp_plugin)")
    flags = [option for action in group._group_actions for option in action.option_strings]
    expected = "--cp-provider --cp-cluster --cp-layout --cp-backend --cp-grid --cp-head-groups --cp-intra-size "
    expected += "--cp-backward --cp-head-parallel --cp-fp8 --cp-gradient-dtype --cp-linear-attention "
    expected += "--cp-layer-pattern --cp-linear-provider --cp-device --cp-selfcheck --cp-check-every --cp-log-traffic "
    expected += "--cp-recompute-attention"
    assert flags == expected.split()
    text = " ".join(parser.format_help().split())
    assert "--cp-provider NAME" in text
    assert f"upstream, auto, {', '.join(providers.names())}. auto: what the planner predicts" in text
    assert "Default: upstream, which is stock Megatron" in text
    assert "--cp-cluster NAME|FILE.toml with --cp-provider auto: the machine to plan for" in text
    assert "rows and columns of the grid of ranks; with attention2d. Default: auto, the grid that" in text
    assert "inner one of two nested rings; with burst, double_ring. Default: auto" in text
    in_front = ", ".join(name for name in providers.names() if name != "ulysses")
    assert f"in front of the method; with {in_front}. Default: auto" in text


def test_a_good_run(validated: Callable[..., argparse.Namespace], capsys: pytest.CaptureFixture[str]) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.patches import hooks, patching

    args = validated(
        f"{RING} --cp-layout zigzag --cp-backend reference --cp-selfcheck off --cp-log-traffic --cp-check-every 100"
    )
    assert runtime.settings() == Settings(
        provider="ring",
        options=Options(layout="zigzag", backend="reference"),
        selfcheck=False,
        check_every=100,
        log_traffic=True,
    )
    assert patching.installed() == [patch.target for patch in (*hooks.START_UP, *hooks.PROVIDER, *hooks.RECOMPUTE)]
    assert args.cp_comm_type == ["p2p"]
    assert "--calculate-per-token-loss" not in capsys.readouterr().out
    assert not args.calculate_per_token_loss, "zigzag is Megatron's own layout"


@pytest.mark.parametrize(("provider", "layout"), [("ring", "contiguous"), ("striped", "striped")])
def test_loss_per_token_is_switched_on_where_the_layout_needs_it(
    validated: Callable[..., argparse.Namespace], capsys: pytest.CaptureFixture[str], provider: str, layout: str
) -> None:
    args = validated(f"--context-parallel-size 4 --cp-provider {provider}")
    assert args.calculate_per_token_loss
    lines = [line for line in capsys.readouterr().out.splitlines() if "per-token-loss is switched on" in line]
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--context-parallel-size 4 --cp-provider rong",
            r"--cp-provider rong: choose one of upstream, .*ring, striped",
        ),
        (
            f"{RING} --cp-layout zagzig",
            r"unknown layout 'zagzig': --cp-layout must be one of contiguous, zigzag, striped",
        ),
        (
            f"{RING} --cp-layout striped",
            r"'ring' does not run on the striped layout: --cp-layout .* contiguous, zigzag",
        ),
        (f"{RING} --cp-backend flesh", r"unknown backend 'flesh': --cp-backend must be one of auto, cudnn"),
        (f"{RING} --cp-backend cudnn", r"--cp-backend cudnn cannot run here"),
        (f"{RING} --cp-selfcheck twice", r"--cp-selfcheck twice: choose one of once, off"),
        (f"{RING} --cp-check-every -1", r"--cp-check-every -1: write a number of iterations, such as 100, or 0 for"),
        (f"{RING} --cp-check-every 1.5", r"--cp-check-every 1.5: write a number of iterations"),
        (f"{RING} --cp-check-every 010", r"--cp-check-every 010: write a number of iterations"),
        ("--cp-check-every 100", r"--cp-check-every would do nothing without"),
        (f"{RING} --cp-device gpu", r"--cp-device gpu: choose one of auto, cpu, cuda"),
        ("--cp-provider ring", r"--cp-provider ring needs --context-parallel-size 2 or more, got 1"),
        ("--context-parallel-size 4 --cp-layout zigzag", r"--cp-layout would do nothing without .* add --cp-provider"),
        ("--cp-backend sdpa --cp-log-traffic", r"--cp-backend, --cp-log-traffic would do nothing"),
        ("--cp-provider upstream --cp-selfcheck once", r"--cp-selfcheck would do nothing"),
        (f"{RING} --cp-cluster cpu", r"--cp-cluster cpu would do nothing: it is what --cp-provider auto plans for"),
        ("--cp-cluster cpu", r"--cp-cluster cpu would do nothing: .*--cp-provider auto"),
        ("--cp-provider auto", r"--cp-provider auto needs --context-parallel-size 2 or more, got 1"),
        (
            "--context-parallel-size 4 --cp-provider auto --cp-layout zagzig",
            r"unknown layout 'zagzig': --cp-layout must be one of contiguous, zigzag, striped",
        ),
        ("--cp-grid 2x2", r"--cp-grid would do nothing without .* add --cp-provider"),
        ("--cp-head-groups 2 --cp-head-parallel 2", r"--cp-head-groups, --cp-head-parallel would do nothing without"),
        (
            "--cp-provider upstream --cp-backward q --cp-intra-size 2",
            r"--cp-intra-size, --cp-backward would do nothing",
        ),
        (
            "--context-parallel-size 4",
            r"--context-parallel-size 4 on the CPU needs --cp-provider with one of auto, .*ring, striped",
        ),
        (f"{RING} --spec", r"--spec : give a module and a name"),
        (f"{RING} --spec local", r"--spec local: give a module and a name"),
        (f"{RING} --spec no.such.module spec", r"--spec no.such.module spec: module no.such.module cannot be imported"),
        (f"{RING} --spec megatron.core.utils nothing", r"module megatron.core.utils has no 'nothing'"),
        (f"{RING} --cp-comm-type a2a", r"--cp-comm-type \['a2a'\]: it chooses among Transformer Engine's"),
        (f"{RING} --attention-backend local", r"--attention-backend local: .*use --cp-backend"),
    ],
)
def test_bad_input(validated: Callable[..., argparse.Namespace], flags: str, message: str) -> None:
    from cp_plugin.megatron.patches import hooks, patching

    with pytest.raises(ValueError, match=message):
        validated(flags)
    assert patching.installed() == [patch.target for patch in hooks.START_UP], "nothing else was replaced"


UNSUPPORTED = {
    "--attention-dropout 0.1": r"--attention-dropout 0.1: .*set --attention-dropout 0",
    "--reset-attention-mask": "--reset-attention-mask: attention is causal",
    "--reset-position-ids": "--reset-position-ids: RoPE",
    "--hybrid-context-parallel": "--hybrid-context-parallel",
    "--hierarchical-context-parallel-sizes 2 2": "--hierarchical-context-parallel-sizes",
    "--cuda-graph-impl local": "--cuda-graph-impl local: .*CUDA graph",
    "--enable-cuda-graph": "--enable-cuda-graph: ",
    "--log-straggler": "--log-straggler: it takes its times on CUDA",
    "--qk-clip": "--qk-clip: ",
    "--log-max-attention-logit": "--log-max-attention-logit: ",
    "--experimental-attention-variant gated_delta_net": "--experimental-attention-variant gated_delta_net: ",
    "--is-hybrid-model": "--is-hybrid-model: ",
    "--heterogeneous-layers-config-path x.json": "--heterogeneous-layers-config-path x.json: ",
    "--batch-invariant-mode": "--batch-invariant-mode",
    "--cpu-offloading-num-layers 1": "--cpu-offloading-num-layers 1: ",
    "--fine-grained-activation-offloading --offload-modules core_attn": "--fine-grained-activation-offloading: ",
    "--rerun-mode report_stats": "--rerun-mode report_stats: ",
    "--use-kitchen-attention": "--use-kitchen-attention",
    "--position-embedding-type relative": "--position-embedding-type relative: .*attention bias",
    "--perform-rl-step": "--perform-rl-step: ",
    "--fake-process-group": "--fake-process-group: ",
    "--overlap-moe-expert-parallel-comm": "--overlap-moe-expert-parallel-comm: ",
}


@pytest.mark.parametrize("flags", UNSUPPORTED)
def test_unsupported_features_are_refused_by_name(validated: Callable[..., argparse.Namespace], flags: str) -> None:
    with pytest.raises(ValueError, match=rf"^--cp-provider ring does not support {UNSUPPORTED[flags]}") as raised:
        validated(f"{RING} {flags}")
    assert "or use --cp-provider upstream" in str(raised.value)


def test_flags_of_newer_versions(validated: Callable[..., argparse.Namespace]) -> None:
    from megatron.training.arguments import add_megatron_arguments

    known = {a.dest for a in add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions}
    for flags in ("--logits-load-dir x", "--logits-save-dir x"):
        flag = flags.split()[0]
        if flag.removeprefix("--").replace("-", "_") in known:
            with pytest.raises(ValueError, match=f"^--cp-provider ring does not support {flag}"):
                validated(f"{RING} {flags}")


def test_attention_dropout_must_be_given(validated: Callable[..., argparse.Namespace]) -> None:
    with pytest.raises(ValueError, match=r"--attention-dropout 0.1"):
        validated(RING, without=ATTENTION_DROPOUT)


@pytest.mark.parametrize(
    ("layout", "length", "message"),
    [
        (
            "contiguous",
            62,
            r"--seq-length 62 .*--context-parallel-size 4 in the contiguous layout.*multiple of 4; use 60 or 64",
        ),
        ("zigzag", 60, r"--seq-length 60 .*zigzag layout: it must be a multiple of 8; use 56 or 64"),
        ("zigzag", 4, r"multiple of 8; use 8$"),
    ],
)
def test_sequence_length_not_divisible(
    validated: Callable[..., argparse.Namespace], layout: str, length: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        validated(f"{RING} --cp-layout {layout} --seq-length {length}")


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2", "0.19.0"])
def test_auxiliary_losses_of_experts_before_0_19(
    validated: Callable[..., argparse.Namespace], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    from cp_plugin.megatron.rules import checks

    monkeypatch.setattr(checks, "megatron_version", lambda: version)
    experts = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
    if version == "0.19.0":
        assert validated(f"{RING} {experts}").calculate_per_token_loss
        return
    with pytest.raises(ValueError, match=rf"--moe-aux-loss-coeff 0.01 with --calculate-per-token-loss.*{version}"):
        validated(f"{RING} {experts}")
    with pytest.raises(ValueError, match=r"--moe-z-loss-coeff 0.5 with"):
        validated(f"{RING} --num-experts 4 --moe-router-topk 2 --moe-z-loss-coeff 0.5")
    assert not validated(f"{RING} --cp-layout zigzag {experts}").calculate_per_token_loss


@pytest.mark.parametrize("flag", ["--seq-length", "--encoder-seq-length"])
def test_lengths_that_only_zigzag_cannot_divide(validated: Callable[..., argparse.Namespace], flag: str) -> None:
    args = validated(f"{RING} {flag} 60", without="--seq-length 64")
    assert args.seq_length == args.encoder_seq_length == 60


def test_both_lengths_are_still_refused_by_megatron(validated: Callable[..., argparse.Namespace]) -> None:
    with pytest.raises(AssertionError):
        validated(f"{RING} --seq-length 60 --encoder-seq-length 60")


def test_a_yaml_file_would_drop_the_flags(adapter: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from megatron.training import arguments

    monkeypatch.setattr(sys, "argv", ["x", "--yaml-cfg", str(tmp_path / "a.yaml"), "--cp-provider=ring"])
    with pytest.raises(ValueError, match=r"--yaml-cfg .*a.yaml makes Megatron ignore .* --cp-provider with it"):
        arguments.parse_args()


def test_several_problems_are_told_at_once(validated: Callable[..., argparse.Namespace]) -> None:
    with pytest.raises(
        ValueError, match=r"--qk-clip: .* \| --reset-position-ids: |--reset-position-ids: .* \| --qk-clip: "
    ):
        validated(f"{RING} --reset-position-ids --qk-clip")


def test_peek_takes_the_last_value_in_either_spelling() -> None:
    assert peek(["a", "--cp-device", "cpu", "--cp-device=cuda", "b"], "--cp-device") == "cuda"
    assert peek(["--cp-device-x", "cpu"], "--cp-device") is None
    assert peek(["--cp-device"], "--cp-device") is None


def test_defaults_without_megatron() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    assert settings_from(parser.parse_args([])) == Settings()
