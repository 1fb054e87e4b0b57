"""Every call of the ``te`` backend against the real Transformer Engine: signatures, enums, what reaches the kernels.

There is no GPU here, so the compiled functions are called as far as they go: until they ask for a device.
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
from oracle import Case, assert_close

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.kernels.backends import te
from cp_plugin.engine.kernels.backends.signatures import parameters
from cp_plugin.engine.kernels.backends.te import TransformerEngine

pytestmark = pytest.mark.usefixtures("te")

CUDA_ORDER = {
    "fused_attn_fwd": (
        "max_seqlen_q max_seqlen_kv is_training attn_scale dropout fast_zero_fill qkv_layout o_format "
        "qkv_scale_inv_format attn_bias_type attn_mask_type softmax_type window_size bottom_right_diagonal "
        "cu_seqlens_q cu_seqlens_kv q k v fake_dtype cu_seqlens_q_padded cu_seqlens_kv_padded page_table_k "
        "page_table_v s_quantizer o_quantizer attn_bias softmax_offset rng_gen rng_elts_per_thread return_max_logit "
        "cuda_graph"
    ),
    "fused_attn_bwd": (
        "max_seqlen_q max_seqlen_kv attn_scale dropout fast_zero_fill qkv_layout o_format do_format dqkv_layout "
        "qkv_scale_inv_format do_scale_inv_format attn_bias_type attn_mask_type softmax_type window_size "
        "bottom_right_diagonal deterministic cu_seqlens_q cu_seqlens_kv q k v o d_o fake_dtype aux_ctx_tensors "
        "cu_seqlens_q_padded cu_seqlens_kv_padded s_quantizer dp_quantizer dqkv_quantizer cuda_graph"
    ),
}
"""The parameters of the compiled functions, which have no names in Python (csrc/extensions/attention.cpp)."""


@pytest.fixture
def library() -> Iterator[te.Library]:
    fake_te.forget()
    yield te.load()
    fake_te.forget()


def tile(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return Case(seq_length=8, heads=4, kv_heads=2, causal=True, dtype=dtype, head_dim=64, v_head_dim=64).inputs()


@pytest.mark.parametrize("causal", [True, False])
def test_arguments_bind_to_the_real_functions(library: te.Library, causal: bool) -> None:
    q, k, v, dout = tile()
    one = te.tile_arguments(q, k, v, 0 if causal else 7, Scores(0.1))
    backward = te.backward_arguments(one, dout, torch.zeros(q.shape[:3]), dout)
    for call, arguments in ((library.forward, te.forward_arguments(one)), (library.backward, backward)):
        bound = inspect.signature(call.func).bind(**arguments, **call.keywords).arguments
        tables = library.tables
        assert tables.AttnMaskType[bound["attn_mask_type"]].name == f"NVTE_{'CAUSAL' if causal else 'NO'}_MASK"
        assert tables.QKVLayout[bound["qkv_layout"]].name == "NVTE_SBHD_SBHD_SBHD"
        assert tables.QKVFormat[bound["o_format"]].name == "NVTE_SBHD"
        assert tables.AttnBiasType[bound["attn_bias_type"]].name == "NVTE_NO_BIAS"
        assert tables.SoftmaxType[bound["softmax_type"]].name == "NVTE_VANILLA_SOFTMAX"
        assert bound["fused_attention_backend"] is tables.FusedAttnBackend.F16_arbitrary_seqlen


def test_the_stand_in_of_other_tests_has_the_real_parameters(library: te.Library) -> None:
    for real, names in ((library.forward.func, fake_te.FORWARD), (library.backward.func, fake_te.BACKWARD)):
        fake = parameters(fake_te.function("f", names, dict))
        assert [(p.name, p.default) for p in parameters(real).values()] == [(p.name, p.default) for p in fake.values()]
    real = parameters(library.parameters)
    assert set(parameters(fake_te.function("f", fake_te.PARAMETERS, dict))) <= set(real)
    assert {kind.name: kind.value for kind in fake_te.Kinds} == {
        kind.name: kind.value for kind in library.tables.FusedAttnBackend
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_question_for_a_kernel_is_made_of_real_types(library: te.Library, dtype: torch.dtype) -> None:
    for causal in (True, False):
        question = library.parameters(**te.query_arguments(CallInfo(torch.device("cuda"), dtype, 192, 128), causal))
        for name, annotation in inspect.get_annotations(type(question), eval_str=True).items():
            value = getattr(question, name)
            assert isinstance(value, annotation), f"{name} is {value!r}, not a {annotation}"
            assert not str(value).endswith("NOT_SET") or name.endswith("scale_inv_format"), name
        if torch.cuda.is_available():
            assert library.query(question)[0] == library.tables.FusedAttnBackend.F16_arbitrary_seqlen
        else:
            with pytest.raises(RuntimeError, match=r"(?i)cuda.*driver"):
                library.query(question)


def test_the_compiled_functions_accept_every_argument(library: te.Library) -> None:
    """A TypeError would say that one has the wrong type; they get as far as asking for a GPU."""
    q, k, v, dout = tile()
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: cp-plugin doctor runs these calls to the end")
    with pytest.raises(RuntimeError, match="non-CUDA DeviceType"):
        TransformerEngine().forward(q, k, v, 0, Scores(0.1))
    with pytest.raises(RuntimeError, match=r"(?i)cuda.*driver"):
        TransformerEngine().backward(dout, q, k, v, torch.zeros(q.shape[:3]), dout, 0, Scores(0.1))


class Kernels:
    """The stand-in's bodies behind TE's own Python functions, called as these call the compiled ones."""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> list[Any]:
            named = dict(zip(CUDA_ORDER[name].split(), arguments, strict=True))
            tables = import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
            for table, key in (
                (tables.QKVLayout, "qkv_layout"),
                (tables.QKVLayout, "dqkv_layout"),
                (tables.QKVFormat, "o_format"),
                (tables.QKVFormat, "do_format"),
                (tables.AttnBiasType, "attn_bias_type"),
                (tables.AttnMaskType, "attn_mask_type"),
                (tables.SoftmaxType, "softmax_type"),
            ):
                if key in named:
                    named[key] = next(word for word, value in table.items() if value == named[key])
            named["fused_attention_backend"] = fake_te.Kinds.F16_arbitrary_seqlen
            if name == "fused_attn_bwd":
                return fake_te.backward(named)
            out, rest = fake_te.forward(named)
            return [out, *rest]

        return call


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_through_the_real_python_functions(
    library: te.Library, monkeypatch: pytest.MonkeyPatch, causal: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(library.tables, "tex", Kernels())
    case = Case(seq_length=24, heads=4, kv_heads=2, causal=causal, dtype=dtype, head_dim=24)
    assert_close(run(TransformerEngine(), case), case.reference(), 1e-2, case)
