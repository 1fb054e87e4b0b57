"""Groups whose communicators are made in their first operation, as NCCL makes them: who has to come, and who did not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import Case
from nightly import nightly
from strict import lazy
from thread_ranks import typical

from cp_plugin import ContextParallel
from cp_plugin.launch import RankError, run_ranks

SOON = 4.0
"""Seconds: patience of a test in which a rank does not come."""


@pytest.fixture
def soon() -> Iterator[None]:
    with lazy.waiting(SOON):
        yield


def _operation(name: str, here: int) -> None:
    ones = torch.ones(2)
    if name == "all_reduce":
        dist.all_reduce(ones)
    elif name == "barrier":
        dist.barrier()
    elif name == "broadcast_object_list":
        dist.broadcast_object_list([here], 0)
    elif name == "functional":
        torch.distributed._functional_collectives.all_reduce(ones, "sum", dist.group.WORLD).sum().item()
    elif name == "batch":
        peer = 1 - here
        ops = [dist.P2POp(dist.isend, ones, peer), dist.P2POp(dist.irecv, ones.clone(), peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "broadcast_object_list", "functional", "batch"])
def test_a_first_operation_without_all_ranks_is_named(name: str, soon: None) -> None:
    def rank() -> None:
        if dist.get_rank() < 2:
            _operation(name, dist.get_rank())

    with pytest.raises(RankError, match=r"first operation of group 'default_pg' \(ranks \[0, 1, 2\]\)") as failed:
        run_ranks(rank, 3, init_process_group=True)
    assert "these never did: 2" in str(failed.value)


def attend(provider: str, size: int, world: int, **options: Any) -> None:
    """Forward and backward on the first ``size`` ranks of ``world``, with groups that nobody has used."""
    case = Case(seq_length=4 * size, heads=2, kv_heads=2, causal=True, batch=1, head_dim=8, v_head_dim=8)

    def rank() -> None:
        group = dist.new_group(list(range(size)), group_desc="CONTEXT_PARALLEL_GROUP")
        if dist.get_rank() >= size:
            return
        cp = ContextParallel(provider, group=group, problem=typical(case, size), **options)
        q, k, v, dout = (cp.shard(x) for x in case.inputs())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        cp.attention(*leaves, causal=True).backward(dout)

    run_ranks(rank, world, init_process_group=True, timeout=300)


@pytest.mark.parametrize("layout", ["striped", "contiguous", "zigzag"])
@pytest.mark.parametrize("size", [4, 9])
def test_attention2d_starts(size: int, layout: str) -> None:
    """Ranks whose shard stays where it is have nothing to send in the first exchange of the whole grid."""
    side = math.isqrt(size)
    attend("attention2d", size, size + 1, grid=(side, side), layout=layout)


@nightly
@pytest.mark.parametrize("layout", ["striped", "contiguous"])
def test_attention2d_starts_on_64_ranks(layout: str) -> None:
    attend("attention2d", 64, 64, grid=(8, 8), layout=layout)
