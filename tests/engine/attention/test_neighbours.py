"""What a short convolution and a shift of a sharded sequence send, keep and refuse.

That they are right: ``test_fuzz_calls``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import no_sums_in_half
from torch import Tensor

from cp_plugin import ContextParallel
from cp_plugin.engine.attention.convolution import short_convolution
from cp_plugin.engine.attention.shift import _plan as plan
from cp_plugin.engine.attention.shift import shift
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.testing.launch import run_ranks

S, B, C = 48, 2, 6


def run_on_shards(cp: ContextParallel, dtype: torch.dtype, bounds: tuple[int, ...] | None = None) -> list[Tensor]:
    """Of this rank's tokens: the result and the gradients of x, weight and bias."""
    shapes = (S // cp.size, B, C), (C, 4), (C,)
    leaves = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
    out = short_convolution(cp, *leaves, cu_seqlens=None if bounds is None else torch.tensor(bounds))
    return [out, *torch.autograd.grad(out.sum(), leaves)]


def test_sums_are_not_in_half_precision() -> None:
    def rank(mesh: Mesh) -> None:
        with no_sums_in_half(torch.bfloat16):
            results = run_on_shards(ContextParallel("lasp2", mesh=mesh, layout="zigzag"), torch.bfloat16)
        assert {x.dtype for x in results} == {torch.bfloat16}

    run_threads(rank, {"cp": 4})


@pytest.mark.parametrize(
    ("layout", "bounds", "rows"),
    [("contiguous", None, (3, 3, 3, 0)), ("zigzag", None, (3, 6, 6, 3)), ("contiguous", (0, 12, 22, 48), (0, 2, 3, 0))],
)
def test_rows_sent(layout: str, bounds: Any, rows: tuple[int, ...]) -> None:
    """w - 1 for each run that another rank continues, up to a document's start; as many gradients come back."""

    def rank(mesh: Mesh) -> tuple[int, int]:
        run_on_shards(ContextParallel("lasp2", mesh=mesh, layout=layout), torch.float64, bounds)
        return tuple(mesh.ledger.bytes(phase=phase) for phase in ("forward", "backward"))

    forward, backward = zip(*run_threads(rank, {"cp": 4}), strict=True)
    row = B * C * 8
    assert forward == tuple(n * row for n in rows)
    assert sum(backward) == sum(forward)


@pytest.mark.parametrize(
    ("provider", "weight", "message"),
    [
        ("ring", (C, 4), "'ring' is for softmax attention: short convolutions belong to linear attention; use.* lasp2"),
        ("lasp2", (C, 4, 1), r"got \[\(48, 2, 6\), \(6, 4, 1\), \(6,\)\]"),
        ("lasp2", (C, 4), r"got \[\(48, 2, 6\), \(6, 4\), \(7,\)\]"),
    ],
)
def test_refusals(provider: str, weight: tuple[int, ...], message: str) -> None:
    bias = torch.randn(C + (weight == (C, 4)))  # the only one that is wrong
    with pytest.raises(ValueError, match=message):
        short_convolution(ContextParallel(provider), torch.randn(S, B, C), torch.randn(weight), bias)


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
    info = plan.cache_info()
    assert info.hits >= 2 * 4 and info.misses >= 2 * 49 and info.currsize == info.maxsize == 32


def test_process_groups() -> None:
    """A mesh that ``ContextParallel`` makes has no group of all ranks of its own, but for some providers."""
    x, dy = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(0))
    wanted = torch.cat([x[1:], x.new_zeros(1, 3)]), torch.cat([dy.new_zeros(1, 3), dy[:-1]])

    def rank() -> list[bool]:
        right = []
        for name, options in {
            "striped": {},
            "lasp2": {},
            "burst": {"intra_size": 2},
            "usp": {"head_parallel": 2},
        }.items():
            cp = ContextParallel(name, group=dist.group.WORLD, **options)
            own = cp.shard(x).requires_grad_()
            y = shift(cp, own)
            y.backward(cp.shard(dy))
            right += [torch.equal(cp.unshard(got), want) for got, want in zip((y, own.grad), wanted, strict=True)]
        mesh = ContextParallel("usp", group=dist.group.WORLD, head_parallel=2).mesh
        with pytest.raises(ValueError, match="a shift needs a process group of all 4 ranks"):
            shift(ContextParallel("usp", mesh=mesh, head_parallel=2), x)
        return [*right, not mesh.ledger.entries()]

    assert run_ranks(rank, 4, init_process_group=True) == [[True] * 9] * 4
