"""nvidia-modelopt on the plugin's attention: PTQ and QAT give one rank's results on any ranks."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from quantizing import (
    FP8,
    NVFP4,
    OFF,
    amaxes,
    calibrate,
    configurations,
    error,
    gradients,
    logits,
    model,
    nvfp4_on_cpu,
    positions,
    quantize_stock_attention,
    run_quantized,
    whole,
)
from test_attention_module import make_layer
from torch import Tensor
from training import compare, train

from cp_plugin.megatron.flags.args import Settings

pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed: pip install cp-plugin[modelopt]")
pytestmark = [pytest.mark.usefixtures("adapter"), pytest.mark.filterwarnings("ignore")]

CLOSE = 1e-12  # of float64, relative
GRADIENT = 1e-7  # Megatron's cross entropy is float32
STRIPED = "--cp-provider striped --cp-selfcheck off --context-parallel-size"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
RUNS = {
    "ring, 2 ranks": (2, "--context-parallel-size 2 --cp-provider ring --cp-selfcheck off"),
    "striped, 4 ranks": (4, f"{STRIPED} 4"),
    "attention2d 2x2": (4, "--context-parallel-size 4 --cp-provider attention2d --cp-grid 2x2 --cp-selfcheck off"),
    "striped x tensor parallel 2": (4, f"{STRIPED} 2 {TENSOR}"),
}
NO_STATE = ("FP8 k, v with the largest amax", "FP8 by token")


def ptq_and_qat() -> dict[str, Any]:
    """By configuration: positions, logits after calibration, amaxes, gradients, logits without quantisers."""
    import modelopt.torch.quantization as mtq

    results = {}
    for name, config in configurations().items():
        gpt = model()
        with torch.no_grad():
            before = logits(gpt)
            mtq.quantize(gpt, config, calibrate)
            after = logits(gpt)
        results[name] = (positions(), after, amaxes(gpt), gradients(gpt), before)
    return results


@functools.cache
def stock() -> dict[str, Any]:
    return run_quantized(ptq_and_qat, 1, "")[0]


@pytest.mark.parametrize("run", RUNS)
def test_logits_and_gradients_are_those_of_one_rank(run: str) -> None:
    everyone = run_quantized(ptq_and_qat, *RUNS[run])
    for name, (_, want, amax, grads, plain) in stock().items():
        parts = [results[name] for results in everyone]
        assert error(plain, want) > 1e-3, "quantisation does something"
        assert error(whole([part[:2] for part in parts]), want) < CLOSE, name
        assert bool(amax) == (name not in NO_STATE)
        for part in parts:
            assert part[2].keys() == amax.keys()
            assert all(error(value, amax[key]) < CLOSE for key, value in part[2].items()), name
            same = [key for key, grad in part[3].items() if grad.shape == grads[key].shape]
            assert "decoder.layers.0.input_layernorm.weight" in same
            assert all(error(part[3][key], grads[key]) < GRADIENT for key in same), name


def test_quantised_training_is_that_of_one_rank() -> None:
    """With the self-check, recomputation and pipelines; float32."""
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    parallel = "--context-parallel-size 2 --pipeline-model-parallel-size 2 --cp-provider striped"
    plain, want = (train(2, "--pipeline-model-parallel-size 2", steps=2, prepare=p) for p in (None, qat))
    assert all(error(plain[0].grads[key], grad) > 1e-3 for key, grad in want[0].grads.items() if "linear_qkv" in key)
    compare(train(4, f"{parallel} {flags}", steps=2, prepare=qat), want, steps=2)


def qat() -> None:
    import modelopt.torch.quantization as mtq

    import cp_plugin.megatron.models.gpt as gpt
    from cp_plugin.megatron import runtime

    build = gpt.GPTModel
    cfg = {"quantizer_name": "*[qkv]_bmm_quantizer", "cfg": {**FP8, "constant_amax": 3.0}}

    def build_quantized(**arguments: Any) -> torch.nn.Module:
        if not runtime.settings().active:
            quantize_stock_attention()
        return mtq.quantize(build(**arguments), {"quant_cfg": [OFF, cfg], "algorithm": "max"})

    gpt.GPTModel = build_quantized


def saved(folder: Path) -> tuple[Tensor, Tensor]:
    """Calibrate a model, save it in both of Megatron's ways, and return its logits."""
    import modelopt.torch.opt as mto
    import modelopt.torch.quantization as mtq
    from megatron.core import dist_checkpointing
    from modelopt.torch.opt.plugins import save_sharded_modelopt_state

    gpt = model()
    with torch.no_grad():
        mtq.quantize(gpt, configurations()["all"], calibrate)
        result = logits(gpt)
    if torch.distributed.get_rank() == 0:
        (folder / "sharded").mkdir()
        torch.save((mto.modelopt_state(gpt), gpt.state_dict()), folder / "plain.pt")
    torch.distributed.barrier()
    save_sharded_modelopt_state([gpt], folder / "sharded", ("torch_dist", 1))
    dist_checkpointing.save(gpt.sharded_state_dict(), str(folder / "sharded"), ("torch_dist", 1))
    return positions(), result


def restored(folder: Path, plain: bool) -> tuple[Tensor, Tensor]:
    """Logits of a model that had other weights and no quantisers."""
    import modelopt.torch.opt as mto
    from megatron.core import dist_checkpointing
    from modelopt.torch.opt.plugins import restore_sharded_modelopt_state

    gpt = model()
    for weight in gpt.parameters():
        weight.data.zero_()
    if plain:
        state, weights = torch.load(folder / "plain.pt", weights_only=False)
        gpt = mto.restore_from_modelopt_state(gpt, state)
    else:
        restore_sharded_modelopt_state([gpt], folder / "sharded")
        weights = dist_checkpointing.load(gpt.sharded_state_dict(), str(folder / "sharded"))
    gpt.load_state_dict(weights)
    with torch.no_grad():
        return positions(), logits(gpt)


def test_restored_on_other_ranks(tmp_path: Path) -> None:
    want = whole(run_quantized(saved, 2, f"{STRIPED} 2", tmp_path))
    for ranks, flags, plain in (
        (4, f"{STRIPED} 4", False),
        (4, f"{STRIPED} 2 {TENSOR}", False),
        (2, "--context-parallel-size 2 --cp-provider ring --cp-selfcheck off", True),
        (1, "", True),
    ):
        got = whole(run_quantized(restored, ranks, flags, tmp_path, plain))
        assert error(got, want) < CLOSE, (flags, plain)


def attention(packed: bool = False) -> Any:
    """A layer on its own, on one rank of a run with a provider."""
    from megatron.core.transformer.enums import AttnMaskType

    from cp_plugin.megatron.patches import hooks

    hooks.start(Settings(provider="ring"))
    return make_layer(attn_mask_type=AttnMaskType.padding_causal if packed else AttnMaskType.causal)


def qkv(*leading: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    return [torch.randn(*leading, heads, 16, generator=draws) for heads in (4, 2, 2)]


KEYS = "k_bmm_quantizer of --cp-provider ring: .*"
ON = {"quantizer_name": "*[qkv]_bmm_quantizer", "cfg": FP8}
REFUSED: dict[str, list[dict[str, Any]]] = {
    **{
        f"{KEYS}{message}": [{"quantizer_name": "*k_bmm_quantizer", "cfg": cfg}]
        for message, cfg in {
            r"a bias \(affine quantisation\)": {**FP8, "bias": {-2: None, -4: None, "type": "static"}},
            r"scales along the axis \(2,\)": [FP8, {**FP8, "axis": 2}],
            r"scales along the axis \(0, 1, 2\)": {**FP8, "axis": (0, 1, 2)},
            r"scales along the axis \(0, 1\)": {**FP8, "block_sizes": {-1: None, -2: None}},
            "a dynamic scale of the whole tensor": {**FP8, "type": "dynamic"},
            r"blocks along the dimensions \[0\]": {**FP8, "block_sizes": {-1: 16, -4: 16}},
            "static blocks": {**FP8, "block_sizes": {-1: 16}},
            "the calibrator HistogramCalibrator": {"num_bits": 8, "calibrator": "histogram"},
            r"a custom backend \(mine\)": {**FP8, "backend": "mine"},
            "fake_quant False": {**FP8, "fake_quant": False},
        }.items()
    },
    **{
        rf"--cp-provider ring does not support {name} \(.*supported are q_bmm_quant": [
            ON,
            {"quantizer_name": f"*{name}", "cfg": FP8},
        ]
        for name in ("softmax_quantizer", "p_bmm_quantizer", "bmm2_output_quantizer")
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_quantisers_that_ranks_would_change_or_inside_attention_are_refused(message: str) -> None:
    import modelopt.torch.quantization as mtq

    config = {"quant_cfg": [OFF, *REFUSED[message]], "algorithm": "max"}
    with pytest.raises(ValueError, match=message):
        mtq.quantize(attention(), config, lambda module: module(*qkv(8, 2), None))
    off = [{"quantizer_name": one["quantizer_name"], "enable": False} for one in REFUSED[message][-1:]]
    config["quant_cfg"] += off
    mtq.quantize(attention(), config, lambda module: module(*qkv(8, 2), None))


def test_a_release_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.nn import QuantModuleRegistry

    from cp_plugin.megatron.mixers import modelopt
    from cp_plugin.megatron.mixers.core_attention import CoreAttention

    cases = {
        r"nvidia-modelopt 0\.33\.1 cannot .* --cp-provider ring \(too old\): use 0\.46 or newer": lambda: "0.33.1",
        r"nvidia-modelopt 9\.0 cannot quantise .* \(import of .* halted": lambda: "9.0",
    }
    for message, version in cases.items():
        attention()
        QuantModuleRegistry.unregister(CoreAttention)
        monkeypatch.setattr(modelopt, "version", version)
        monkeypatch.setitem(sys.modules, "cp_plugin.megatron.mixers.quantized", None)
        with pytest.raises(ValueError, match=message):
            mtq.quantize(attention(), {"quant_cfg": [OFF], "algorithm": "max"})
    QuantModuleRegistry.unregister(CoreAttention)


def test_packed_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    import modelopt.torch.quantization as mtq
    from megatron.core.packed_seq_params import PackedSeqParams
    from modelopt.torch.quantization import tensor_quant

    monkeypatch.setattr(tensor_quant, "dynamic_block_quantize_op", None)
    nvfp4_on_cpu()
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = PackedSeqParams("thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=5, max_seqlen_kv=5)

    def attend_each_document(*tensors: Tensor) -> Tensor:
        parts = [attention()(*(x[part, None] for x in tensors), None) for part in (slice(0, 3), slice(3, 8))]
        return torch.cat(parts).squeeze(1)

    for cfg in (FP8, NVFP4, {**FP8, "type": "dynamic", "block_sizes": {-1: None}}):
        config = {"quant_cfg": [OFF, {"quantizer_name": "*_bmm_quantizer", "cfg": cfg}], "algorithm": "max"}
        layer = attention(packed=True)
        mtq.quantize(layer, config, lambda layer: layer(*qkv(8), None, packed_seq_params=packed))
        got = layer(*qkv(8), None, packed_seq_params=packed)
        quantised = (getattr(layer, f"{name}_bmm_quantizer")(x) for name, x in zip("qkv", qkv(8), strict=True))
        assert error(attend_each_document(*qkv(8)), got) > 1e-2
        assert error(attend_each_document(*quantised), got) < 1e-6


def test_a_model_with_other_attention_is_refused() -> None:
    import modelopt.torch.quantization as mtq

    layer = torch.nn.ModuleDict({"core_attention": torch.nn.Linear(4, 4), "ours": attention()})
    with pytest.raises(
        ValueError, match=r"--cp-provider ring does not run in every layer to quantise; missing in .*core_a"
    ):
        mtq.quantize(layer, {"quant_cfg": [OFF], "algorithm": "max"})


def test_the_spec_for_modelopt_names_the_plugins_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.post_training.modelopt.gpt import model_specs
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    monkeypatch.setattr(model_specs, "get_num_layers_to_build", lambda config: 3)  # there are no process groups
    monkeypatch.setattr(model_specs, "get_transformer_layer_offset", lambda config: 0)
    attention()
    for kind in (TransformerConfig, MLATransformerConfig):
        config = kind(num_layers=3, hidden_size=64, num_attention_heads=4, num_moe_experts=2, moe_layer_freq=[0, 1, 0])
        for local in (False, True):
            block = model_specs.get_gpt_modelopt_spec(config, local_core_attention=local, remap_te_layernorm=True)
            built = [layer.submodules.self_attention.submodules.core_attention for layer in block.layer_specs]
            assert [made.__name__ for made in built] == ["ByLayerNumber"] * 3
