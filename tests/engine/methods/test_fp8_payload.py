"""FP8 payloads: what arrives, what the ledger counts, errors of results, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from nightly import NIGHT
from oracle import Case, Result
from thread_ranks import run, run_on_threads
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.comm import WHOLE, Mesh, Pending, ThreadMesh, run_threads, sums
from cp_plugin.engine.comm.payload import PayloadMesh, rounded
from cp_plugin.engine.methods import registry as providers
from cp_plugin.testing.verify import plan, verify

TOKENS, BLOCK = 24, 8
HALF = (torch.bfloat16, torch.float16)


def tensors(rank: int, tokens: int) -> tuple[Tensor, ...]:
    """Payloads of both dtypes and several sizes between row statistics, from 1e-3 to 1e3."""
    g = torch.Generator().manual_seed(rank)
    a, b = HALF
    shapes = ((a, 2, 8), (torch.float32, 2), (b, 3, 5), (torch.float64, 3), (a, 1, 16))
    size = 10.0 ** torch.arange(-3, 4).repeat_interleave(BLOCK)[:tokens]
    scale = torch.nn.functional.pad(size, (0, tokens - len(size)), value=1.0)
    return tuple(
        (torch.randn(tokens, 2, *shape, generator=g) * scale.view(-1, 1, *(1 for _ in shape))).to(dtype)
        for dtype, *shape in shapes
    )


VERBS: dict[str, tuple[int, Callable[[Mesh, tuple[Tensor, ...]], Pending]]] = {
    "exchange": (
        1,
        lambda mesh, x: mesh.exchange("a", x, to=1 - mesh.coordinates["a"], source=1 - mesh.coordinates["a"]),
    ),
    "shift": (1, lambda mesh, x: mesh.shift("b", x, group=sums("b"))),
    "whole": (1, lambda mesh, x: mesh.exchange(WHOLE, x, to=(mesh.index + 1) % 4, source=(mesh.index - 1) % 4)),
    "all_gather": (1, lambda mesh, x: mesh.all_gather("b", x)),
    "all_to_all": (2, lambda mesh, x: mesh.all_to_all("b", x)),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_round_once_and_count_what_travels(verb: str) -> None:
    parts, call = VERBS[verb]

    def rank(mesh: ThreadMesh) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], int, int]:
        x = tensors(mesh.index, parts * TOKENS)
        packed = PayloadMesh(mesh, BLOCK)
        got = call(packed, x).wait()
        sent = mesh.ledger.bytes()
        mesh.ledger.reset()
        want = call(mesh, tuple(rounded(t, BLOCK) if t.dtype in HALF else t for t in x)).wait()
        return got, want, sent, mesh.ledger.bytes()

    for index, (got, want, sent, before) in enumerate(run_threads(rank, {"a": 2, "b": 2})):
        assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in want]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (verb, index)
        halves = [t for t in tensors(index, parts * TOKENS) if t.dtype in HALF]
        saved = sum(t.nbytes // 2 - t.nbytes // 2 // t.size(3) // BLOCK for t in halves)
        assert before - sent == saved // parts  # a rank sends one other rank its all, or one part of two


def test_every_provider_is_within_e4m3_limits() -> None:
    """All providers and layouts, nested rings, a head axis; causal and full; equal and grouped heads; 4 ranks.

    The limit is twice the error of one call on one device with rounded inputs and results. An error far below
    bfloat16's would mean that nothing was rounded.
    """
    problems = [
        Problem(size=4, heads=8, kv_heads=g, head_dim=16, v_head_dim=e, seq_length=96, batch=1, causal=causal)
        for g, e, causal in ((8, 16, True), (2, 24, True), (2, 16, False))
    ]
    softmax = providers.names()
    planned = [setup for options in OPTIONS for setup in plan(_takers(softmax, options), problems, options)]
    one_each = {(setup.provider.name, setup.layout): setup for setup in planned if setup.reason is None}
    results = verify(planned if NIGHT else [*one_each.values()], "cpu", threads=True)
    assert len(results) > (60 if NIGHT else 20)
    assert {result.setup.provider.name for result in results} == set(softmax)
    for result in results:
        assert result.ok, (result.setup.provider.name, str(result.setup), result.setup.layout, result)
        assert 1e-2 < max(result.errors.values()) < 0.1, result


OPTIONS = (
    Options(fp8="comm"),
    Options(fp8="comm", head_parallel=2),
    Options(fp8="comm", intra_size=2, backward="q"),
    Options(fp8="comm", head_groups=2),
)


def _takers(names: list[str], options: Options) -> list[str]:
    needed = set(options.chosen) - {"fp8", "head_parallel"}
    return [
        name
        for name in names
        if needed <= set(providers.get(name).options) and not (options.head_parallel and name == "ulysses")
    ]


def test_without_fp8() -> None:
    problem = Case(seq_length=96, heads=4, kv_heads=2, causal=True, dtype=torch.bfloat16)

    def rank(mesh: Mesh) -> tuple[Result, Result]:
        cp = ContextParallel("striped", mesh=mesh, fp8="comm")
        return run(cp.without_fp8(), problem), run(cp, problem)

    plain = run_on_threads("striped", 4, problem)
    for before, (exact, fp8) in zip(plain, run_threads(rank, {"cp": 4}), strict=True):
        assert torch.equal(before.out, exact.out) and torch.equal(before.dk, exact.dk)
        assert not torch.equal(before.out, fp8.out)
