"""Models, batches and configurations for the tests of nvidia-modelopt, on any number of ranks.

The reference is stock Megatron on one rank, with modelopt's quantisers in front of q, k and v. Weights are float64, so
that rounding of sums does not change quantised values; quantisers compute in float32. NVFP4 has no CPU kernel:
modelopt's class for stored NVFP4 tensors quantises and dequantises instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from test_decoding import with_model
from torch import Tensor

TOKENS, VOCABULARY = 64, 100
OFF = {"quantizer_name": "*", "enable": False}
NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
FP8 = {"num_bits": (4, 3)}


def configurations() -> dict[str, dict[str, Any]]:
    """Name -> what ``mtq.quantize`` is given."""
    import modelopt.torch.quantization as mtq

    def qkv(cfg: Any, which: str = "qkv") -> dict[str, Any]:
        return {"quantizer_name": f"*[{which}]_bmm_quantizer", "cfg": cfg}

    lists = {
        "FP8_KV_CFG": [OFF, *mtq.FP8_KV_CFG["quant_cfg"]],
        "NVFP4_KV_CFG": [OFF, *mtq.NVFP4_KV_CFG["quant_cfg"]],
        "FP8 q, k, v": [OFF, qkv(FP8)],
        "NVFP4 q, k, v": [OFF, qkv(NVFP4)],
        "NVFP4 k, FP8 v": [OFF, qkv(NVFP4, "k"), qkv(FP8, "v")],
        "FP8 k, v with the largest amax": [OFF, qkv({**FP8, "use_constant_amax": True}, "kv")],
        "FP8 by token": [OFF, qkv({**FP8, "type": "dynamic", "block_sizes": {-1: None}})],
        "INT8 and then FP8": [OFF, qkv([{"num_bits": 8}, FP8])],
        "FP8_DEFAULT_CFG and FP8_KV_CFG": [*mtq.FP8_DEFAULT_CFG["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]],
        "all": [*mtq.FP8_DEFAULT_CFG["quant_cfg"], qkv(FP8, "q"), qkv(NVFP4, "k"), qkv([{"num_bits": 8}, FP8], "v")],
    }
    return {name: {"quant_cfg": entries, "algorithm": "max"} for name, entries in lists.items()}


def run_quantized(ask: Callable[..., Any], ranks: int, flags: str, *args: Any) -> list[Any]:
    """``ask(*args)`` on every rank of a Megatron that is ready to train; ``flags`` as on its command line."""

    def prepare() -> None:
        nvfp4_on_cpu()
        if "--cp-provider" not in flags:
            quantize_stock_attention()

    words = f"--num-layers 2 --make-vocab-size-divisible-by 64 {flags}"
    return with_model(lambda _: ask(*args), words, ranks, prepare)


def nvfp4_on_cpu() -> None:
    from modelopt.torch.quantization import tensor_quant
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def quantize(x: Tensor, block: int, amax: Tensor, *bits: int) -> Tensor:
        assert (block, *bits) == (16, 4, 2, 8, 4), "not NVFP4"
        of_tensor = amax.float() / (6 * 448)
        packed, of_blocks, _ = NVFP4QTensor.quantize(x.float(), block, weights_scaling_factor_2=of_tensor)
        return packed.dequantize(x.dtype, scale=of_blocks, double_scale=of_tensor, block_sizes={-1: block})

    tensor_quant.dynamic_block_quantize_op = quantize


def quantize_stock_attention() -> None:
    """Give Megatron's own local attention the quantisers that modelopt gives Transformer Engine's."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from modelopt.torch.quantization.nn import QuantModule, QuantModuleRegistry, TensorQuantizer

    class Quantized(QuantModule):
        def _setup(self) -> None:
            for x in "qkv":
                setattr(self, f"{x}_bmm_quantizer", TensorQuantizer())

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            q, k, v = self.q_bmm_quantizer(q), self.k_bmm_quantizer(k), self.v_bmm_quantizer(v)
            return super().forward(q, k, v, *args, **kwargs)

        def get_extra_state(self) -> None:  # Transformer Engine's class has one, too
            pass

        def set_extra_state(self, state: Any) -> None:
            pass

    if DotProductAttention not in QuantModuleRegistry:
        QuantModuleRegistry.register({DotProductAttention: "stock"})(Quantized)


def model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """A new model, whose initial weights do not depend on the ranks."""
    import cp_plugin.megatron.models.gpt as gpt

    torch.manual_seed(5)
    return gpt.build_model().to(dtype)


def batch(seed: int) -> dict[str, Tensor]:
    """This rank's shard of a random batch: tokens, labels and positions ``[b, s / cp]``."""
    import cp_plugin.megatron.models.gpt as gpt

    tokens = torch.randint(0, VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    places = torch.arange(TOKENS).expand(2, TOKENS)
    whole = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": places, "loss_mask": places.float()}
    return gpt._slice(dict.fromkeys(gpt._DTYPES) | whole)


def calibrate(quantized: torch.nn.Module) -> None:
    """The forward loop of ``mtq.quantize``: two batches."""
    for seed in (1, 2):
        logits(quantized, seed)


def logits(of: torch.nn.Module, seed: int = 3) -> Tensor:
    """Logits of this rank's tokens over the whole vocabulary."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    part = batch(seed)
    return gather_from_tensor_model_parallel_region(of(part["tokens"], part["position_ids"], None))


def positions() -> Tensor:
    """Positions of this rank's tokens."""
    from cp_plugin.megatron import runtime

    return runtime.context_parallel().positions(TOKENS) if runtime.settings().active else torch.arange(TOKENS)


def gradients(of: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients of a batch's mean loss, summed over the context-parallel ranks, as in a step of QAT."""
    from megatron.core import parallel_state

    part = batch(4)
    losses = of(part["tokens"], part["position_ids"], None, labels=part["labels"])
    names, weights = zip(*of.named_parameters(), strict=True)
    grads = torch.autograd.grad(losses.sum() / (2 * TOKENS), weights)
    for weight, grad in zip(weights, grads, strict=True):
        dist.all_reduce(grad, group=parallel_state.get_context_parallel_group())
        if getattr(weight, "sequence_parallel", False):
            dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
    return dict(zip(names, grads, strict=True))


def amaxes(of: torch.nn.Module) -> dict[str, Tensor]:
    """Calibrated amaxes by name of the quantiser."""
    return {name: state.detach().clone() for name, state in of.state_dict().items() if name.endswith("._amax")}


def whole(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Logits of the whole sequence, from each rank's positions and logits."""
    result = parts[0][1].new_full((2, TOKENS, parts[0][1].size(-1)), torch.nan)
    for places, rows in parts:
        result[:, places] = rows
    return result


def error(got: Tensor, want: Tensor) -> float:
    """Relative error of the norm."""
    return ((got - want).norm() / want.norm()).item()
