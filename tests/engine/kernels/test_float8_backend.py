"""The FP8 reference: errors match its roundings; delayed scaling; kernel choice for FP8."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from library_tiles import run
from oracle import Case, Result, errors
from thread_ranks import run_on_threads

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.attention.recompute import Recomputed
from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.core.scaling import IN_BACKWARD, ROLES, Delayed, Scaling
from cp_plugin.engine.kernels import backends, blocks
from cp_plugin.engine.kernels.backends.float8 import E4M3, E5M2, Float8, rounded, scale_for
from cp_plugin.testing.launch import run_ranks
from cp_plugin.testing.verify import plan, verify

E4, E5 = 0.0265, 0.053
"""Root mean square of the relative rounding errors of e4m3 and e5m2."""
SCORES = 2**0.5 * E4
"""Of exp(score): scores have variance 1 here, and both factors of every term are rounded."""
IMPLIED = Result(
    out=(3 * E4**2 + SCORES**2) ** 0.5,  # P, v, out, and the scores
    dq=(3 * E5**2 + 2 * E4**2 + SCORES**2) ** 0.5,  # dout, dS, dq; v, k
    dk=(3 * E5**2 + 2 * E4**2 + SCORES**2) ** 0.5,  # dout, dS, dk; v, q
    dv=(2 * E5**2 + E4**2 + SCORES**2) ** 0.5,  # dout, dv; P
)
"""Independent rounding errors add in squares: 0.059, 0.106, 0.106 and 0.088."""
CASES = [
    Case(seq_length=s, heads=4, kv_heads=g, causal=causal, dtype=dtype, head_dim=d, v_head_dim=e, batch=1)
    for s, g, d, e in ((64, 4, 64, 64), (128, 2, 32, 48))
    for causal in (True, False)
    for dtype in (torch.float32, torch.bfloat16)
]


def outside(measured: tuple[float, ...], factor: float = 1.25) -> list[str]:
    """Tensors whose error exceeds what their roundings imply."""
    limits = zip(Result._fields, measured, IMPLIED, strict=False)
    return [name for name, error, implied in limits if not error <= factor * implied]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.seq_length}-{c.kv_heads}-{c.causal}-{c.dtype}")
def test_errors_match_the_roundings(case: Case) -> None:
    measured = errors(run(Float8(), case), case.reference())
    assert not outside(measured) and outside(measured, 0.7) == [*Result._fields[: len(measured)]], measured


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_are_the_largest_powers_of_two_in_range(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for amax in (1e-20, 1e-3, 0.999, 1.0, 1.76, largest, largest * 1.001, 3e9):
        scale = scale_for(torch.tensor(amax), dtype).item()
        assert largest / 2 < amax * scale <= largest and torch.frexp(torch.tensor(scale))[0] == 0.5
    assert scale_for(torch.zeros(()), dtype) == 1
    assert scale_for(torch.tensor(torch.inf), dtype).isnan() and scale_for(torch.tensor(torch.nan), dtype).isnan()
    x = torch.randn(1000)
    once = rounded(x, dtype)
    assert torch.equal(rounded(once, dtype), once)
    numbers = torch.finfo(dtype)
    smallest = numbers.smallest_normal * numbers.eps / scale_for(x.abs().amax(), dtype)  # the step between the least
    assert ((once - x).abs() <= torch.maximum(x.abs() * numbers.eps / 2, smallest / 2)).all()


@pytest.mark.parametrize(("bad", "scaled"), [(torch.nan, Scaling()), (torch.inf, Delayed())], ids=["nan", "inf"])
def test_nonfinite_values_propagate(bad: float, scaled: Scaling) -> None:
    case = CASES[0]
    if isinstance(scaled, Delayed):
        run(Float8(scaling=scaled), case)
        scaled.update()
    q, k, v, _ = case.inputs()
    v[3, 0, 0, 0] = bad
    assert Float8(scaling=scaled).forward(q, k, v, 0, Scores(0.25))[0].isnan().any()


def test_sends_and_computes_in_fp8_on_ranks() -> None:
    """Within twice the error of one device, like all half-precision kernels."""
    problem = Problem(size=4, heads=4, kv_heads=2, head_dim=32, seq_length=128, batch=1)
    options = Options(fp8="compute", backend="float8")
    results = verify(plan(["striped", "attention2d", "ulysses"], [problem], options), "cpu", threads=True)
    assert results and all(result.ok and max(result.errors.values()) > 0.08 for result in results), results


def test_a_window_and_documents_in_tiles() -> None:
    case = Case(
        seq_length=96, heads=2, kv_heads=1, causal=True, dtype=torch.bfloat16, window=(20, 0), documents=(0, 40, 96)
    )
    got = run_on_threads("striped", 2, case, fp8="compute", backend="float8")[0]
    assert all(e <= 2 * implied for e, implied in zip(errors(got, case.reference()), IMPLIED, strict=False))


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        (
            Options(fp8="compute"),
            "cpu",
            "--cp-fp8 compute cannot run here: Transformer Engine.*CUDA.*--cp-fp8 comm, which",
        ),
        (Options(fp8="compute", backend="te_fp8"), "cpu", "--cp-backend te_fp8 cannot run here: .*CUDA"),
        (Options(backend="float8"), "cpu", "it accumulates in float32, which is not enough for torch.float64"),
    ],
)
def test_refused(options: Options, device: str, message: str) -> None:
    dtype = torch.float64 if options.backend == "float8" else torch.bfloat16
    with pytest.raises(ValueError, match=message):
        blocks.choose(options, Problem(size=1, dtype=dtype), torch.device(device))


def test_auto_never_takes_an_fp8_kernel() -> None:
    for device in ("cpu", "meta"):
        chosen, _ = backends.choose("auto", CallInfo(torch.device(device), torch.bfloat16, 128, 128))
        assert chosen.name not in backends.fp8_kernels()
    sends = blocks.choose(Options(fp8="comm"), Problem(size=1), torch.device("cpu"))
    assert sends.name == "sdpa"


def test_fp8_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    kernel = backends.get("te_fp8")
    assert "takes bfloat16 and float16" in str(kernel.unsupported(CallInfo(cuda, torch.float32, 128, 128)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "needs compute capability 9.0 (Hopper), and cuda has 8.0" in str(
        kernel.unsupported(CallInfo(cuda, torch.bfloat16, 128, 128))
    )
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "deterministic" in str(kernel.unsupported(CallInfo(cuda, torch.bfloat16, 128, 128)))


# -- delayed scaling


KINDS = {
    "delayed": (Delayed, 0.7),
    "the largest of three steps": (lambda: Delayed(3, algorithm="max", margin=1), 1.7),
    "current, with a memory": (lambda: Delayed(margin=2, roles=IN_BACKWARD), 3.0),
}
"""Scalings, and how much gradients may grow in a step."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES[::3], ids=lambda c: f"{c.seq_length}-{c.kv_heads}-{c.causal}-{c.dtype}")
def test_errors_of_delayed_scaling_match_the_roundings(kind: str, case: Case) -> None:
    """From the first step, which has no history; gradients are small and grow a little."""
    make, growth = KINDS[kind]
    scaled, want = make(), case.reference()
    for size in (1e-6, 1e-6, growth * 1e-6, 1e-6):
        measured = errors(run(Float8(scaling=scaled), case, size), want)
        assert not outside(measured), (size, measured)
        scaled.update()


def test_delayed_scales_lag_one_step() -> None:
    """Gradients that grow by 64 saturate at first, and then what is computed from them."""
    case, scaled = CASES[0], Delayed()
    want = case.reference()
    run(Float8(scaling=scaled), case, 1.0)
    assert not scaled.history.any()
    scaled.update()
    assert (scaled.history > 0).all()
    for _ in range(2):  # dout has its scale in the second step, and what is computed from it in the third
        assert outside(errors(run(Float8(scaling=scaled), case, 64.0), want), 2)
        scaled.update()
    assert not outside(errors(run(Float8(scaling=scaled), case, 64.0), want))


def test_histories() -> None:
    def scales(scaled: Delayed, maxima: list[float]) -> list[float]:
        seen = []
        for amax in maxima:
            scaled.record("q", torch.tensor(amax))
            scaled.record("q", torch.tensor([amax / 2]))
            scaled.update()
            seen.append(scaled.scale("q", torch.tensor(5.0), E4M3).item())
        return seen

    assert Delayed().scale("q", torch.tensor(5.0), E4M3) == 64  # of 5: 448 / 5 is 90
    maxima = [1.0, 100.0, 0.0, torch.inf, 7.0, 7.0]
    assert scales(Delayed(), maxima) == [256, 4, 4, 4, 64, 64]  # nothing, or nothing finite: as before
    assert scales(Delayed(margin=2), maxima) == [64, 1, 1, 1, 16, 16]
    assert scales(Delayed(3, algorithm="max"), maxima) == [256, 4, 4, 4, 64, 64]
    assert scales(Delayed(4, algorithm="max"), maxima) == [256, 4, 4, 4, 4, 64]
    assert scales(Delayed(3), [8.0, 4.0]) == [32, 64]
    assert scales(Delayed(roles=("k",)), maxima) == [64] * 6
    assert Delayed().scale("q", torch.tensor(torch.nan), E4M3).isnan()
    with pytest.raises(ValueError, match="length 0, algorithm 'most_recent': 1 step or more"):
        Delayed(0)
    with pytest.raises(ValueError, match="algorithm 'mean'"):
        Delayed(1, algorithm="mean")  # type: ignore[arg-type]


def test_only_training_is_recorded() -> None:
    """Not evaluation; a forward pass without gradients inside recomputation counts as training."""
    cp = ContextParallel("ring", fp8="compute", backend="float8")
    q, k, v = (x.requires_grad_().bfloat16() for x in CASES[1].inputs()[:3])
    forward = ("q", "k", "v", "out")

    def recorded(scaled: Delayed) -> tuple[str, ...]:
        return tuple(role for role, x in zip(ROLES, scaled.take(torch.device("cpu")), strict=True) if x > 0)

    scaled = Delayed()
    out = cp.attention(q, k, v, scaling=scaled)
    assert recorded(scaled) == forward
    out.sum().backward()
    assert recorded(scaled) == ("dout", "dp", "dqkv")
    with torch.no_grad():
        again = cp.attention(q, k, v, scaling=scaled)
        assert torch.equal(again, out) and recorded(scaled) == ()
        layer = Recomputed(lambda: cp.attention(q, k, v, scaling=scaled))
        layer()
        assert recorded(scaled) == forward
    layer()
    assert recorded(scaled) == ()
    with pytest.raises(ValueError, match='scaling only applies to kernels that compute in FP8: add fp8="compute"'):
        ContextParallel("ring", fp8="comm").attention(q, k, v, scaling=scaled)


def test_ranks_agree_on_scales() -> None:
    """The rank with the largest elements decides; other ranks see them in the backward pass only."""

    def rank() -> tuple[list[float], torch.Tensor]:
        index = dist.get_rank()
        cp = ContextParallel("ring", group=dist.group.WORLD, fp8="compute", backend="float8")
        generator, scaled = torch.Generator().manual_seed(index), Delayed(2)
        q, k, v = (torch.randn(16, 1, 2, 16, generator=generator).bfloat16().requires_grad_() for _ in range(3))
        cp.attention(q * (100 if index == 2 else 1), k, v, scaling=scaled).sum().backward()
        largest = scaled._recorded["q"].item()
        scaled.update(dist.group.WORLD)
        return [largest, scaled.scale("q", torch.ones(()), E4M3).item()], scaled.history

    ranks = run_ranks(rank, 4, init_process_group=True)
    assert [largest > 100 for (largest, _), _ in ranks] == [False, False, True, False]
    assert len({scale for (_, scale), _ in ranks}) == 1 and ranks[0][0][1] <= 2
    assert all(torch.equal(history, ranks[0][1]) for _, history in ranks)
    assert ranks[0][1][0, 0] == max(largest for (largest, _), _ in ranks)
    assert (ranks[0][1][0] > 0).all() and not ranks[0][1][1].any()
