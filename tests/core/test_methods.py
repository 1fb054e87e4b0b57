"""Every registered provider, on every layout it supports, against the float64 oracle; and its traffic.

The tests iterate the registry: a new method is covered by adding its file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nightly import each_pair, each_value, nightly, slow
from oracle import Case, Result, assert_close, errors, relative_error
from thread_ranks import on_threads, run, typical

from cp_plugin import ContextParallel, Options
from cp_plugin.comm import Mesh, TraceMesh, run_threads
from cp_plugin.core.layout import get_layout
from cp_plugin.methods import registry as providers
from cp_plugin.testing.launch import run_ranks

METHODS = [(name, layout) for name in providers.names() for layout in providers.get(name).layouts]
HEADS = {"mha": (8, 8), "gqa": (8, 2), "mqa": (8, 1)}
SIZES = (1, 2, 4, 8)

methods = pytest.mark.parametrize(("provider", "layout"), METHODS, ids=["-".join(m) for m in METHODS])
heads = pytest.mark.parametrize("heads", HEADS)
masks = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


def case(heads: str, causal: bool, dtype: torch.dtype = torch.float64) -> Case:
    h, g = HEADS[heads]
    return Case(seq_length=128, heads=h, kv_heads=g, causal=causal, dtype=dtype)


@each_pair
@methods
@masks
@heads
def test_float64(provider: str, layout: str, heads: str, causal: bool) -> None:
    problem = case(heads, causal)
    want = problem.reference()
    for size in SIZES:
        for rank, got in enumerate(on_threads(provider, size, problem, layout=layout)):
            assert_close(got, want, 1e-10, (provider, layout, size, rank))


@each_value
@methods
@masks
def test_the_reference_kernel(provider: str, layout: str, causal: bool) -> None:
    problem = case("gqa", causal)
    for got in on_threads(provider, 4, problem, layout=layout, backend="reference"):
        assert_close(got, problem.reference(), 1e-10, (provider, layout))


@each_value
@methods
@masks
@heads
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precision(provider: str, layout: str, heads: str, causal: bool, dtype: torch.dtype) -> None:
    """float32: 1e-5; half precision: at most twice the error that one call of the same kernel on one device makes."""
    problem = case(heads, causal, dtype)
    want = problem.reference()
    single = errors(run(ContextParallel("ring"), problem), want)
    limits = Result(*(1e-5 if dtype == torch.float32 else 2 * e for e in single))
    for size in SIZES:
        got = on_threads(provider, size, problem, layout=layout)[0]
        assert_close(got, want, limits, (provider, layout, size))


SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "a row": ("attention2d", 4, {"grid": (1, 4)}),
    "a column": ("attention2d", 4, {"grid": (4, 1)}),
    "2x4": ("attention2d", 8, {"grid": (2, 4)}),
    "4x2 in head groups": ("attention2d", 8, {"grid": (4, 2), "head_groups": 2}),
    "4x2 whole": ("attention2d", 8, {"grid": (4, 2), "head_groups": 1}),
    "6x1": ("attention2d", 6, {"grid": (6, 1)}),
    "1x6": ("attention2d", 6, {"grid": (1, 6)}),
    "2x3": ("attention2d", 6, {"grid": (2, 3)}),
    "3x2": ("attention2d", 6, {"grid": (3, 2)}),
    "4x2 striped": ("attention2d", 8, {"grid": (4, 2), "layout": "striped"}),
    "4x4 striped": ("attention2d", 16, {"grid": (4, 4), "layout": "striped"}),
    "4x4": ("attention2d", 16, {"grid": (4, 4)}),
    "8x2": ("attention2d", 16, {"grid": (8, 2)}),
    "head axis of 2, then 2x2": ("attention2d", 8, {"head_parallel": 2, "grid": (2, 2)}),
    "head axis of 4, then 2x2": ("attention2d", 16, {"head_parallel": 4, "grid": (2, 2)}),
    "head axis of 2, then a grid on striped": (
        "attention2d",
        8,
        {"head_parallel": 2, "layout": "striped", "grid": (2, 2)},
    ),
    "head axis of all": ("attention2d", 4, {"head_parallel": 4}),
    "hosts of 2": ("burst", 8, {"intra_size": 2}),
    "hosts of 4": ("burst", 8, {"intra_size": 4, "layout": "striped"}),
    "hosts of 3": ("burst", 6, {"intra_size": 3, "layout": "contiguous"}),
    "hosts of 2, queries travel": ("burst", 8, {"intra_size": 2, "backward": "q"}),
    "hosts of 2, keys travel": ("burst", 8, {"intra_size": 2, "backward": "kv"}),
    "queries travel": ("burst", 6, {"backward": "q"}),
    "double ring": ("double_ring", 16, {"intra_size": 4}),
    "double ring behind a head axis": ("double_ring", 8, {"intra_size": 2, "head_parallel": 2}),
    "burst behind a head axis": ("burst", 16, {"intra_size": 4, "head_parallel": 2, "backward": "q"}),
    "ring behind a head axis": ("ring", 6, {"head_parallel": 2}),
    "stripes behind a head axis": ("striped", 8, {"head_parallel": 4}),
    "gather behind a head axis": ("all_gather", 8, {"head_parallel": 2, "head_groups": 1}),
    "gather in head groups": ("all_gather", 4, {"head_groups": 2}),
    "usp with few on the head axis": ("usp", 8, {"head_parallel": 2}),
    "usp on stripes": ("usp", 16, {"head_parallel": 4, "layout": "striped"}),
    "ulysses on 6": ("ulysses", 6, {}),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, causal: bool) -> None:
    """What only a setting reaches: rectangular grids, nested rings, a head axis in front, worlds of 6 and 16."""
    provider, size, options = SETTINGS[name]
    for h, g in ((12, 12), (12, 4)) if size == 6 else ((8, 8), (8, 2)):
        problem = Case(seq_length=192, heads=h, kv_heads=g, causal=causal)
        want = problem.reference()
        for rank, got in enumerate(on_threads(provider, size, problem, **options)):
            assert_close(got, want, 1e-10, (name, h, g, rank))


@pytest.mark.parametrize("layout", ["striped", "contiguous"])
@pytest.mark.parametrize("grid", [(2, 3), (3, 2)])
def test_any_grid_without_a_mask(grid: tuple[int, int], layout: str) -> None:
    problem = replace(case("gqa", False), seq_length=96)
    for got in on_threads("attention2d", 6, problem, grid=grid, layout=layout):
        assert_close(got, problem.reference(), 1e-10, grid)


@each_pair
@methods
@masks
@pytest.mark.parametrize("size", [6, 16])
def test_other_worlds(provider: str, layout: str, size: int, causal: bool) -> None:
    heads, kv_heads = (12, 6) if size == 6 else (16, 16)
    problem = Case(seq_length=192, heads=heads, kv_heads=kv_heads, causal=causal, head_dim=8, v_head_dim=8, batch=1)
    got = on_threads(provider, size, problem, layout=layout)[size - 1]
    assert_close(got, problem.reference(), 1e-10, (provider, layout, size, causal))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"grid": (8, 8)}, marks=slow),
        pytest.param({"grid": (16, 4)}, marks=nightly),
        pytest.param({"head_parallel": 4, "grid": (4, 4)}, marks=nightly),
    ],
    ids=str,
)
def test_64_ranks(options: dict[str, Any]) -> None:
    """Real processes and process groups, causal, forward and backward; bytes = trace = formula on every rank."""
    problem = Case(seq_length=512, heads=4, kv_heads=4, causal=True, dtype=torch.float32, batch=1)
    found = on_processes("attention2d", 64, [problem], **options)
    for index, [(error, sent)] in enumerate(found):
        assert error <= 1e-5
        traced, formula = traced_and_formula("attention2d", 64, index, problem, **options)
        assert sent == traced == formula, (options, index)


TRACED = {
    **{f"{name} on {layout}": (name, 4, {"layout": layout}) for name, layout in METHODS},
    **{name: SETTINGS[name] for name in SETTINGS if not name.endswith(("1x6", "6x1"))},
}
PROCESSES = {
    **{name: (name, 4, {}) for name in providers.names()},
    **{
        name: SETTINGS[name]
        for name in (
            "2x3", "4x2 in head groups", "head axis of 2, then 2x2", "head axis of 2, then a grid on striped",
            "hosts of 2", "hosts of 2, queries travel", "double ring behind a head axis", "ring behind a head axis",
            "gather behind a head axis", "usp with few on the head axis",
        )
    },
}  # fmt: skip


def problems_on(size: int) -> list[Case]:
    heads = {"heads": 12, "kv_heads": 6} if size == 6 else {"heads": 16, "kv_heads": 16 if size == 16 else 4}
    return [
        Case(seq_length=96, causal=True, **heads),
        Case(seq_length=192, causal=False, dtype=torch.bfloat16, v_head_dim=8, **heads),
    ]


@pytest.mark.parametrize("name", TRACED)
def test_the_trace_is_the_formula(name: str) -> None:
    provider, size, options = TRACED[name]
    for problem in problems_on(size):
        for index in (0, size // 2, size - 1):
            traced, formula = traced_and_formula(provider, size, index, problem, **options)
            assert traced == formula, (name, index)


@pytest.mark.parametrize("name", PROCESSES)
def test_on_processes_with_exact_traffic(name: str) -> None:
    """Real Gloo ranks: correct, and ledger = trace = closed formula to the byte."""
    provider, size, options = PROCESSES[name]
    problems = problems_on(size)
    for index, results in enumerate(on_processes(provider, size, problems, **options)):
        for problem, (error, sent) in zip(problems, results, strict=True):
            assert error <= {torch.float64: 1e-10, torch.bfloat16: 2e-2}[problem.dtype]
            traced, formula = traced_and_formula(provider, size, index, problem, **options)
            assert sent == traced == formula, (name, index)


def on_processes(
    provider: str, size: int, problems: list[Case], **options: Any
) -> list[list[tuple[float, dict[tuple[str, str], int]]]]:
    """For every rank and problem, the worst error on its own shard and what was sent."""
    references = [problem.reference() for problem in problems]

    def rank() -> list[tuple[float, dict[tuple[str, str], int]]]:
        found = []
        for problem, want in zip(problems, references, strict=True):
            cp = ContextParallel(provider, group=dist.group.WORLD, problem=typical(problem, size), **options)
            q, k, v, dout = (cp.shard(x) for x in problem.inputs())
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            out = cp.attention(q, k, v, causal=problem.causal)
            out.backward(dout)
            sent = by_phase_and_axis(cp)
            got = Result(out.detach(), q.grad, k.grad, v.grad)
            found.append((max(errors(got, Result(*map(cp.shard, want[:4])))), sent))
        return found

    return run_ranks(rank, size, init_process_group=True, timeout=300)


def by_phase_and_axis(cp: ContextParallel) -> dict[tuple[str, str], int]:
    sent: dict[tuple[str, str], int] = {}
    for line in cp.mesh.ledger.entries():
        sent[line.phase, line.axis] = sent.get((line.phase, line.axis), 0) + line.bytes
    return sent


def traced_and_formula(
    provider: str, size: int, index: int, problem: Case, **options: Any
) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """What a TraceMesh on the meta device books, and what the provider's formula says."""
    settled = providers.settle(provider, typical(problem, size), Options(**options))
    cp = ContextParallel(settled, mesh=TraceMesh(settled.axes, index))
    q, k, v, dout = (cp.shard(x).to("meta") for x in problem.inputs())
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    cp.attention(q, k, v, causal=problem.causal).backward(dout)
    formula = cp.provider.traffic(cp.problem(q, k, v, causal=problem.causal), cp.options, index)
    return by_phase_and_axis(cp), dict(formula)


@methods
def test_a_wrong_layout_is_noticed(provider: str, layout: str) -> None:
    """Planted fault: shards in another layout than the attention's give another answer."""
    problem = case("mha", True)
    wrong = get_layout(next(name for name in ("zigzag", "striped") if name != layout))
    settled = providers.settle(provider, typical(problem, 4), Options(layout=layout))

    def rank(mesh: Mesh) -> float:
        cp = ContextParallel(provider, mesh=mesh, problem=typical(problem, 4), layout=layout)
        q, k, v, _ = (wrong.shard(x, 0, cp.size, cp.index) for x in problem.inputs())
        out = cp.attention(q, k, v)
        want = wrong.shard(problem.reference().out, 0, cp.size, cp.index)
        return relative_error(out, want)

    assert max(run_threads(rank, settled.axes)) > 0.1


def test_the_published_volumes_of_a_ring() -> None:
    """Striped Attention's ring (facts: forward 2 N Dkv (P-1)/P elements, backward as much, and 2 N Dkv more)."""
    n, d, p = 4096, 4 * 16, 8
    problem = Case(seq_length=n, heads=4, kv_heads=4, causal=True, dtype=torch.float32, batch=1)
    traced, _ = traced_and_formula("ring", p, 0, problem, layout="contiguous")
    assert traced == {
        ("forward", "cp"): 4 * 2 * n * d * (p - 1) // p,
        ("backward", "cp"): 4 * 2 * (2 * n * d * (p - 1) // p),
    }
