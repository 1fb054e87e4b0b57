"""Megatron's memory, precision and diagnosis features with context parallelism, against the same without it."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from nightly import nightly, one_case
from scripts import attend_once
from training import LOSS, Record, differences, stock, train

STEPS = 3
LAYOUTS = ("striped", "ring --cp-layout zigzag")

pytestmark = pytest.mark.usefixtures("adapter")


def losses(records: Sequence[Record]) -> list[float]:
    return next(record.losses for record in records if record.losses)


@one_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_on_the_context_parallel_ranks(layout: str) -> None:
    """Each context-parallel rank holds the experts that it would hold as a data-parallel rank."""
    model = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2"
    want = stock(2, model, steps=STEPS)
    got = train(2, f"{model} --context-parallel-size 2 --cp-provider {layout}", steps=STEPS)
    assert max(differences(losses(got), losses(want))) <= LOSS
    for record, base in zip(got, want, strict=True):
        assert any("experts" in name for name in base.grads)
        for name, grad in base.grads.items():
            assert torch.equal(record.weights[name], base.weights[name])
            assert (record.grads[name] - grad).norm() <= 1e-4 * grad.norm(), name


RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@nightly
def test_attention_is_repeated_where_asked() -> None:
    """Where it is not asked for: ``cases.toml`` (recomputed)."""
    flags = "--context-parallel-size 4 --cp-provider striped"
    twice = functools.partial(attend_once, 2)
    got = train(4, f"{flags} {RECOMPUTED} --cp-recompute-attention", steps=STEPS, prepare=twice)
    for record, base in zip(got, train(4, flags, steps=STEPS), strict=True):
        assert all(torch.equal(record.grads[name], grad) for name, grad in base.grads.items())
        assert record.sent == {line: sent * (1 + (line[0] == "forward")) for line, sent in base.sent.items()}


def test_what_recomputation_replaces(validated: Callable[..., argparse.Namespace]) -> None:
    from cp_plugin.megatron.patches import patching
    from cp_plugin.megatron.patches.hooks import OF_RUN

    flags = "--context-parallel-size 4 --cp-provider striped"
    replaced = {patch.target for patch in OF_RUN if "recomputation" in patch.reason}
    for none in (f"{flags} {RECOMPUTED} --cp-recompute-attention", flags):
        validated(none)
        assert not replaced & set(patching.installed())
    validated(f"{flags} {RECOMPUTED}")
    assert len(replaced) == 2 and replaced <= set(patching.installed())
