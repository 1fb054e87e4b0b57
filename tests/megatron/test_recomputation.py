"""Activation recomputation in Megatron's training loop: same gradients, without repeating attention or its messages.

Kernel calls are counted: as many forwards as backwards where nothing is repeated.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from nightly import nightly, one_case
from training import Record, assert_same_bits, train

from cp_plugin.kernels.backends.sdpa import Sdpa

SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn"
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers"
PIPELINE = "--pipeline-model-parallel-size 2 --global-batch-size 8"
VIRTUAL = f"{PIPELINE} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
STEPS = 2

pytestmark = pytest.mark.usefixtures("adapter")


def count_kernels(forwards: int = 1) -> None:
    """Fail a step unless it calls the kernel's forward ``forwards`` times as often as its backward."""
    from megatron.training import training

    calls = {"forward": 0, "backward": 0}
    for name in calls:
        setattr(Sdpa, name, _counted(getattr(Sdpa, name), calls, name))
    step = training.train_step

    @functools.wraps(step)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        calls.update(forward=0, backward=0)
        result = step(*args, **kwargs)
        assert calls["forward"] == forwards * calls["backward"] > 0, calls
        return result

    training.train_step = train_step


def _counted(original: Callable[..., Any], calls: dict[str, int], name: str) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        calls[name] += 1
        return original(*args)

    return kernel


@functools.cache
def plainly(ranks: int, flags: str) -> list[Record]:
    return train(ranks, flags, steps=STEPS)


def assert_same(got: Sequence[Record], want: Sequence[Record]) -> None:
    """Bit for bit, and byte for byte."""
    assert_same_bits(got, want)
    for record, base in zip(got, want, strict=True):
        assert record.sent == base.sent == base.formula != {}


SAME = (
    ("striped", f"{UNIFORM} 1"),
    ("striped", f"{BLOCK} 1"),
    ("striped", SELECTIVE),
    ("attention2d --cp-grid 2x2 --cp-layout zigzag", f"{UNIFORM} 2"),
    ("usp", SELECTIVE),
    ("ring --cp-head-parallel 2", f"{BLOCK} 2"),
    ("all_gather", f"{UNIFORM} 1"),
    (f"striped {PIPELINE}", SELECTIVE),
    (f"striped {VIRTUAL}", f"{UNIFORM} 1"),
)


@one_case
@pytest.mark.parametrize(("provider", "recompute"), SAME)
def test_attention_is_not_repeated(provider: str, recompute: str) -> None:
    flags = f"--context-parallel-size {2 if 'pipeline' in provider else 4} --cp-provider {provider}"
    assert_same(train(4, f"{flags} {recompute}", steps=STEPS, prepare=count_kernels), plainly(4, flags))


@nightly
def test_attention_is_repeated_where_asked() -> None:
    flags = "--context-parallel-size 4 --cp-provider striped"
    twice = functools.partial(count_kernels, 2)
    got = train(4, f"{flags} {UNIFORM} 1 --cp-recompute-attention", steps=STEPS, prepare=twice)
    for record, base in zip(got, plainly(4, flags), strict=True):
        assert all(torch.equal(record.grads[name], grad) for name, grad in base.grads.items())
        assert record.sent == {line: sent * (1 + (line[0] == "forward")) for line, sent in base.sent.items()}


def test_the_flag(validated: Callable[..., argparse.Namespace]) -> None:
    from cp_plugin.megatron.patches import patching
    from cp_plugin.megatron.patches.hooks import RECOMPUTE

    flags = "--context-parallel-size 4 --cp-provider striped"
    replaced = {patch.target for patch in RECOMPUTE}
    for none in (f"{flags} {UNIFORM} 1 --cp-recompute-attention", flags):
        validated(none)
        assert not replaced & set(patching.installed())
    validated(f"{flags} {UNIFORM} 1")
    assert replaced <= set(patching.installed())
