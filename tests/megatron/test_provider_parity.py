"""Every provider, layout and option in Megatron's training loop: one rank's numbers, and the bytes of the formula."""

from __future__ import annotations

import pytest
from nightly import one_case
from parity import check

from cp_plugin.core.layout import LAYOUTS
from cp_plugin.methods import registry as providers

pytestmark = pytest.mark.usefixtures("adapter")

METHODS = [
    *(f"{name} --cp-layout {at}" for name in providers.names() for at in providers.get(name).layouts if at in LAYOUTS),
    *(f"{name} --cp-head-parallel 2" for name in ("attention2d", "burst", "ring", "striped", "usp")),
    *(f"attention2d --cp-grid {grid} --cp-head-groups {n}" for grid in ("1x4", "2x2", "4x1") for n in (1, 2)),
    "burst --cp-backward kv --cp-intra-size 2",
    "burst --cp-backward q --cp-layout striped --cp-intra-size 2",
    "double_ring --cp-layout striped --cp-intra-size 2",
    "all_gather --cp-head-groups 2",
]
"""Packs placed by their documents are in ``test_documents_layout``."""


@one_case
@pytest.mark.parametrize("method", METHODS)
def test_every_provider_layout_and_option(method: str) -> None:
    check("", f"--cp-provider {method}", counted=True)


MULTI_QUERY = "--num-query-groups 1"
TENSOR = "--tensor-model-parallel-size 2"
BESIDE = [
    (1, MULTI_QUERY, "attention2d --cp-grid 2x2"),
    (1, MULTI_QUERY, "burst --cp-intra-size 2"),
    (1, MULTI_QUERY, "ulysses"),
    (2, "--pipeline-model-parallel-size 2", "attention2d --cp-grid 2x2"),
    (2, f"{TENSOR} --num-attention-heads 8 --num-query-groups 4", "attention2d --cp-grid 1x2 --cp-head-parallel 2"),
]


@one_case
@pytest.mark.parametrize(("ranks", "model", "method"), BESIDE)
def test_with_other_heads_and_other_parallelism(ranks: int, model: str, method: str) -> None:
    check(model, f"--cp-provider {method}", ranks=ranks, counted=True)
