"""What a shift of a sharded sequence sends, keeps and needs; that it is right: ``test_fuzz_calls``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cp_plugin import ContextParallel
from cp_plugin.attention.shift import _plan as plan
from cp_plugin.attention.shift import shift
from cp_plugin.comm import Mesh, run_threads
from cp_plugin.testing.launch import run_ranks

TOKENS = 48


@pytest.mark.parametrize(
    ("layout", "tokens"), [("contiguous", 1), ("zigzag", 2), ("striped", TOKENS // 4)], ids=lambda x: str(x)
)
def test_bytes_of_a_shift(layout: str, tokens: int) -> None:
    def rank(mesh: Mesh) -> dict[tuple[str, str], int]:
        cp = ContextParallel("ring" if layout != "striped" else "striped", mesh=mesh, layout=layout)
        y = shift(cp, torch.zeros(2, TOKENS // 4, 3, requires_grad=True), 1)
        assert y.is_contiguous()
        y.sum().backward()
        return {(line.phase, line.axis): line.bytes for line in mesh.ledger.entries()}

    token = 2 * 3 * 4
    for sent in run_threads(rank, {"cp": 4}):
        assert sent == {("forward", "all"): tokens * token, ("backward", "all"): tokens * token}


def test_indices_are_made_once_a_length() -> None:
    """They also serve gradients after an evaluation without any; those of many lengths are not all kept."""
    plan.cache_clear()

    def rank(mesh: Mesh) -> None:
        cp = ContextParallel("ring", mesh=mesh, layout="zigzag")
        with torch.inference_mode():
            shift(cp, torch.zeros(TOKENS // 2))
        for _ in range(3):
            x = torch.zeros(TOKENS // 2, 2, requires_grad=True)
            (grad,) = torch.autograd.grad(shift(cp, x).sum(), x)
            assert cp.unshard(grad).sum() == 2 * (TOKENS - 1)
        for length in range(2, 100, 2):
            shift(cp, torch.zeros(length))

    run_threads(rank, {"cp": 2})
    found = plan.cache_info()
    assert found.hits >= 2 * 4 and found.misses >= 2 * 49 and found.currsize == found.maxsize == 32


def test_process_groups() -> None:
    """A mesh that ``ContextParallel`` makes has no group of all ranks of its own, but for some providers."""
    x, dy = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(0))
    wanted = torch.cat([x[1:], x.new_zeros(1, 3)]), torch.cat([dy.new_zeros(1, 3), dy[:-1]])

    def rank() -> list[bool]:
        found = []
        for name, options in {
            "striped": {},
            "lasp2": {},
            "burst": {"intra_size": 2},
            "usp": {"head_parallel": 2},
        }.items():
            cp = ContextParallel(name, group=dist.group.WORLD, **options)
            mine = cp.shard(x).requires_grad_()
            y = shift(cp, mine)
            y.backward(cp.shard(dy))
            found += [torch.equal(cp.unshard(got), want) for got, want in zip((y, mine.grad), wanted, strict=True)]
        mesh = ContextParallel("usp", group=dist.group.WORLD, head_parallel=2).mesh
        with pytest.raises(ValueError, match="a shift needs a process group of all 4 ranks"):
            shift(ContextParallel("usp", mesh=mesh, head_parallel=2), x)
        return [*found, not mesh.ledger.entries()]

    assert run_ranks(rank, 4, init_process_group=True) == [[True] * 9] * 4
