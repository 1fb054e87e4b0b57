"""Tile kernels that run on the CPU against the oracle; the stand-in for out; refusals."""

from __future__ import annotations

import pytest
import torch
from library_tiles import run
from oracle import Case, Result, assert_close, attend, errors

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.kernels import backends
from cp_plugin.engine.kernels.backends.reference import Reference
from cp_plugin.engine.kernels.fused import out_from_delta

CPU = torch.device("cpu")
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
PLAIN = [name for name in backends.names()[1:] if name not in backends.fp8_kernels()]
HERE = [name for name in PLAIN if backends.get(name).unsupported(CallInfo(CPU, torch.float32, 16, 16)) is None]


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("strided", [False, True])
def test_kernel_equals_oracle(name: str, dtype: torch.dtype, kv_heads: int, causal: bool, strided: bool) -> None:
    """Equal and different head sizes of keys and values, as in multi-latent attention."""
    backend = backends.get(name)
    reason = backend.unsupported(CallInfo(CPU, dtype, 16, 16))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    for d, e in ((16, 16), (24, 16), (16, 24)):
        sizes = {"kv_heads": kv_heads, "head_dim": d, "v_head_dim": e}
        case = Case(seq_length=48, heads=8, causal=causal, dtype=dtype, **sizes)
        result = run(backend, case, strided=strided, limit=DTYPES[dtype])
        assert_close(result, case.reference(), DTYPES[dtype], (name, case))


@pytest.mark.parametrize("diagonal", [-7, -3, -1, 0, 2, 4, 9])
def test_reference_takes_any_diagonal_and_value_head_size(diagonal: int) -> None:
    torch.manual_seed(0)
    shapes = (6, 2, 4, 8), (5, 2, 2, 8), (5, 2, 2, 3), (6, 2, 4, 3)
    q, k, v, dout = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = attend(*leaves, torch.arange(5) > torch.arange(6)[:, None] + diagonal, 0.3)
    out, lse = Reference().forward(q, k, v, diagonal, Scores(0.3))
    torch.testing.assert_close((out, lse), want, rtol=1e-12, atol=1e-12)
    grads = Reference().backward(dout, q, k, v, lse, (dout * out).sum(-1), diagonal, Scores(0.3))
    torch.testing.assert_close(tuple(grads), torch.autograd.grad(want[0], leaves, dout), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_replaces_out_at_the_same_error(dtype: torch.dtype) -> None:
    case = Case(seq_length=256, heads=4, kv_heads=4, causal=True, dtype=dtype, head_dim=64, v_head_dim=64)
    sdpa, want = backends.get("sdpa"), case.reference()
    q, k, v, dout = case.inputs()
    out, lse = sdpa.forward(q, k, v, 0, Scores(0.125))
    true_out = Result(out, *sdpa.backward(dout, q, k, v, lse, out, 0, Scores(0.125)))
    for ours, theirs in zip(errors(run(sdpa, case), want), errors(true_out, want), strict=True):
        assert ours <= 1.1 * theirs, (ours, theirs)


def test_stand_in_for_tiny_huge_and_zero_gradients() -> None:
    torch.manual_seed(0)
    out = torch.randn(6, 1, 1, 64)
    dout = torch.randn(6, 1, 1, 64) * torch.tensor([1e-30, 1e-20, 1.0, 1e15, 1e18, 0.0]).view(6, 1, 1, 1)
    delta = (dout * out).sum(-1)
    fake = out_from_delta(dout, delta)
    torch.testing.assert_close((dout * fake).sum(-1), delta, rtol=1e-5, atol=0.0)
    assert fake[-1].eq(0).all() and (fake.norm(dim=-1) <= out.norm(dim=-1) * 1.001).all()


def test_auto_chooses_the_first_that_can_run() -> None:
    for sizes in ((64, 64), (192, 128), (128, 192)):
        assert backends.choose("auto", CallInfo(CPU, torch.bfloat16, *sizes))[0].name == "sdpa"
    chosen, reason = backends.choose("auto", CallInfo(torch.device("meta"), torch.bfloat16, 192, 128))
    assert chosen.name == "reference" and "sdpa: torch has no flash attention for meta" in reason


def test_bad_backends_are_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"--cp-backend fast: choose one of auto, cudnn, flash, sdpa, .*reference"):
        backends.get("fast")
    with pytest.raises(ValueError, match=r"--cp-backend cudnn cannot run here: .*CUDA.*use --cp-backend sdpa or auto"):
        backends.choose("cudnn", CallInfo(CPU, torch.float32, 64, 64))
    with pytest.raises(ValueError, match=r"no attention kernel for torch.int32"):
        backends.choose("auto", CallInfo(CPU, torch.int32, 64, 64))
    cuda = torch.device("cuda")
    sdpa = backends.get("sdpa")
    assert "not torch.float32" in str(sdpa.unsupported(CallInfo(cuda, torch.float32, 64, 64)))
    for sizes in ((60, 60), (60, 36), (128, 260)):
        reason = sdpa.unsupported(CallInfo(cuda, torch.bfloat16, *sizes))
        assert f"multiples of 8 up to 256, not {max(sizes)}" in str(reason)
    assert sdpa.unsupported(CallInfo(cuda, torch.bfloat16, 192, 128)) is None
    assert sdpa.unsupported(CallInfo(cuda, torch.bfloat16, 128, 128)) is None
