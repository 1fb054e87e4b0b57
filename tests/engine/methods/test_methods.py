"""Every registered provider, on every supported layout and under every mask, against the float64 oracle.

The tests iterate the registry: a new method is covered by adding its file.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from linear_cases import LinearCase
from linear_cases import run_on_shards as run_linear_on_shards
from method_cases import METHODS, SETTINGS, predict
from nightly import nightly, pairs_at_night
from oracle import Case, Result, assert_close, errors, no_sums_in_half
from thread_ranks import run, run_on_shards, run_on_threads, typical
from torch import Tensor

from cp_plugin import ContextParallel, Options
from cp_plugin.engine.attention.calls import Setup, settled
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.protocol import Formula
from cp_plugin.testing.launch import run_ranks
from cp_plugin.testing.traffic import read_ledger, trace

DOCUMENTS = (0, 3, 50, 51, 64, 113, 192)
TREE = (20, 13, 30, 1, 6, 0, 50, 25, 40, 7), (-1, 0, 1, 1, 0, 4, 5, -1, 7, 7)
"""Lengths and parents of nodes."""
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (10, 0)},
    "one before": {"window": (1, 0)},
    "window on both sides": {"window": (7, 3), "causal": False},
    "window ahead": {"window": (-1, 5), "causal": False},
    "documents": {"documents": DOCUMENTS},
    "whole documents": {"documents": DOCUMENTS, "causal": False},
    "documents in a window": {"documents": DOCUMENTS, "window": (9, 4)},  # causal: the second has no meaning
    "tree": {"tree": TREE},
    "sink": {"sink": True},
    "all of it": {"documents": DOCUMENTS, "window": (20, 4), "causal": False, "sink": True},
}
FEW_MASKS = ("causal", "full", "window", "documents", "sink", "all of it")
HEADS = {"grouped": (4, 16, 16), "equal": (1, 24, 16), "one key head": (None, 16, 24)}
"""Query heads per key/value head, and the sizes of keys and values."""

methods = pytest.mark.parametrize(("provider", "layout"), METHODS, ids=["-".join(m) for m in METHODS])


def case(mask: str, heads: str = "grouped", query_heads: int = 8, dtype: torch.dtype = torch.float64) -> Case:
    share, d, e = HEADS[heads]
    kv_heads = query_heads // (share or query_heads)
    sizes = {"heads": query_heads, "kv_heads": kv_heads, "head_dim": d, "v_head_dim": e}
    return Case(**{"seq_length": 192, "causal": True, "dtype": dtype} | sizes | MASKS[mask])


def summed(ranks: list[Result]) -> list[Result]:
    """With the sinks' gradients, of which every rank has a part, summed."""
    if ranks[0].dsink is None:
        return ranks
    total = torch.stack([result.dsink for result in ranks]).sum(0)
    return [result._replace(dsink=total) for result in ranks]


@pairs_at_night
@methods
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", [4, 1, 2, 6, 8, 16])
def test_float64(provider: str, layout: str, mask: str, heads: str, size: int) -> None:
    problem = case(mask, heads, {6: 12, 16: 16}.get(size, 8))
    want = problem.reference()
    for rank, got in enumerate(summed(run_on_threads(provider, size, problem, layout=layout))):
        assert_close(got, want, 1e-10, (provider, layout, size, rank))


@pairs_at_night
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("mask", ["causal", "all of it"])
@pytest.mark.parametrize("heads", ["grouped", "equal"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_settings(name: str, mask: str, heads: str, backend: str) -> None:
    provider, size, options = SETTINGS[name]
    problem = case(mask, heads, 12 if size == 6 else 8)
    want = problem.reference()
    for rank, got in enumerate(summed(run_on_threads(provider, size, problem, backend=backend, **options))):
        assert_close(got, want, 1e-10, (name, rank))


@pairs_at_night
@methods
@pytest.mark.parametrize("mask", FEW_MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 8])
def test_lower_precision(provider: str, layout: str, mask: str, dtype: torch.dtype, size: int) -> None:
    """float32: 1e-5; half precision: at most twice the error of one call of the same kernel on one device, and no sum
    of the method's is rounded."""
    problem = case(mask, dtype=dtype)
    limits = Result(*(1e-5 if dtype == torch.float32 else 2 * e for e in _single(mask, dtype)))
    within = partial(no_sums_in_half, dtype)
    got = summed(run_on_threads(provider, size, problem, layout=layout, within=within))[0]
    assert_close(got, problem.reference(), limits, (provider, layout, size))


@cache
def _single(mask: str, dtype: torch.dtype) -> list[float]:
    """One device's error of each field; for a sink's gradient the largest over several inputs, since its few numbers
    may be exact by chance."""
    one, measured = case(mask, dtype=dtype), []
    for seed in range(8 if one.sink else 1):
        problem = replace(one, seed=seed)
        measured.append(errors(run(ContextParallel("ring"), problem), problem.reference()))
    return [*measured[0][:4], *map(max, zip(*(of[4:] for of in measured), strict=True))]


def test_a_grid_with_blocks_that_no_query_sees() -> None:
    """Documents end where shards do: a rank's gathered queries see none of its gathered keys."""
    problem = Case(seq_length=128, heads=8, kv_heads=2, causal=True, documents=(0, 32, 64, 96, 128))
    for got in run_on_threads("attention2d", 4, problem, layout="contiguous", grid=(2, 2)):
        assert_close(got, problem.reference(), 1e-10, "2x2")


BY_DAY = ("head axis of 2, a grid on striped", "hosts of 2, queries travel", "usp with few on the head axis")
AT_NIGHT = ("2x3", "4x2 in head groups", "head axis of 2, then 2x2", "hosts of 2", "double ring behind a head axis")
AT_NIGHT += ("ring behind a head axis", "gather behind a head axis")


@pytest.mark.parametrize("name", [*BY_DAY, *(pytest.param(name, marks=nightly) for name in AT_NIGHT)])
def test_on_processes_with_exact_traffic(name: str) -> None:
    """Real Gloo ranks: correct, and ledger = trace = closed formula to the byte.

    Providers without settings: ``test_verify``, and ``test_bytes`` for their bytes.
    """
    provider, size, options = SETTINGS[name]
    heads = 12 if size == 6 else 8
    problems = [case("causal", query_heads=heads), case("full", query_heads=heads, dtype=torch.bfloat16)]
    in_float64, in_half = run_processes(provider, size, problems, **options)
    assert in_float64 <= 1e-10 and in_half <= 2e-2


@nightly
@pytest.mark.parametrize(
    "options", [{"grid": (8, 8)}, {"grid": (16, 4)}, {"head_parallel": 4, "grid": (4, 4)}], ids=str
)
def test_64_ranks(options: dict[str, Any]) -> None:
    """Real processes and process groups, causal, forward and backward; bytes = trace = formula on every rank."""
    problem = Case(seq_length=512, heads=4, kv_heads=4, causal=True, dtype=torch.float32, batch=1)
    assert run_processes("attention2d", 64, [problem], **options)[0] <= 1e-5


def run_processes(provider: str, size: int, problems: list[Case], **options: Any) -> list[float]:
    """The worst error of any rank's shard for each problem; asserts the bytes of each rank."""

    def described(problem: Case) -> Setup:
        sizes = {"seq_length": problem.seq_length, "batch": problem.batch}
        return settled(providers.get(provider), replace(typical(problem, size), **sizes), Options(**options))

    planned = [(problem, described(problem), problem.reference()) for problem in problems]

    def attended(problem: Case, setup: Setup, want: Result) -> tuple[float, Formula]:
        cp = ContextParallel(setup, group=dist.group.WORLD)
        got = run_on_shards(cp, problem)
        return max(errors(got, Result(*map(cp.shard, want[:4])))), read_ledger(cp.mesh)

    ranks = run_ranks(lambda: [attended(*one) for one in planned], size, init_process_group=True, timeout=300)
    for index, results in enumerate(ranks):
        for (_, setup, _), (_, sent) in zip(planned, results, strict=True):
            assert sent == predict(setup)[index] == trace(setup, index), (provider, options, index)
    return [max(error for error, _ in of_problem) for of_problem in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    ("provider", "dtype"),
    [
        *((name, torch.float32) for kind in ("softmax", "linear") for name in providers.names(kind)),
        *(pytest.param(name, torch.bfloat16, marks=nightly) for name in providers.names()),
    ],
)
def test_two_runs_give_the_same_bits(provider: str, dtype: torch.dtype) -> None:
    """In every method on each of its layouts, whatever the order in which ranks run."""
    chosen = providers.get(provider)
    case = Case(seq_length=128, heads=8, kv_heads=4, causal=True, dtype=dtype)

    def linear(mesh: Mesh) -> list[Tensor]:
        return run_linear_on_shards(ContextParallel(provider, mesh=mesh, layout=layout), LinearCase(), torch.float32)

    def run() -> list[list[Tensor]]:
        if chosen.kind == "linear":
            return run_threads(linear, chosen.axes(4, Options()))
        return [list(result[:4]) for result in run_on_threads(provider, 4, case, layout=layout)]

    for layout in chosen.layouts:
        for one, other in zip(run(), run(), strict=True):
            assert all(map(torch.equal, one, other)), layout
