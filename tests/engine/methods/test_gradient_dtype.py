"""Gradient sums in the model's dtype: what arrives, what the ledger counts, errors of results, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.comm import WHOLE, Mesh, Pending, run_threads, sums
from cp_plugin.engine.comm.payload import PayloadMesh
from cp_plugin.engine.core.dtypes import dtype_name
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.gradient_dtype import NarrowSums
from cp_plugin.planner.trace.memory import peaks

HALF = (torch.bfloat16, torch.float16)
SUMMING = [name for name in providers.names() if "gradient_dtype" in providers.get(name).options]
MODEL = {"gradient_dtype": "model"}
half = pytest.mark.parametrize("dtype", HALF, ids=str)


def test_providers_that_sum_gradients() -> None:
    assert set(providers.names()) - set(SUMMING) == {"ulysses"}
    assert [n for n in providers.names("linear") if "gradient_dtype" in providers.get(n).options] == ["linear_ring"]


def part(rank: int) -> Tensor:
    """``[tokens, batch, heads, size]`` that bfloat16 and float16 must round, and e4m3 far more."""
    return torch.randn(8, 1, 2, 4, generator=torch.Generator().manual_seed(rank))


@half
@pytest.mark.parametrize("packed", [False, True], ids=["", "with payloads in FP8"])
def test_only_sums_are_rounded_once_per_message(dtype: torch.dtype, packed: bool) -> None:
    def rank(mesh: Mesh) -> None:
        below = PayloadMesh(mesh, 4) if packed else mesh
        over, own, peer = NarrowSums(below, dtype), part(mesh.index), part(1 - mesh.index)

        def sent(call: Callable[[], Pending]) -> tuple[Tensor, int]:
            before = mesh.ledger.bytes()
            (arrived,) = call().wait()
            return arrived, mesh.ledger.bytes() - before

        arrived, nbytes = sent(lambda: over.shift("a", (own,), group=sums("a")))
        assert arrived.dtype == torch.float32
        assert torch.equal(arrived, peer.to(dtype).float()) and not torch.equal(arrived, peer)
        assert nbytes == own.numel() * 2
        arrived, nbytes = sent(lambda: over.reduce_scatter("a", (own,)))
        whole = own.to(dtype).float() + peer.to(dtype).float()
        assert arrived.dtype == torch.float32 and torch.equal(arrived, whole.chunk(2)[mesh.index])
        assert nbytes == own.numel() * 2 // 2
        for call in (
            lambda m: m.shift("a", (own,)),
            lambda m: m.shift("a", (own.to(dtype),)),
            lambda m: m.all_gather("a", (own.to(dtype),)),
            lambda m: m.all_to_all("a", (own.to(dtype),)),
            lambda m: m.exchange(WHOLE, (own.to(dtype),), to=1 - m.index, source=1 - m.index),
        ):
            (a, booked_a), (b, booked_b) = sent(lambda call=call: call(over)), sent(lambda call=call: call(below))
            assert torch.equal(a, b) and booked_a == booked_b

    run_threads(rank, {"a": 2})


@pytest.mark.parametrize("smaller", [MODEL, {"fp8": "comm"}], ids=str)
def test_choices_count_what_travels(smaller: dict[str, str]) -> None:
    """No more than the choices for float32 sums and two-byte payloads would send."""
    problem = Problem(size=64, heads=32, kv_heads=16 if smaller == MODEL else 8, head_dim=128)
    for name in ("attention2d", "burst", "usp"):
        settled = providers.settle(name, problem, Options(**smaller))
        plain = providers.settle(name, problem, Options()).options

        def most(chosen: Options, provider: Any = settled.provider) -> int:
            return max(sum(provider.traffic(problem, chosen, i).values()) for i in range(problem.size))

        assert most(settled.options) <= most(Options(**{**plain.chosen, **smaller}))
    one_key_head = Problem(size=16, heads=32, kv_heads=1, head_dim=128)
    for options, ranks in ((Options(), 2), (Options(fp8="comm"), 16)):  # exchanges of heads have no sums
        assert providers.settle("usp", one_key_head, options).options.head_parallel == ranks


def test_memory_of_what_is_gathered() -> None:
    """Nothing is widened before it travels: gradients of gathered keys are handed over in the model's dtype."""
    problem = Problem(size=8, heads=16, kv_heads=16, head_dim=8, seq_length=8 * 64)
    narrow, wide = (peaks("all_gather", problem, Options(head_groups=1, **some)) for some in (MODEL, {}))
    assert narrow.forward == wide.forward
    gathered = 8 * 64 * 16 * 8 * 2 * 2  # bytes of dk and dv of all ranks, in bfloat16
    assert wide.backward - narrow.backward >= gathered


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_that_need_no_narrowing_are_refused(dtype: torch.dtype) -> None:
    x = torch.randn(8, 1, 2, 16, dtype=dtype)
    name = dtype_name(dtype)
    said = (
        f"gradient_dtype='model': gradient sums of a {name} model are {name} anyway; use torch.bfloat16 or "
        "torch.float16, or leave it out"
    )
    with pytest.raises(ValueError, match=said):
        ContextParallel("ring", gradient_dtype="model").attention(x, x, x)
    ContextParallel("ring", gradient_dtype="float32").attention(x, x, x)


APART = tuple(f"host{n}" for n in range(128))
FEW = Problem(size=8, heads=8, kv_heads=8, seq_length=8 * 8192).with_transport(hosts=APART[:8])
"""A problem for which the table chooses the model's dtype; the following differ in one line each."""


def problem_on(size: int, **changes: Any) -> Problem:
    return replace(FEW, size=size, seq_length=size * 8192, **changes).with_transport(hosts=APART[:size])


@pytest.mark.parametrize(
    ("name", "problem", "options", "narrow", "why"),
    [
        ("ring", FEW, {}, True, "bfloat16: 8,192 tokens per rank and 1 query head per key/value head leave m"),
        ("ring", replace(FEW, seq_length=8 * 16386), {}, False, "16,386 tokens per rank and 1 q.* hide behind ker"),
        ("ring", replace(FEW, kv_heads=4, batch=2), {}, False, "with 16,384 tokens per rank and 2 query heads per k"),
        ("ring", FEW.with_transport(hosts=("a",) * 8), {}, False, "all ranks are on one host"),
        ("ring", FEW.with_transport(hosts=()), {}, False, "the hosts of the ranks, .*, are unknown"),
        ("ring", FEW.with_transport(network="gloo"), {}, False, "on CPU ranks there is no slow network"),
        ("ring", replace(FEW, dtype=torch.float16), {}, False, "sums in float16 can overflow even if their parts"),
        ("ring", problem_on(64), {}, True, "dk and dv are rounded at each hop of a ring, .* accurate enough for 64 r"),
        ("ring", problem_on(128), {}, False, "up to 64 ranks, but 128 contribute to"),
        ("burst", FEW, {"backward": "q"}, True, "dq is rounded at each hop"),
        ("burst", problem_on(16), {"backward": "q"}, False, "dq is rounded .* up to 8 ranks, but 16 contribute"),
        ("burst", problem_on(16), {"backward": "kv"}, True, "dk and dv are rounded"),
        ("all_gather", FEW, {}, True, "NCCL rounds the sums of a reduce-scatter"),
        ("all_gather", problem_on(16), {}, False, "NCCL rounds .* up to 8 ranks, but 16 contribute to a sum"),
        ("attention2d", problem_on(64), {"grid": (16, 4)}, False, "NCCL rounds .* but 16 contribute to a sum"),
        ("needed", problem_on(64), {}, True, "each part of dk and dv is rounded once"),
        ("usp", replace(problem_on(16), seq_length=16 * 1024), {}, None, "tokens per rank"),
        ("all_gather", replace(problem_on(16), seq_length=16 * 1024), {"head_parallel": 2}, True, "enough for 8 r"),
    ],
)
def test_the_table(name: str, problem: Problem, options: dict[str, Any], narrow: bool | None, why: str) -> None:
    """A row for each reason. The formula counts what the default sends."""
    settled = providers.settle(name, problem, Options(**options))
    said = settled.why[-1]
    assert re.search(why, said) and said.startswith("sums of gradients travel in ")
    if narrow is not None:
        assert settled.options.gradient_dtype == ("model" if narrow else None)
    assert ("travel in bfloat16" in said) == (settled.options.gradient_dtype == "model")
    told = providers.settle(name, problem, replace(settled.options, gradient_dtype="float32"))
    assert told.options.gradient_dtype == "float32" and not any("travel in" in line for line in told.why)
    default, wide = (s.provider.traffic(problem, s.options, 0) for s in (settled, told))
    assert (default == wide) == (settled.options.gradient_dtype is None)


def test_no_table_where_nothing_is_chosen() -> None:
    for problem in (Problem(size=1), replace(FEW, dtype=torch.float32), replace(FEW, dtype=torch.float64)):
        for name in SUMMING:
            settled = providers.settle(name, problem, Options())
            assert settled.options.gradient_dtype is None and not any("travel in" in line for line in settled.why)
    assert providers.settle("linear_ring", FEW, Options()).options.gradient_dtype is None
    assert providers.settle("ring", FEW, Options(gradient_dtype="auto")).options.gradient_dtype == "model"


def test_plain_torch_keeps_float32_unless_told() -> None:
    """A typical problem need not have the dtype, heads or tokens of the calls."""
    for told, want in (({}, "float32"), (MODEL, "model"), ({"gradient_dtype": "float32"}, "float32")):
        chosen = run_threads(
            lambda mesh, told=told: ContextParallel("ring", mesh=mesh, problem=FEW, **told).options.gradient_dtype,
            {"cp": 8},
        )
        assert chosen == [want] * 8
