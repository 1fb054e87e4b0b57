"""Megatron's groups under lazy communicators, with context parallelism as a part of a larger world.

All of Megatron's own collectives are held to the rule too. Numbers are checked elsewhere: here a training starts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nightly import one_case
from warm import before_forking


@pytest.fixture(scope="module")
def _megatron() -> Iterator[None]:
    """Megatron, imported once for all the forked ranks."""
    from cp_plugin.megatron.cpu import mode as cpu

    with cpu.cpu_mode():
        import megatron.training.initialize
        import megatron.training.training  # noqa: F401

        before_forking()
        yield


@one_case
@pytest.mark.usefixtures("_megatron")
@pytest.mark.parametrize("beside", ["--tensor-model-parallel-size 2", ""], ids=["tp2", "dp2"])
def test_a_part_of_the_ranks_attends_on_a_grid(beside: str) -> None:
    from training import train

    flags = "--context-parallel-size 4 --cp-provider attention2d --cp-layout striped --cp-grid 2x2"
    found = train(8, f"{flags} {beside}")
    assert all(record.sent == record.formula for record in found)
    assert {record.coordinates["cp"] for record in found} == {0, 1, 2, 3}
