"""The flags of the providers' options: read, and refused where they fit neither provider, ranks nor model."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest
import torch
from nightly import one_case

from cp_plugin import Options, Problem
from cp_plugin.megatron.flags.args import Settings, add_arguments
from cp_plugin.methods import registry as providers

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
def test_good_options(validated: Callable[..., argparse.Namespace], flags: str, options: Options) -> None:
    from cp_plugin.megatron import runtime

    validated(f"--context-parallel-size 4 --cp-provider {flags}")
    assert runtime.settings() == Settings(provider=flags.split()[0], options=options)
    assert runtime.problem() == Problem(
        size=4, heads=4, kv_heads=2, head_dim=16, seq_length=64, batch=2, dtype=torch.float32, network="gloo"
    )


def test_every_option_of_a_provider_has_a_flag() -> None:
    declared = {option for provider in providers.registry().values() for option in provider.options}
    assert declared == {"backward", "gradient_dtype", "grid", "head_groups", "head_parallel", "intra_size"}
    flags = vars(add_arguments(argparse.ArgumentParser()).parse_args([]))
    assert {f"cp_{option}" for option in (*declared, "layout", "backend", "fp8")} <= flags.keys()


@pytest.mark.parametrize("size", [2, 8])
def test_usp_is_not_refused_before_the_heads_are_known(validated: Callable[..., argparse.Namespace], size: int) -> None:
    checked = validated(f"--context-parallel-size {size} --cp-provider usp", ranks=size)
    assert (checked.cp_provider, checked.cp_head_parallel) == ("usp", None)
