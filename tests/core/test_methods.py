"""Every registered provider, on every layout it supports, against the float64 oracle; and its traffic.

The tests iterate the registry: a new method is covered by adding its file.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from oracle import Case, Result, assert_close, errors

from cp_plugin import ContextParallel, providers
from cp_plugin.launch import run_ranks
from cp_plugin.mesh import Mesh, TraceMesh, run_threads

METHODS = [(name, layout) for name in providers.names() for layout in providers.get(name).layouts]
HEADS = {"mha": (4, 4), "gqa": (8, 2), "mqa": (4, 1)}
SIZES = (1, 2, 4, 8)

methods = pytest.mark.parametrize(("provider", "layout"), METHODS, ids=["-".join(m) for m in METHODS])
heads = pytest.mark.parametrize("heads", HEADS)
masks = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


def case(heads: str, causal: bool, dtype: torch.dtype = torch.float64) -> Case:
    h, g = HEADS[heads]
    return Case(seq_length=128, heads=h, kv_heads=g, causal=causal, dtype=dtype)


def run(cp: ContextParallel, problem: Case) -> Result:
    """Forward and backward through autograd on this rank's shards; the whole result."""
    q, k, v, dout = (cp.shard(x) for x in problem.inputs())
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = cp.attention(q, k, v, causal=problem.causal)
    out.backward(dout)
    assert out.dtype == problem.dtype
    return Result(*(cp.unshard(x.detach()) for x in (out, q.grad, k.grad, v.grad)))


def on_threads(provider: str, layout: str, size: int, problem: Case, backend: str = "auto") -> list[Result]:
    def rank(mesh: Mesh) -> Result:
        return run(ContextParallel(provider, mesh=mesh, layout=layout, backend=backend), problem)

    return run_threads(rank, providers.get(provider).axes(size, ContextParallel(provider, layout=layout).options))


@methods
@masks
@heads
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_float64(provider: str, layout: str, heads: str, causal: bool, backend: str) -> None:
    problem = case(heads, causal)
    want = problem.reference()
    for size in SIZES:
        for rank, got in enumerate(on_threads(provider, layout, size, problem, backend)):
            assert_close(got, want, 1e-10, (provider, layout, size, rank))


@methods
@masks
@heads
def test_float32(provider: str, layout: str, heads: str, causal: bool) -> None:
    problem = case(heads, causal, torch.float32)
    want = problem.reference()
    for size in SIZES:
        assert_close(on_threads(provider, layout, size, problem)[0], want, 1e-5, (provider, layout, size))


@methods
@masks
@heads
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(provider: str, layout: str, heads: str, causal: bool, dtype: torch.dtype) -> None:
    """At most twice the error that one call of the same kernel on one device makes."""
    problem = case(heads, causal, dtype)
    want = problem.reference()
    single = errors(run(ContextParallel(provider, layout=layout), problem), want)
    for size in SIZES:
        got = on_threads(provider, layout, size, problem)[0]
        assert_close(got, want, Result(*(2 * e for e in single)), (provider, layout, size))


@methods
@pytest.mark.parametrize("size", [2, 4, 8])
def test_on_processes_with_exact_traffic(provider: str, layout: str, size: int) -> None:
    """Real Gloo ranks: correct, and ledger = trace = closed formula to the byte."""
    problems = [case("gqa", True), case("mha", False, torch.bfloat16)]

    def rank() -> list[tuple[list[float], dict[tuple[str, str], int]]]:
        cp = ContextParallel(provider, group=dist.group.WORLD, layout=layout)
        found = []
        for problem in problems:
            q, k, v, dout = (cp.shard(x) for x in problem.inputs())
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            cp.mesh.ledger.reset()
            out = cp.attention(q, k, v, causal=problem.causal)
            out.backward(dout)
            sent = by_phase_and_axis(cp)
            got = Result(*(cp.unshard(x.detach()) for x in (out, q.grad, k.grad, v.grad)))
            found.append((errors(got, problem.reference()), sent))
        return found

    for index, results in enumerate(run_ranks(rank, size, init_process_group=True)):
        for problem, (found, sent) in zip(problems, results, strict=True):
            assert max(found) <= {torch.float64: 1e-10, torch.bfloat16: 2e-2}[problem.dtype]
            traced, formula = traced_and_formula(provider, layout, size, index, problem)
            assert sent == traced == formula, (provider, layout, size, index)


def by_phase_and_axis(cp: ContextParallel) -> dict[tuple[str, str], int]:
    sent: dict[tuple[str, str], int] = {}
    for line in cp.mesh.ledger.entries():
        sent[line.phase, line.axis] = sent.get((line.phase, line.axis), 0) + line.bytes
    return sent


def traced_and_formula(
    provider: str, layout: str, size: int, index: int, problem: Case
) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """What a TraceMesh on the meta device books, and what the provider's formula says."""
    options = ContextParallel(provider, layout=layout).options
    mesh = TraceMesh(providers.get(provider).axes(size, options), index)
    cp = ContextParallel(provider, mesh=mesh, layout=layout)
    q, k, v, dout = (cp.shard(x).to("meta") for x in problem.inputs())
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    cp.attention(q, k, v, causal=problem.causal).backward(dout)
    formula = cp.provider.traffic(cp.problem(q, k, v, causal=problem.causal), cp.options)
    return by_phase_and_axis(cp), dict(formula)


@methods
def test_a_wrong_layout_is_noticed(provider: str, layout: str) -> None:
    """Planted fault: shards in another layout than the attention's give another answer."""
    problem = case("mha", True)
    other = next(name for name in ("zigzag", "striped") if name != layout)

    def rank(mesh: Mesh) -> float:
        cp = ContextParallel(provider, mesh=mesh, layout=layout)
        wrong = ContextParallel(provider_for(other), layout=other).layout
        q, k, v, _ = (wrong.shard(x, 0, cp.size, cp.index) for x in problem.inputs())
        out = cp.attention(q, k, v)
        shards = cp.mesh.all_gather("cp", (out,)).wait()[0].chunk(cp.size)
        return errors(Result(*[wrong.unshard(shards, 0)] * 4), Result(*[problem.reference().out] * 4))[0]

    assert min(run_threads(rank, {"cp": 4})) > 0.1


def provider_for(layout: str) -> str:
    return next(name for name in providers.names() if layout in providers.get(name).layouts)


def test_the_published_volumes_of_a_ring() -> None:
    """Striped Attention's ring (facts: forward 2 N Dkv (P-1)/P elements, backward as much, and 2 N Dkv more)."""
    n, d, p = 4096, 4 * 16, 8
    problem = Case(seq_length=n, heads=4, kv_heads=4, causal=True, dtype=torch.float32, batch=1)
    traced, _ = traced_and_formula("ring", "contiguous", p, 0, problem)
    assert traced == {
        ("forward", "cp"): 4 * 2 * n * d * (p - 1) // p,
        ("backward", "cp"): 4 * (2 * n * d * (p - 1) // p + 2 * n * d),
    }
