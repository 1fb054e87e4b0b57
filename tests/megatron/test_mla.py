"""Multi-latent attention (MLA) under context parallelism: a planted fault, and what else its shapes ask for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import pytest
import textbook
from test_positions import zigzag_angles
from textbook import MLA, YARN
from training import compare, stock, train

from cp_plugin.testing.launch import RankError

STEPS = 2

pytestmark = pytest.mark.usefixtures("adapter")


_zigzag_angles = partial(zigzag_angles, "yarn_rotary")


def test_angles_of_another_layout_are_noticed() -> None:
    """Planted fault: by the self-check, and without it by the comparison with one rank."""
    flags = f"{YARN} --context-parallel-size 2 --cp-provider striped"
    with pytest.raises(RankError, match="differs from the step on one rank"):
        train(2, flags, model=MLA, prepare=_zigzag_angles)
    got = train(2, f"{flags} --cp-selfcheck off", steps=STEPS, model=MLA, prepare=_zigzag_angles)
    with pytest.raises(AssertionError, match="gradient of"):
        compare(got, stock(1, YARN, steps=STEPS, model=MLA, prepare=textbook.install), steps=STEPS)


GROUPS = "--group-query-attention --num-query-groups 2 "
STRIPED = "--context-parallel-size 4 --cp-provider striped"


def test_the_fused_rotation_is_switched_off(
    validated: Callable[..., argparse.Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.rules import checks

    args = validated(f"{STRIPED} --multi-latent-attention", without=GROUPS)
    assert "--no-rope-fusion" not in capsys.readouterr().out
    args.apply_rope_fusion = True  # the default on CUDA
    checks.before(args, runtime.settings())
    assert not args.apply_rope_fusion
    assert "setting --no-rope-fusion: the fused rotation of MLA" in capsys.readouterr().out


def test_the_provider_is_told_both_head_sizes(validated: Callable[..., argparse.Namespace]) -> None:
    from cp_plugin.megatron import runtime

    validated(f"{STRIPED} --multi-latent-attention --qk-head-dim 24 --v-head-dim 16", without=GROUPS)
    problem = runtime.problem()
    assert (problem.heads, problem.kv_heads, problem.head_dim, problem.v_head_dim) == (4, 4, 24 + 64, 16)
