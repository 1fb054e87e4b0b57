"""The page on precision: what its table allows, and how NCCL adds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import precision_tables as tables
import pytest
import torch
from nightly import each_value, nightly

from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.gradient_dtype import KEY_HOPS, ONE_HOP, QUERY_HOPS, REDUCE_SCATTER, TOKENS

WAYS = (KEY_HOPS, QUERY_HOPS, REDUCE_SCATTER, ONE_HOP)
MODEL = {"gradient_dtype": "model"}


def test_nccl_adds_from_rank_to_rank_in_the_dtype_that_travels() -> None:
    parts = [torch.tensor([256.0, 0.0]), torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])]

    def rank(mesh: Mesh) -> torch.Tensor:
        own = torch.cat([parts[mesh.index].bfloat16()] * 3)
        return tables.AsNccl(mesh)._sum_and_scatter("a", (own,)).wait()[0][0]

    assert [x.item() for x in run_threads(rank, {"a": 3})] == [258.0, 256.0, 256.0]
    # rank 0's begins at rank 1 with 1 + 1; the others begin with, or come early to, 256, which 1 does not change


@each_value
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("name", "options", "ranks"),
    [
        ("ring", {"layout": "zigzag"}, 8),
        pytest.param("ring", {"layout": "zigzag"}, 64, marks=nightly),
        ("burst", {"layout": "zigzag", "backward": "q", "intra_size": 1}, 8),
        ("all_gather", {"head_groups": 1}, 8),
        ("attention2d", {"head_groups": 1}, 8),
        pytest.param("attention2d", {"head_groups": 1, "grid": (8, 8)}, 64, marks=nightly),
        ("needed", {"layout": "zigzag"}, 8),
    ],
)
def test_what_the_table_allows_has_at_most_twice_the_error_of_one_device(
    name: str, options: dict[str, Any], ranks: int, kv_heads: int
) -> None:
    """Without what ``verify`` grants to roundings of sums, and with NCCL's additions emulated."""
    assert {1, 2} == set(TOKENS) and {8, 64} == {way.ranks for way in WAYS}
    like = replace(tables.problem_of(ranks, torch.bfloat16), kv_heads=kv_heads).with_transport(
        hosts=tuple(map(str, range(ranks)))
    )
    assert providers.settle(name, like, Options(**options)).options.gradient_dtype == "model"
    alone = tables.one_device(1, torch.bfloat16, kv_heads=kv_heads)
    got = tables.provider_errors(ranks, torch.bfloat16, name, over=tables.AsNccl, kv_heads=kv_heads, **options, **MODEL)
    for gradient, error in got.items():
        assert error <= 2 * alone[gradient], gradient
