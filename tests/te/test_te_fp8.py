"""The ``te_fp8`` backend against the real Transformer Engine: signatures, enums, quantisers, float8 tensors, numbers.

There is no GPU here. TE's quantisers and float8 tensors are real; behind its Python functions the compiled ones are
replaced by bodies that take its float8 tensors apart, compute in the numerics of ``float8``, and fill in what a kernel
would report.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import fake_te
import pytest
import torch
from oracle import Case, Result, errors
from test_te_calls import CUDA_ORDER
from torch import Tensor

from cp_plugin.backends import te_fp8
from cp_plugin.backends.float8 import E4M3, E5M2, Float8
from cp_plugin.backends.te_fp8 import Reported, TransformerEngineFp8

pytestmark = pytest.mark.usefixtures("te")


@pytest.fixture
def library() -> Iterator[te_fp8.Library]:
    fake_te.forget()
    te_fp8.load.cache_clear()
    yield te_fp8.load()
    fake_te.forget()
    te_fp8.load.cache_clear()


def tile(causal: bool = True, dtype: torch.dtype = torch.bfloat16) -> Case:
    return Case(
        seq_length=64, heads=4, kv_heads=2, causal=causal, dtype=dtype, head_dim=32, v_head_dim=32, batch=2, seed=1
    )


@pytest.mark.parametrize("causal", [True, False])
def test_arguments_bind_to_the_real_functions(library: te_fp8.Library, causal: bool) -> None:
    q, k, v, dout = tile().inputs()
    forward = te_fp8.forward_arguments(library, q, k, v, causal, 0.1)
    backward = te_fp8.backward_arguments(library, dout, q, k, v, torch.zeros(q.shape[:3]), dout, causal, 0.1)
    backward |= dict.fromkeys(("dp_quantizer", "dqkv_quantizer"), te_fp8.quantizer(library, torch.ones(()), E5M2))
    tables = library.te.tables
    for call, given in ((library.te.forward, forward), (library.te.backward, backward)):
        bound = inspect.signature(call.function).bind(**given, **call.fixed).arguments
        assert bound["fused_attention_backend"] is tables.FusedAttnBackend.FP8
        assert tables.AttnMaskType[bound["attn_mask_type"]].name == f"NVTE_{'CAUSAL' if causal else 'NO'}_MASK"
        for name, value in bound.items():
            if name.endswith("_quantizer"):
                assert type(value) is library.quantizer and value.scale.shape == value.amax.shape == (1,)
    types = {name: tensor._fp8_dtype for name, tensor in (("q", forward["q"]), ("d_o", backward["d_o"]))}
    assert types == {"q": library.types[E4M3], "d_o": library.types[E5M2]}


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_its_float8_tensors_have_our_numbers(library: te_fp8.Library, dtype: torch.dtype, size: float) -> None:
    from cp_plugin.backends.float8 import rounded

    x = (torch.randn(16, 2, 3, 8) * size).to(torch.bfloat16)
    tensor = te_fp8.quantized(library, x, dtype)
    assert tensor.shape == x.shape and tensor.dtype == x.dtype and tensor._data.dtype == torch.uint8
    assert torch.equal(te_fp8._plain(tensor, torch.float32), rounded(x, dtype))


def test_the_question_for_a_kernel_is_made_of_real_types(library: te_fp8.Library) -> None:
    for causal in (True, False):
        given = te_fp8.query_arguments(library, torch.bfloat16, 128, 128, causal, (2, 8, 4, 96, 160))
        asked = library.te.parameters(**given)
        for name, annotation in inspect.get_annotations(type(asked), eval_str=True).items():
            assert isinstance(getattr(asked, name), annotation), name
        assert (asked.qkv_dtype, asked.do_dtype) == (
            library.types[E4M3],
            library.types[E5M2],
        )
        assert (asked.max_seqlen_q, asked.max_seqlen_kv, asked.num_gqa_groups) == (96, 160, 4)
        if not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match=r"(?i)cuda.*driver"):
                library.te.query(asked)


class Kernels:
    """What the compiled functions do, as far as numbers go."""

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> list[Any]:
            named = dict(zip(CUDA_ORDER[name].split(), given, strict=True))
            return (_forward if name == "fused_attn_fwd" else _backward)(named)

        return call


def _out(quantizer: Any, x: Tensor, dtype: torch.dtype) -> Any:
    """What a kernel does with a result: reports its largest element, and rounds it, to infinity if it is too large."""
    quantizer.amax.copy_(torch.maximum(quantizer.amax, x.abs().amax().float()))
    elements = (x.float() * quantizer.scale).to(dtype)
    assert elements.float().isfinite().all(), "the scale was too large"
    return quantizer.create_tensor_from_data(elements.view(torch.uint8), fake_dtype=torch.bfloat16)


def _diagonal(given: dict[str, Any]) -> int:
    return 0 if given["attn_mask_type"].name.endswith("CAUSAL_MASK") else given["max_seqlen_kv"] - 1


def _forward(given: dict[str, Any]) -> list[Any]:
    q, k, v = (given[n].dequantize(dtype=torch.float32) for n in ("q", "k", "v"))
    assert given["s_quantizer"].scale == 256
    out, lse = Float8().forward(q, k, v, _diagonal(given), given["attn_scale"])
    rng = torch.zeros(2, dtype=torch.int64)
    return [_out(given["o_quantizer"], out, E4M3), lse.permute(1, 2, 0).unsqueeze(-1).contiguous(), rng]


def _backward(given: dict[str, Any]) -> list[Any]:
    q, k, v, out, dout = (given[n].dequantize(dtype=torch.float32) for n in ("q", "k", "v", "o", "d_o"))
    statistics, _ = given["aux_ctx_tensors"]
    lse = statistics.squeeze(-1).permute(2, 0, 1)
    grads = Float8().backward(dout, q, k, v, lse, out, _diagonal(given), given["attn_scale"])
    p_dp = (dout.norm(dim=-1).amax() * v.norm(dim=-1).amax()).float()
    given["dp_quantizer"].amax.copy_(p_dp.reshape(1))
    assert p_dp * given["dp_quantizer"].scale <= torch.finfo(E5M2).max
    return [_out(given["dqkv_quantizer"], grad, E5M2) for grad in grads]


def run(kernel: TransformerEngineFp8, case: Case, size: float = 1.0) -> Result:
    q, k, v, dout = case.inputs()
    diagonal, scale = 0 if case.causal else case.seq_length, case.head_dim**-0.5
    out, lse = kernel.forward(q, k, v, diagonal, scale)
    assert out.dtype == case.dtype and lse.dtype == torch.float32
    dout = dout * size
    term = kernel.row_term(dout, (dout.float() * out.float()).sum(-1))
    grads = kernel.backward(dout, q, k, v, lse, term, diagonal, scale)
    return Result(out, *(grad.float() / size for grad in grads))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_through_the_real_python_functions(
    library: te_fp8.Library, monkeypatch: pytest.MonkeyPatch, causal: bool, dtype: torch.dtype
) -> None:
    """As near as ``float8``: in the first call, whose gradients are scaled by bounds, and in later ones."""
    monkeypatch.setattr(library.te.tables, "tex", Kernels())
    kernel, case = TransformerEngineFp8(), tile(causal, dtype)
    want = case.reference()
    same = Float8()
    q, k, v, dout = case.inputs()
    out, lse = same.forward(q, k, v, 0 if causal else 64, 32**-0.5)
    term = same.row_term(dout, (dout.float() * out.float()).sum(-1))
    limits = errors(Result(out, *same.backward(dout, q, k, v, lse, term, 0 if causal else 64, 32**-0.5)), want)
    for size in (1.0, 1.0, 3.0, 0.01):
        found = errors(run(kernel, case, size), want)
        assert all(e <= 1.1 * limit for e, limit in zip(found, limits, strict=True)), (size, found, limits)
    largest = kernel.reported[q.device, "grads"].largest
    assert largest is not None and 0 < largest < 100


def test_scales_follow_what_is_reported() -> None:
    reported = Reported()
    assert reported.scale(torch.tensor(100.0)) == 512  # 57344 / 100 is 573
    reported.note(torch.tensor([3.0]))
    assert reported.scale(torch.tensor(100.0)) == 4096  # room for 12
    assert reported.scale(torch.tensor(5.0)) == 8192  # no more than can be
    reported.note(torch.tensor([torch.inf]))
    assert reported.largest is not None and 2.9 < reported.largest < 3.0
    for _ in range(5000):
        reported.note(torch.tensor([0.1]))
    assert 0.09 < reported.largest < 0.11


def test_it_is_refused_without_a_device(library: te_fp8.Library) -> None:
    assert "CUDA devices only" in str(TransformerEngineFp8().unsupported(torch.device("cpu"), torch.bfloat16, 128, 128))


def test_the_compiled_functions_accept_every_argument(library: te_fp8.Library) -> None:
    """A TypeError would say that one has the wrong type; they get as far as asking for a GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: cp-plugin doctor runs these calls to the end")
    (q, k, v, dout), kernel = tile().inputs(), TransformerEngineFp8()
    with pytest.raises(RuntimeError, match="non-CUDA DeviceType"):
        kernel.forward(q, k, v, 0, 0.1)
    with pytest.raises(RuntimeError, match=r"(?i)cuda.*driver"):
        kernel.backward(dout, q, k, v, torch.zeros(q.shape[:3]), dout, 0, 0.1)
