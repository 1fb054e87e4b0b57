"""Peak memory of methods. The blocks that they ask their kernels for: ``test_auto_launches_what_its_cost_says``."""

from __future__ import annotations

import pytest
import torch

from cp_plugin import Options, Problem
from cp_plugin.engine.methods import registry as providers
from cp_plugin.planner.trace.memory import Meter, Peaks, peaks

SHARD = 64 * 16 * 8 * 2
"""Bytes of one rank's q, k, v or out."""
LSE = 64 * 16 * 4


def measured(provider: str, size: int, device: str = "meta", **options: object) -> Peaks:
    problem = Problem(size=size, heads=16, kv_heads=16, head_dim=8, seq_length=64 * size)
    return peaks(provider, problem, Options(**options), index=size - 1, device=device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_meter_counts_storages_until_they_are_freed(device: str) -> None:
    before = torch.empty(500, device=device)
    with Meter() as meter:
        a = torch.empty(1000, device=device)
        b = a + 1
        part = b.view(10, 100)[2:]
        before += 1
        assert (meter.live, meter.peak) == (8000, 8000)
        del a, b
        assert meter.live == 4000, "a view keeps its storage"
        del part
        assert meter.live == 0
        c = torch.cat([torch.zeros(10, device=device)] * 2)
        assert (meter.live, meter.peak) == (80, 8000)
        del c


@pytest.mark.parametrize("provider", providers.names())
def test_the_meta_device_needs_what_the_cpu_needs(provider: str) -> None:
    assert measured(provider, 4, "meta") == measured(provider, 4, "cpu")


def test_methods_need_what_they_hold() -> None:
    """Gathers: what is gathered and what the kernel returns; a ring: the same on any number of ranks."""
    for size in (2, 4, 8):
        assert measured("all_gather", size, head_groups=1)[0] == 2 * size * SHARD + SHARD + LSE
    rows, columns = 4, 2
    gathered = columns * SHARD + 2 * rows * SHARD
    assert measured("attention2d", 8, grid=(rows, columns), head_groups=1)[0] == gathered + columns * (SHARD + LSE)
    for name in ("ring", "striped", "burst"):
        assert len({measured(name, size) for size in (4, 8, 16)}) == 1


def test_only_two_head_groups_are_held_at_a_time() -> None:
    whole, grouped = (measured("attention2d", 16, grid=(4, 4), head_groups=groups) for groups in (1, 8))
    assert grouped[0] <= 0.35 * whole[0] and grouped[1] <= 0.5 * whole[1]
