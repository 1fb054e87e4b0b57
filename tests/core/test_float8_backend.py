"""The reference of FP8 attention: its errors are those that its roundings imply; and how kernels are chosen for FP8."""

from __future__ import annotations

import pytest
import torch
from oracle import Case, Result, errors
from thread_ranks import on_threads

from cp_plugin import Options, Problem, backends, blocks
from cp_plugin.backends import float8
from cp_plugin.backends.float8 import E4M3, E5M2, Float8, rounded, scale_for
from cp_plugin.verify import plan, verify

E4, E5 = 0.0265, 0.053
"""Root mean square of e4m3's and e5m2's relative errors of numbers of any size."""
SCORES = 2**0.5 * E4
"""Of exp(score): scores have a variance of 1 in these tests, and both factors of every term are rounded."""
IMPLIED = Result(
    out=(3 * E4**2 + SCORES**2) ** 0.5,  # P, v, out, and the scores
    dq=(3 * E5**2 + 2 * E4**2 + SCORES**2) ** 0.5,  # dout, dS, dq; v, k
    dk=(3 * E5**2 + 2 * E4**2 + SCORES**2) ** 0.5,  # dout, dS, dk; v, q
    dv=(2 * E5**2 + E4**2 + SCORES**2) ** 0.5,  # dout, dv; P
)
"""Errors of independent roundings add in squares: 0.059, 0.106, 0.106 and 0.088."""
CASES = [
    Case(seq_length=s, heads=4, kv_heads=g, causal=causal, dtype=dtype, head_dim=d, v_head_dim=e, batch=1)
    for s, g, d, e in ((64, 4, 64, 64), (128, 2, 32, 48))
    for causal in (True, False)
    for dtype in (torch.float32, torch.bfloat16)
]


def run(case: Case) -> Result:
    q, k, v, dout = case.inputs()
    diagonal, scale, kernel = 0 if case.causal else case.seq_length, case.head_dim**-0.5, Float8()
    out, lse = kernel.forward(q, k, v, diagonal, scale)
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    delta = (dout.float() * out.float()).sum(-1)
    return Result(out, *kernel.backward(dout, q, k, v, lse, kernel.row_term(dout, delta), diagonal, scale))


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.seq_length}-{c.kv_heads}-{c.causal}-{c.dtype}")
def test_errors_are_those_that_the_scales_imply(case: Case) -> None:
    for name, found, implied in zip(Result._fields, errors(run(case), case.reference()), IMPLIED, strict=False):
        assert 0.7 * implied <= found <= 1.25 * implied, (name, found, implied)


@pytest.mark.parametrize("fault", ["e5m2 everywhere", "gradients unscaled", "a scale too large"])
def test_planted_faults_are_outside(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "e5m2 everywhere":
        monkeypatch.setattr(float8, "rounded", lambda x, dtype: rounded(x, E5M2))
    elif fault == "gradients unscaled":
        monkeypatch.setattr(float8, "scale_for", lambda a, t: torch.ones(()) if t == E5M2 else scale_for(a, t))
    else:
        monkeypatch.setattr(float8, "scale_for", lambda a, t: 2 * scale_for(a, t))
    case = Case(seq_length=64, heads=4, kv_heads=4, causal=True, dtype=torch.float32, head_dim=64, v_head_dim=64)
    if fault == "gradients unscaled":  # in a training they are this small
        q, k, v, dout = case.inputs()
        monkeypatch.setattr(Case, "inputs", lambda self: (q, k, v, dout * 1e-6))
    found = errors(run(case), case.reference())
    assert any(not e <= 1.25 * implied for e, implied in zip(found, IMPLIED, strict=False)), found


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_are_powers_of_two_that_use_the_range(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for amax in (1e-20, 1e-3, 0.999, 1.0, 1.76, largest, largest * 1.001, 3e9):
        scale = scale_for(torch.tensor(amax), dtype).item()
        assert largest / 2 < amax * scale <= largest and torch.frexp(torch.tensor(scale))[0] == 0.5
    assert scale_for(torch.zeros(()), dtype) == 1
    assert scale_for(torch.tensor(torch.inf), dtype).isnan() and scale_for(torch.tensor(torch.nan), dtype).isnan()
    x = torch.randn(1000)
    once = rounded(x, dtype)
    assert torch.equal(rounded(once, dtype), once)
    assert ((once - x).abs() <= x.abs() * 2.0 ** (-4 if dtype == E4M3 else -3) + 1e-6).all()


def test_what_is_not_finite_stays_so() -> None:
    q, k, v, _ = Case(seq_length=8, heads=1, kv_heads=1, causal=True, dtype=torch.float32, batch=1).inputs()
    v[3] = torch.nan
    assert Float8().forward(q, k, v, 0, 0.25)[0].isnan().any()


def test_sends_and_computes_in_fp8_on_ranks() -> None:
    """Within twice the error of one device, as all kernels in half precision."""
    from cp_plugin import Problem

    problem = Problem(size=4, heads=4, kv_heads=2, head_dim=32, seq_length=128, batch=1)
    options = Options(fp8="compute", backend="float8")
    results = verify(plan(["striped", "attention2d", "ulysses"], [problem], options), "cpu", threads=True)
    assert results and all(result.ok and max(result.errors.values()) > 0.08 for result in results), results


def test_a_window_and_documents_in_tiles() -> None:
    case = Case(
        seq_length=96, heads=2, kv_heads=1, causal=True, dtype=torch.bfloat16, window=(20, 0), documents=(0, 40, 96)
    )
    got = on_threads("striped", 2, case, fp8="compute", backend="float8")[0]
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
        (Options(backend="float8"), "cpu", "its sums are float32, which is not enough for torch.float64"),
    ],
)
def test_refused(options: Options, device: str, message: str) -> None:
    dtype = torch.float64 if options.backend == "float8" else torch.bfloat16
    with pytest.raises(ValueError, match=message):
        blocks.choose(options, Problem(size=1, dtype=dtype), torch.device(device))


def test_auto_never_takes_an_fp8_kernel() -> None:
    for device in ("cpu", "meta"):
        chosen, _ = backends.choose("auto", torch.device(device), torch.bfloat16, 128, 128)
        assert chosen.name not in backends.FP8_KERNELS
    sends = blocks.choose(Options(fp8="comm"), Problem(size=1), torch.device("cpu"))
    assert sends.name == "sdpa"


def test_older_devices_and_deterministic_runs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    kernel = backends.get("te_fp8")
    assert "takes bfloat16 and float16" in str(kernel.unsupported(cuda, torch.float32, 128, 128))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "needs compute capability 9.0 (Hopper), and cuda has 8.0" in str(
        kernel.unsupported(cuda, torch.bfloat16, 128, 128)
    )
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "deterministic" in str(kernel.unsupported(cuda, torch.bfloat16, 128, 128))
