"""Every method on ranks with data, with poisoned receive buffers: the numbers of one device."""

from __future__ import annotations

from typing import Any

import pytest
from equipment.nccl import programs
from equipment.nccl.model import run_with_data
from linear_cases import LinearCase
from linear_cases import run_on_shards as run_linear_on_shards
from method_cases import METHODS
from oracle import Case, Result, errors, relative_error
from test_mesh import with_any_strides
from thread_ranks import run_on_shards, typical

from cp_plugin import ContextParallel
from cp_plugin.engine.comm import Mesh

CASE = Case(seq_length=16, heads=8, kv_heads=4, causal=True, batch=1, head_dim=8, v_head_dim=4)


def compare(provider: str, size: int, case: Case, **options: Any) -> None:
    want = case.reference()
    axes, extra = programs.meshes(provider, size, case, **options)

    def rank(mesh: Mesh) -> float:
        cp = ContextParallel(provider, mesh=mesh, problem=typical(case, size), **options)
        return max(errors(run_on_shards(cp, case), Result(*map(cp.shard, want[:4]))))

    assert max(run_with_data(rank, axes, extra)) < 1e-12


@pytest.mark.parametrize(("provider", "layout"), METHODS)
def test_every_provider_and_layout(provider: str, layout: str) -> None:
    compare(provider, 4, CASE, layout=layout)


@pytest.mark.parametrize(
    ("provider", "options"),
    [
        ("burst", {"intra_size": 2, "backward": "kv"}),
        ("burst", {"intra_size": 2, "backward": "q"}),
        ("ring", {"head_parallel": 2}),
        ("attention2d", {"grid": (2, 2), "layout": "striped", "head_groups": 2}),
        ("all_gather", {"head_groups": 2}),
        ("attention2d", {"grid": (1, 2), "head_parallel": 2}),
    ],
    ids=str,
)
def test_options(provider: str, options: dict[str, Any]) -> None:
    compare(provider, 4, CASE, **options)


@pytest.mark.parametrize(
    ("provider", "decay", "delta"),
    [
        *(("lasp2", decay, delta) for decay in ("none", "token") for delta in (False, True)),
        *((name, "token", delta) for name in ("lasp1", "zeco") for delta in (False, True)),
        ("linear_ring", "none", False),
    ],
)
def test_linear_methods(provider: str, decay: Any, delta: bool) -> None:
    case = LinearCase(decay=decay, delta=delta, seq_length=24)
    want = case.want()

    def rank(mesh: Mesh) -> float:
        cp = ContextParallel(provider, mesh=mesh)
        return max(map(relative_error, run_linear_on_shards(cp, case), map(cp.shard, want)))

    assert max(run_with_data(rank, {"cp": 3})) < 1e-9


def test_tensors_with_any_strides_may_be_sent() -> None:
    """The model refuses to send or receive others than contiguous ones."""
    assert all(run_with_data(with_any_strides, {"cp": 2}))
