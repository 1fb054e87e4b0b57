"""Linear attention: kernels and all methods against the sequential recurrence in float64; traffic."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import fake_fla
import linear_cases
import pytest
import torch
from linear_cases import DECAYS, LinearCase, run_on_shards
from nightly import each_pair, each_value, pairs_at_night
from oracle import relative_error
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.comm import Mesh, TraceMesh, run_threads
from cp_plugin.engine.linear import kernels, recurrence, rules
from cp_plugin.engine.linear.segment import recomputed
from cp_plugin.engine.linear.tokens import Tokens
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods import zeco
from cp_plugin.engine.methods.protocol import Formula
from cp_plugin.engine.placement.documents import place
from cp_plugin.testing.traffic import read_ledger

METHODS = [(name, layout) for name in providers.names("linear") for layout in providers.get(name).layouts]
SIZES = (1, 2, 4, 8)
by = ContextParallel
methods = pytest.mark.parametrize(("provider", "layout"), METHODS, ids=["-".join(m) for m in METHODS])
decays = pytest.mark.parametrize("decay", DECAYS)
documents = pytest.mark.parametrize("documents", [False, True], ids=["one", "packed"])
both_rules = pytest.mark.parametrize("delta", [False, True], ids=["added", "delta"])
masks = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])


@pytest.fixture(autouse=True)
def hops_that_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """``zeco`` passes even the small states of these cases in blocks: three on 4 ranks, six on 8."""
    monkeypatch.setattr(zeco, "_HOP_BYTES", {"nccl": 200, "gloo": 200})


def described(case: LinearCase, size: int) -> Problem:
    return replace(case, size=size, dtype=torch.float64, bounds=())


def refused(provider: str, case: LinearCase, layout: str) -> bool:
    return providers.get(provider).unsupported(described(case, 2), Options(layout=layout)) is not None


def whole(cp: ContextParallel, results: list[Tensor]) -> list[Tensor]:
    return [x if x.dim() == 1 else cp.unshard(x) for x in results]


def measured(cp: ContextParallel, case: LinearCase) -> tuple[list[Tensor], Formula, list[Any]]:
    """The whole results of one call, and what it sent."""
    results = run_on_shards(cp, case)
    sent = read_ledger(cp.mesh), cp.mesh.ledger.entries()
    return whole(cp, results), *sent


def attend(cp: ContextParallel, case: LinearCase, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return whole(cp, run_on_shards(cp, case, dtype))


def call_ranks(provider: str, size: int, case: LinearCase, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    def rank(mesh: Mesh) -> list[Tensor]:
        return attend(ContextParallel(provider, mesh=mesh, **options), case, dtype)

    return summed(run_threads(rank, {"cp": size}), case)


def summed(ranks: list[list[Tensor]], case: LinearCase) -> list[list[Tensor]]:
    """Sum the gradient of a per-head decay over ranks."""
    if case.decay != "head":
        return ranks
    total = torch.stack([results[4] for results in ranks]).sum(0)
    return [[*results[:4], total, *results[5:]] for results in ranks]


def assert_rounded_alike(got: list[Tensor], alone: list[Tensor], want: list[Tensor]) -> None:
    """At most twice the error of one rank; gradients of decays, which are not in half, within 1e-4."""
    for x, error, single in zip(got, map(relative_error, got, want), map(relative_error, alone, want), strict=True):
        assert error <= (2 * single if x.dtype == torch.bfloat16 else 1e-4)


@decays
@both_rules
@documents
@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_chunked_equals_recurrence(decay: Any, delta: bool, documents: bool, tokens: int) -> None:
    case = LinearCase(decay=decay, delta=delta, documents=documents, seq_length=tokens)
    *inputs, dout = case.inputs()
    x = case.make_tokens(*inputs)
    got, want = ((f(x), *recomputed(f, dout, x)) for f in (rules.forward, recurrence.forward))
    assert len(got) == len(want) == 4 + (decay != "none") + delta
    assert max(map(relative_error, got, want)) <= 1e-12 if tokens > 1 else all(map(torch.allclose, got, want))


@each_pair
@methods
@decays
@both_rules
@documents
@masks
def test_float64(provider: str, layout: str, decay: Any, delta: bool, documents: bool, causal: bool) -> None:
    """Equal to the recurrence; ledger = formula, to the byte."""
    case = LinearCase(decay=decay, delta=delta, documents=documents, causal=causal)
    if refused(provider, case, layout):
        with pytest.raises(RuntimeError, match=f"provider '{provider}' cannot do this"):
            call_ranks(provider, 2, case, layout=layout)
        return

    def rank(mesh: Mesh) -> tuple[list[Tensor], Formula, list[Any]]:
        return measured(ContextParallel(provider, mesh=mesh, layout=layout), case)

    want, formula = case.want(), providers.get(provider).traffic
    for size in SIZES:
        ranks, ledgers, entries = zip(*run_threads(rank, {"cp": size}), strict=True)
        for index, got in enumerate(summed(list(ranks), case)):
            assert max(map(relative_error, got, want)) <= 1e-9, (size, index)
            assert ledgers[index] == formula(described(case, size), Options(layout=layout), index), (size, index)
            if provider == "lasp2" and size > 1:
                assert [(x.op, x.calls) for x in entries[index]] == [("all_gather", 1)] * 2, "one in each pass"


@methods
def test_bytes_of_every_call(provider: str, layout: str) -> None:
    """Formula = trace of what runs, in every combination, also those that ``test_float64`` leaves to the night."""
    for decay, by_delta, packed, causal in product(DECAYS, (False, True), (False, True), (False, True)):
        case = LinearCase(decay=decay, delta=by_delta, documents=packed, causal=causal)
        if not refused(provider, case, layout):
            trace = TraceMesh({"cp": 4}, 1)
            run_on_shards(ContextParallel(provider, mesh=trace, layout=layout), case)
            expected = providers.get(provider).traffic(described(case, 4), Options(layout=layout), 1)
            assert read_ledger(trace) == expected, case


@pairs_at_night
@decays
@pytest.mark.parametrize(("provider", "layout"), [("lasp2", "zigzag"), ("zeco", "contiguous"), ("lasp1", "zigzag")])
def test_the_delta_rule_by_kernels_from_an_initial_state(provider: str, layout: str, decay: Any) -> None:
    """As fla's, which run only on GPUs: by ``delta.Widened``, here around the recurrence."""
    case = LinearCase(decay=decay, delta=True)
    for size in (1, 2, 4):
        for got in call_ranks(provider, size, case, layout=layout, backend="reference"):
            assert max(map(relative_error, got, case.want())) <= 1e-9, size
    want = case.want(torch.bfloat16)
    alone = attend(ContextParallel(provider, backend="reference"), case, torch.bfloat16)
    for size in (2, 4):
        got = call_ranks(provider, size, case, torch.bfloat16, layout=layout, backend="reference")[0]
        assert_rounded_alike(got, alone, want)


@pairs_at_night
@pytest.mark.parametrize("decay", ["none", "token", "key"])
@pytest.mark.parametrize("beta", [1.0, 0.02])
def test_the_roundings_of_fla_are_those_of_one_rank(monkeypatch: pytest.MonkeyPatch, decay: Any, beta: float) -> None:
    """At most twice the error of one rank, or one rounding of bfloat16, since the fake's backward does not round.

    beta: a state is replaced soon, or lives through all ranks.
    """
    fake_fla.install(monkeypatch, fake_fla.rounded)
    monkeypatch.setattr(linear_cases, "no_sums_in_half", lambda *_, **__: nullcontext())  # its kernel's are
    monkeypatch.setitem(kernels.KERNELS, "chunked", kernels.KERNELS["fla"])
    case = LinearCase(delta=True, decay=decay, seq_length=1024, batch=1, head_dim=16, v_head_dim=16, beta=beta)
    want = case.want(torch.bfloat16)
    alone = list(map(relative_error, attend(ContextParallel("lasp2"), case, torch.bfloat16), want))
    for size in (2, 8):
        got = list(map(relative_error, call_ranks("lasp2", size, case, torch.bfloat16)[0], want))
        assert all(error <= max(2 * one, 2**-8) for error, one in zip(got, alone, strict=True)), (size, got, alone)


def test_one_rank_needs_no_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.Kernel, "segment", None)
    for case in (LinearCase(delta=True, decay="token"), LinearCase(decay="key", documents=True, causal=False)):
        assert max(map(relative_error, attend(ContextParallel("lasp2"), case), case.want())) <= 1e-9


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_of_either_dtype(dtype: torch.dtype) -> None:
    """Of the two segments of the second rank, a state passes the first and not the second, in which one begins."""
    bounds = torch.tensor((0, 30, 48), dtype=dtype)
    x = torch.randn(48, 1, 2, 8, dtype=torch.float64)
    alone = ContextParallel("lasp2").linear_attention(x, x, x, cu_seqlens=bounds)

    def rank(mesh: Mesh) -> Tensor:
        cp = ContextParallel("lasp2", mesh=mesh, layout="zigzag")
        y = cp.shard(x)
        return cp.unshard(cp.linear_attention(y, y, y, cu_seqlens=bounds))

    for got in run_threads(rank, {"cp": 2}):
        torch.testing.assert_close(got, alone)


@pytest.mark.parametrize("provider", providers.names("linear"))
def test_tokens_placed_by_document_are_refused(provider: str) -> None:
    """By the object, whatever the layout that it was made with."""
    x = torch.randn(48, 1, 2, 8)

    def rank(mesh: Mesh) -> None:
        cp = ContextParallel(provider, mesh=mesh).with_layout(place([5, 43], 2).layout)
        for call in (cp.linear_attention, cp.extend_linear):
            with pytest.raises(ValueError, match=r"does not run on the documents layout.*contiguous' or 'zigzag'"):
                call(*[cp.shard(x)] * 3)

    run_threads(rank, {"cp": 2})


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_without_mask_and_decay_states_are_summed(layout: str) -> None:
    """A path of its own: one sum over all segments, two of them on a zigzag rank."""
    case = LinearCase(causal=False)
    for got in call_ranks("lasp2", 4, case, layout=layout):
        assert max(map(relative_error, got, case.want())) <= 1e-9


@each_value
@methods
@decays
@both_rules
def test_float32_and_half(provider: str, layout: str, decay: Any, delta: bool) -> None:
    """Float32 within 1e-4; bfloat16 at most twice the error of one rank."""
    for causal in (True, False):
        case = LinearCase(decay=decay, delta=delta, causal=causal)
        if refused(provider, case, layout):
            continue
        alone = attend(ContextParallel("lasp2"), case, torch.bfloat16)
        for size in (2, 4, 8):
            got = call_ranks(provider, size, case, torch.float32, layout=layout)[0]
            assert max(map(relative_error, got, case.want(torch.float32))) <= 1e-4, size
            half = call_ranks(provider, size, case, torch.bfloat16, layout=layout)[0]
            assert_rounded_alike(half, alone, case.want(torch.bfloat16))


@pairs_at_night
@pytest.mark.parametrize("log_decay", [-1e-7, -1.0, -60.0, float("-inf")])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_long_sequences_of_any_decay_stay_finite(log_decay: float, dimensions: int) -> None:
    """64k tokens: sums of log decays reach -4 million and never appear in a quotient."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2**16, 1, 1, 2) for _ in range(3))
    decay = torch.full((2**16, 1, 1, 2)[: 2 + dimensions], log_decay).requires_grad_()
    cp = ContextParallel("lasp2")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cp.linear_attention(*leaves, decay)
    results = [out, *torch.autograd.grad(out, [*leaves, decay], torch.ones_like(out))]
    assert all(x.isfinite().all() for x in results)
    if log_decay <= -60:
        assert relative_error(out, (q * k).sum(3, keepdim=True) * v) <= 1e-5, "each token sees itself alone"
    elif log_decay == -1e-7:
        x = Tokens(*(y[-256:].detach() for y in leaves), decay[-256:].detach().reshape(256, 1, 1, -1))
        _, before = cp.extend_linear(*(y[:-256].detach() for y in (q, k, v, decay)))
        assert relative_error(out[-256:].detach(), recurrence.run(x, before)[0]) <= 1e-4


@pytest.mark.parametrize("size", [2, 3, 8, 64, 512])
@pytest.mark.parametrize("heads", [1, 8, 64])
def test_zeco_passes_as_many_blocks_as_make_the_last_rank_wait_least(
    size: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few where the host's time for a hop counts, many where the links' does."""
    problem = Problem(size=size, heads=heads, kv_heads=heads, head_dim=128)
    state = heads * 128 * 128 * 4
    for hop in (2**10, 2**21, 2**24):
        monkeypatch.setattr(zeco, "_HOP_BYTES", {"nccl": hop})
        waits = {n: (size - 2 + n) * (hop + state / n) for n in range(1, 2**13)}
        assert waits[zeco.blocks_of(problem)] <= 1.01 * min(waits.values()), hop


@pytest.mark.parametrize("back", [False, True])
def test_all_gather_overlaps_computation(back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The all-gather is posted before the kernel runs and waited for afterwards."""
    events: list[str] = []

    class Watched(TraceMesh):
        def _all_gather(self, axis: str, tensors: Any) -> Any:
            events.append("post")
            pending = super()._all_gather(axis, tensors)
            finish = pending._finish
            pending._finish = lambda: (events.append("wait"), finish())[1]
            return pending

    def forward(x: Tokens) -> Tensor:
        events.append("compute")
        return rules.forward(x)

    monkeypatch.setitem(kernels.KERNELS, "chunked", kernels.Kernel("watched", forward, partial(recomputed, forward)))
    x = torch.randn(64, 1, 2, 4).requires_grad_()
    out = ContextParallel("lasp2", mesh=Watched({"cp": 4}, 1)).linear_attention(x, x, x)
    if back:
        events.clear()
        out.sum().backward()
    assert events == ["post", "compute", "wait"]


def linear(provider: str) -> Any:
    return by(provider).linear_attention


REFUSED = {
    "'lasp2' is for linear attention: for softmax.* ring": lambda q: by("lasp2").attention(q, q, q),
    "'ring' is for softmax attention: .* lasp2": lambda q: linear("ring")(q, q, q),
    "does not run on the striped layout.*contiguous' or 'zigzag'": lambda q: by("lasp2", layout="striped"),
    "does not run on the documents layout.*contiguous' or 'zigzag'": lambda q: by("lasp2", layout="documents"),
    "^head_parallel=2 has no effect with lasp2": lambda q: by("lasp2", head_parallel=2),
    "backend='sdpa': choose one of auto, fla, ch": lambda q: by("lasp2", backend="sdpa"),
    r"log_decay has shape \(2, 4\)": lambda q: linear("lasp2")(q, q, q, q[0, 0]),
    "log_decay must be at most 0, got 0.": lambda q: linear("lasp2")(q, q, q, q.sigmoid()),
    "log_decay must be at most 0": lambda q: by("lasp2").extend_linear(q, q, q, q.abs()),
    "no softmax for a si": lambda q: by("lasp2").refuse(Problem(size=1, heads=2, kv_heads=2, sink=True)),
    "linear attention has no sliding wind": lambda q: by("zeco").refuse(Problem(size=1, window=(4, 0))),
    "has no effect with lasp2: linear attention sends its states in": lambda q: by("lasp2", fp8="comm"),
    "with a causal mask: use lasp2": lambda q: linear("lasp1")(q, q, q, causal=False),
    "neither decays nor packed documents: use lasp2": lambda q: linear("linear_ring")(q, q, q, -q[0, 0, :, 0].abs()),
    "the delta rule is only defined with a causal mask": lambda q: linear("lasp2")(
        q, q, q, beta=q[..., 0], causal=False
    ),
    r"beta has shape \(16, 1, 1\); for k \(16, 1, 2, 4\) it must be \(16, 1, 2\)": lambda q: linear("lasp2")(
        q, q, q, beta=q[:, :, :1, 0]
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message](torch.randn(16, 1, 2, 4))
