"""Every provider, layout and flag in Megatron's training loop: the numbers of one rank, the bytes of the formula."""

from __future__ import annotations

import parity
import pytest
from nightly import one_case, slow

from cp_plugin.core.layout import LAYOUTS
from cp_plugin.methods import registry as providers

pytestmark = pytest.mark.usefixtures("adapter")


def check(provider: str, parallel: str = "", ranks: int = 1) -> None:
    """On four times as many ranks as without context parallelism."""
    parity.check(parallel, f"--cp-provider {provider}", ranks=ranks, counted=True)


METHODS = [(name, layout) for name in providers.names() for layout in providers.get(name).layouts if layout in LAYOUTS]
"""On packs, and by their documents: ``test_documents_layout``."""


@one_case
@pytest.mark.parametrize(("provider", "layout"), METHODS)
def test_every_provider_and_layout(provider: str, layout: str) -> None:
    check(f"{provider} --cp-layout {layout}")


@one_case
@pytest.mark.parametrize("provider", ["attention2d", "burst", "ring", "striped", "usp"])
def test_behind_a_head_axis(provider: str) -> None:
    check(f"{provider} --cp-head-parallel 2")


@one_case
@pytest.mark.parametrize("grid", ["1x4", "2x2", "4x1"])
@pytest.mark.parametrize("groups", [1, 2])
def test_grids_and_head_groups(grid: str, groups: int) -> None:
    check(f"attention2d --cp-grid {grid} --cp-head-groups {groups}")


@one_case
@pytest.mark.parametrize(
    "flags", ["burst --cp-backward kv", "burst --cp-backward q --cp-layout striped", "double_ring --cp-layout striped"]
)
def test_nested_rings(flags: str) -> None:
    check(f"{flags} --cp-intra-size 2")


def test_gathering_in_head_groups() -> None:
    check("all_gather --cp-head-groups 2")


@one_case
@pytest.mark.parametrize("provider", ["attention2d --cp-grid 2x2", "burst --cp-intra-size 2", "ulysses"])
def test_multi_query_attention(provider: str) -> None:
    check(provider, parallel="--num-query-groups 1")


@one_case
@pytest.mark.parametrize("parallel", ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"])
def test_a_grid_with_tensor_and_pipeline_parallelism(parallel: str) -> None:
    check("attention2d --cp-grid 2x2", parallel=parallel, ranks=2)


@slow
def test_a_head_axis_a_grid_and_tensor_parallelism() -> None:
    heads = "--num-attention-heads 8 --num-query-groups 4 --tensor-model-parallel-size 2"
    check("attention2d --cp-grid 1x2 --cp-head-parallel 2", parallel=heads, ranks=2)
