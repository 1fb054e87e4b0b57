"""The ``te_fp8`` backend against the real Transformer Engine: signatures, enums, quantisers, float8 tensors, numbers.

There is no GPU here. TE's quantisers and float8 tensors are real; behind its Python functions the compiled ones are
replaced by bodies that take its float8 tensors apart, compute in the numerics of ``float8``, and fill in what a kernel
would report.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import fake_te
import pytest
import torch
from library_tiles import run
from oracle import Case, errors
from test_te_calls import CUDA_ORDER
from torch import Tensor

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.core.scaling import IN_BACKWARD, Delayed, Scaling, largest, scale_for
from cp_plugin.engine.kernels.backends import te, te_fp8
from cp_plugin.engine.kernels.backends.float8 import E4M3, E5M2, Float8
from cp_plugin.engine.kernels.backends.te_fp8 import TransformerEngineFp8

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
    one = te.tile_arguments(q, k, v, 0 if causal else 63, Scores(0.1))
    forward = te_fp8.forward_arguments(Scaling(), one)
    backward = te_fp8.backward_arguments(Scaling(), one, dout, torch.zeros(q.shape[:3]), dout)
    assert {f"{role}_quantizer" for role in IN_BACKWARD} < backward.keys()
    tables = library.te.tables
    for call, arguments in ((library.te.forward, forward), (library.te.backward, backward)):
        bound = inspect.signature(call.func).bind(**arguments, **call.keywords).arguments
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
    from cp_plugin.engine.kernels.backends.float8 import rounded

    x = (torch.randn(16, 2, 3, 8) * size).to(torch.bfloat16)
    tensor = te_fp8.quantized(x, dtype, scale_for(largest(x), dtype))
    assert tensor.shape == x.shape and tensor.dtype == x.dtype and tensor._data.dtype == torch.uint8
    assert torch.equal(te_fp8._plain(tensor, torch.float32), rounded(x, dtype))


def test_the_question_for_a_kernel_is_made_of_real_types(library: te_fp8.Library) -> None:
    for causal in (True, False):
        call = CallInfo(torch.device("cuda"), torch.bfloat16, 128, 128)
        question = library.te.parameters(**te_fp8.query_arguments(call, causal))
        for name, annotation in inspect.get_annotations(type(question), eval_str=True).items():
            assert isinstance(getattr(question, name), annotation), name
        assert (question.qkv_dtype, question.do_dtype) == (library.types[E4M3], library.types[E5M2])
        if not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match=r"(?i)cuda.*driver"):
                library.te.query(question)


class Kernels:
    """What the compiled functions do, as far as numbers go."""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> list[Any]:
            named = dict(zip(CUDA_ORDER[name].split(), arguments, strict=True))
            return (_forward if name == "fused_attn_fwd" else _backward)(named)

        return call


def _report(quantizer: Any, x: Tensor, dtype: torch.dtype) -> Any:
    """What a kernel does with a result: reports its largest element, and rounds it, at most to the type's largest."""
    quantizer.amax.copy_(torch.maximum(quantizer.amax, x.abs().amax().float()))
    elements = (x.float() * quantizer.scale).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    return quantizer.create_tensor_from_data(elements.view(torch.uint8), fake_dtype=torch.bfloat16)


def _diagonal(arguments: dict[str, Any]) -> int:
    return 0 if arguments["attn_mask_type"].name.endswith("CAUSAL_MASK") else arguments["max_seqlen_kv"] - 1


class KernelScaling(Scaling):
    """What rounds dp by the scale that a kernel was given, and reports it; the rest is rounded outside."""

    def __init__(self, dp: Any) -> None:
        self.dp = dp

    def scale(self, role: str, largest: Tensor, dtype: torch.dtype) -> Tensor:
        return self.dp.scale[0] if role == "dp" else scale_for(largest, dtype)

    def record(self, role: str, largest: Tensor) -> None:
        if role == "dp":
            self.dp.amax.copy_(largest.reshape(1))


def _forward(arguments: dict[str, Any]) -> list[Any]:
    q, k, v = (arguments[n].dequantize(dtype=torch.float32) for n in ("q", "k", "v"))
    assert arguments["s_quantizer"].scale == 256
    out, lse = Float8().forward(q, k, v, _diagonal(arguments), Scores(arguments["attn_scale"]))
    rng = torch.zeros(2, dtype=torch.int64)
    return [_report(arguments["o_quantizer"], out, E4M3), lse.permute(1, 2, 0).unsqueeze(-1).contiguous(), rng]


def _backward(arguments: dict[str, Any]) -> list[Any]:
    q, k, v, out, dout = (arguments[n].dequantize(dtype=torch.float32) for n in ("q", "k", "v", "o", "d_o"))
    statistics, _ = arguments["aux_ctx_tensors"]
    lse = statistics.squeeze(-1).permute(2, 0, 1)
    kernel = Float8(scaling=KernelScaling(arguments["dp_quantizer"]))
    grads = kernel.backward(dout, q, k, v, lse, out, _diagonal(arguments), Scores(arguments["attn_scale"]))
    return [_report(arguments["dqkv_quantizer"], grad, E5M2) for grad in grads]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_through_the_real_python_functions(
    library: te_fp8.Library, monkeypatch: pytest.MonkeyPatch, causal: bool, dtype: torch.dtype
) -> None:
    """As near as ``float8`` in a first step, whose gradients are scaled by bounds, and in later ones. Both remember the
    same, but for dq, dk and dv, which are rounded once more before they are reported here."""
    monkeypatch.setattr(library.te.tables, "tex", Kernels())
    case = tile(causal, dtype)
    want = case.reference()
    kinds = Scaling, lambda: Delayed(margin=2, roles=IN_BACKWARD), lambda: Delayed(2, algorithm="max")
    for make in kinds:
        ours, other = TransformerEngineFp8(scaling=make()), Float8(scaling=make())
        for size in (1.0, 0.9, 0.01, 1.0):
            measured, limits = (errors(run(kernel, case, size), want) for kernel in (ours, other))
            assert all(e <= 1.1 * limit for e, limit in zip(measured, limits, strict=True)), (size, measured, limits)
            if isinstance(ours.scaling, Delayed):
                ours.scaling.update()
                other.scaling.update()
                torch.testing.assert_close(ours.scaling.history, other.scaling.history, rtol=0.15, atol=0)


@pytest.mark.parametrize("margin", [0, 1])
def test_delayed_scales_are_those_of_transformer_engine(
    library: te_fp8.Library, monkeypatch: pytest.MonkeyPatch, margin: int
) -> None:
    """Its own update of a history, in the form that runs on any device: where it rounds down, to a power of two."""
    quantization = import_module("transformer_engine.pytorch.quantization")
    recipes = import_module("transformer_engine.common.recipe")
    maxima = torch.tensor([1.0, 3.0, 100.0, 0.25, 0.0, 7.0, torch.inf, 0.5, 2.0])
    for algorithm, length in (("max", 3), ("max", 1), ("most_recent", 1), ("most_recent", 4)):
        recipe = recipes.DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=algorithm)
        history, scale, ours = (
            torch.zeros(length, 1),
            torch.ones(1),
            Delayed(length, algorithm=algorithm, margin=margin),
        )
        for amax in maxima:
            history[0] = amax
            kept = algorithm == "max" and length > 1 and history.isinf().any()  # TE keeps a scale while it remembers
            quantization._amax_and_scale_update(history, scale, 448.0, recipe)
            ours.record("q", amax)
            ours.update()
            if not kept:
                assert ours.scale("q", torch.ones(()), E4M3) == torch.exp2(torch.floor(torch.log2(scale))), (
                    amax,
                    scale,
                )


def test_the_compiled_functions_accept_every_argument(library: te_fp8.Library) -> None:
    """A TypeError would say that one has the wrong type; they get as far as asking for a GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: cp-plugin doctor runs these calls to the end")
    (q, k, v, dout), kernel = tile().inputs(), TransformerEngineFp8()
    with pytest.raises(RuntimeError, match="non-CUDA DeviceType"):
        kernel.forward(q, k, v, 0, Scores(0.1))
    with pytest.raises(RuntimeError, match=r"(?i)cuda.*driver"):
        kernel.backward(dout, q, k, v, torch.zeros(q.shape[:3]), dout, 0, Scores(0.1))
