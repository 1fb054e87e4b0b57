"""The flags of the providers' options: read, and refused where they fit neither provider, ranks nor model."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest
import torch
from nightly import one_case

from cp_plugin import Options, Problem
from cp_plugin.megatron.flags.args import Settings, add_arguments, settings_from
from cp_plugin.methods import registry as providers


@one_case
@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("attention2d --cp-grid 2x2 --cp-head-groups 2", Options(grid=(2, 2), head_groups=2)),
        ("attention2d --cp-grid 1x2 --cp-head-parallel 2", Options(grid=(1, 2), head_parallel=2)),
        ("burst --cp-intra-size 2 --cp-backward q", Options(intra_size=2, backward="q")),
        ("usp --cp-head-parallel 4 --cp-layout striped", Options(head_parallel=4, layout="striped")),
        ("ring --cp-head-parallel 1", Options(head_parallel=1)),
        *[
            (
                f"{name} --cp-layout auto --cp-backend auto --cp-grid auto --cp-head-parallel auto "
                "--cp-intra-size auto --cp-backward auto --cp-head-groups auto",
                Options(),
            )
            for name in providers.names()
        ],
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # what cannot be read
        ("attention2d --cp-grid 4by2", r"^--cp-grid 4by2: write rows x columns, such as 8x8, or auto$"),
        ("attention2d --cp-grid 0x4", r"^--cp-grid 0x4: write rows x columns"),
        ("attention2d --cp-grid 2x2x1", r"^--cp-grid 2x2x1: write rows x columns"),
        ("ring --cp-head-parallel two", r"^--cp-head-parallel two: write a number of ranks, such as 2, or auto$"),
        ("burst --cp-intra-size 0", r"^--cp-intra-size 0: write a number of ranks, such as 8, or auto$"),
        ("burst --cp-backward dq", r"^--cp-backward dq: write kv or q, or auto$"),
        ("all_gather --cp-head-groups 1.5", r"^--cp-head-groups 1.5: write a number of groups, such as 2, or auto$"),
        # what does not fit the number of ranks
        (
            "attention2d --cp-grid 2x3",
            r"^--cp-grid 2x3 does not hold 4 context-parallel ranks: use one of 1x4, 2x2, 4x1$",
        ),
        ("ring --cp-head-parallel 3", r"^--cp-head-parallel 3 does not divide 4 .*ranks: use one of 1, 2, 4$"),
        ("burst --cp-intra-size 3", r"^--cp-intra-size 3 does not divide 4 .*ranks: use one of 1, 2, 4$"),
        # what means nothing to the provider
        (
            "ring --cp-grid 2x2",
            r"^--cp-grid 2x2 does nothing with --cp-provider ring: leave it out, or use attention2d$",
        ),
        ("attention2d --cp-intra-size 2", r"^--cp-intra-size 2 does nothing with .*, or use burst or double_ring$"),
        ("double_ring --cp-backward q", r"^--cp-backward q does nothing with .*, or use burst$"),
        ("striped --cp-head-groups 2", r"^--cp-head-groups 2 does nothing with .*, or use all_gather or attention2d$"),
        ("ulysses --cp-head-parallel 2", r"^--cp-head-parallel 2: --cp-provider ulysses divides the heads over all"),
    ],
)
def test_bad_options(validated: Callable[..., argparse.Namespace], flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validated(f"--context-parallel-size 4 --cp-provider {flags}")


@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        (
            6,
            "attention2d --cp-grid 2x3 --seq-length 60 --cp-layout striped",
            r"--cp-grid 2x3 under a causal mask on striped tokens: neither side divides the other, .*"
            r"the nearest grids that fit, with the bytes each rank sends: 1x6 \([\d.]+ kB\), 6x1 \([\d.]+ kB\)$",
        ),
        (
            8,
            "ring --cp-head-parallel 8",
            r"--cp-head-parallel 8: 4 query heads and 2 key/value heads on each rank cannot be divided over 8 ranks",
        ),
        (8, "ulysses", r"--context-parallel-size 8: 4 query heads and 2 key/value heads .*over 8 ranks"),
        (
            5,
            "usp --seq-length 60",
            r"--cp-provider usp finds no way to divide 4 query and 2 key/value heads .*use ring",
        ),
        (
            4,
            "attention2d --cp-head-groups 3",
            r"--cp-head-groups 3 does not divide the 2 key/value heads .*one of 1, 2",
        ),
        (4, "all_gather --cp-head-groups 4", r"--cp-head-groups 4 does not divide the 2 key/value heads"),
        (
            8,
            "ring --cp-head-parallel 4 --tensor-model-parallel-size 2",
            r"--cp-head-parallel 4: 2 query heads and 1 key/value heads on each rank cannot be divided over 4 ranks",
        ),
    ],
)
def test_options_that_do_not_fit_the_model(
    validated: Callable[..., argparse.Namespace], ranks: int, flags: str, message: str
) -> None:
    size = 4 if "tensor" in flags else ranks
    with pytest.raises(ValueError, match=message):
        validated(f"--context-parallel-size {size} --cp-provider {flags}", ranks=ranks)


@pytest.mark.parametrize("size", [2, 8])
def test_usp_is_not_refused_before_the_heads_are_known(validated: Callable[..., argparse.Namespace], size: int) -> None:
    checked = validated(f"--context-parallel-size {size} --cp-provider usp", ranks=size)
    assert (checked.cp_provider, checked.cp_head_parallel) == ("usp", None)


def test_auto_alone_asks_for_nothing() -> None:
    words = ["--cp-grid", "auto", "--cp-backward", "auto", "--cp-layout", "auto"]
    assert settings_from(add_arguments(argparse.ArgumentParser()).parse_args(words)) == Settings()
