"""Communicators created in a group's first operation, as by NCCL: who must join, and who did not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from equipment.nccl import lazy
from nightly import nightly

from cp_plugin.testing.launch import RankError, run_ranks

SOON = 2.0
"""Seconds: patience of a test in which a rank does not come."""


@pytest.fixture
def soon() -> Iterator[None]:
    with lazy.waiting(SOON):
        yield


def _exchange(x: torch.Tensor) -> None:
    peer = 1 - dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(op, x.clone(), peer) for op in (dist.isend, dist.irecv)]):
        work.wait()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: torch.distributed._functional_collectives.all_reduce(x, "sum", dist.group.WORLD).sum().item(),
        _exchange,
        pytest.param(dist.all_reduce, marks=nightly),
        pytest.param(lambda x: dist.barrier(), marks=nightly),
        pytest.param(lambda x: dist.broadcast_object_list([x], 0), marks=nightly),
    ],
    ids=["functional", "batch", "all_reduce", "barrier", "broadcast_object_list"],
)
def test_a_first_operation_without_all_ranks_is_named(operation: Callable[[torch.Tensor], object], soon: None) -> None:
    def rank() -> None:
        if dist.get_rank() < 2:
            operation(torch.ones(2))

    with pytest.raises(RankError, match=r"first operation of group 'default_pg' \(ranks 0-2\)") as failed:
        run_ranks(rank, 3, init_process_group=True)
    assert "these never did: 2" in str(failed.value)


def test_two_groups_in_opposite_orders_are_named(soon: None) -> None:
    """Each rank waits in a group that the other one has not come to."""

    def rank() -> None:
        groups = [dist.new_group([0, 1], group_desc=name) for name in ("one", "other")]
        for group in groups if dist.get_rank() == 0 else reversed(groups):
            dist.all_reduce(torch.ones(1), group=group)

    with pytest.raises(RankError, match=r"first operation of group '(one|other)'"):
        run_ranks(rank, 2, init_process_group=True)
