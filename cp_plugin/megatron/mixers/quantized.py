"""Quantised core attention: what nvidia-modelopt makes of ``CoreAttention``. Imported only with modelopt installed.

    q, k, v --> q_bmm_quantizer, k_bmm_quantizer, v_bmm_quantizer --> CoreAttention

after RoPE and before communication. Names and states are those of modelopt's class for Transformer Engine's attention,
so configurations and checkpoints fit both. Fake quantisation is elementwise, with one scale (amax) per tensor or per
block of a token and head: independent of how tokens and heads are sharded, once all ranks have the same amax. So
calibration takes the maximum over tensor-, context- and data-parallel ranks. ``unsupported`` refuses everything else.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from modelopt.torch.opt.conversion import ModeloptStateManager
from modelopt.torch.quantization.calib import MaxCalibrator
from modelopt.torch.quantization.nn import QuantModule, SequentialQuantizer, TensorQuantizer
from modelopt.torch.quantization.plugins.custom import CUSTOM_POST_CONVERSION_PLUGINS
from modelopt.torch.utils.distributed import ParallelState
from torch import Tensor

from cp_plugin.megatron import runtime
from cp_plugin.megatron.mixers.core_attention import AnyCoreAttention
from cp_plugin.megatron.selfcheck import audit
from cp_plugin.megatron.state import STATE

NAMES = ("q_bmm_quantizer", "k_bmm_quantizer", "v_bmm_quantizer")
_REFUSED = {
    "softmax_quantizer": "probabilities",
    "p_bmm_quantizer": "probabilities",
    "bmm2_output_quantizer": "the product of probabilities and values",
}


class QuantCoreAttention(QuantModule):
    """modelopt converts modules in place to a subclass of this and ``CoreAttention``."""

    def _setup(self) -> None:
        for name in NAMES:
            setattr(self, name, TensorQuantizer())
        self.parallel_state = ParallelState(_all_ranks(self.cp_group))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *positional: Any, **named: Any) -> Tensor:
        """Attention of quantised q, k and v.

        Raises:
            ValueError: for a configuration whose meaning depends on the ranks, and as the base class does.
        """
        _refuse_other_quantizers(self)
        quantizers = [getattr(self, name) for name in NAMES]
        for name, quantizer in zip(NAMES, quantizers, strict=True):
            reason = unsupported(quantizer, query.dim())
            if reason is not None:
                raise ValueError(f"layer {self.layer_number}: {name} of {runtime.settings().flag}: {reason}")
        q, k, v = (quantize(x) for quantize, x in zip(quantizers, (query, key, value), strict=True))
        return super().forward(q, k, v, *positional, **named)

    def modelopt_post_restore(self, prefix: str = "") -> None:
        """Called when quantisers are rebuilt, before their states are loaded."""
        if any(state.numel() != 1 for name in NAMES for state in getattr(self, name).state_dict().values()):
            raise ValueError(f"{prefix}: {runtime.settings().flag} can only restore quantisers with a single amax")
        if hasattr(self, "device"):  # modelopt's note of the weights' device
            self.to(self.device)

    def get_extra_state(self) -> None:
        """Empty; its existence makes torch call the one that modelopt sets on the instance."""

    def set_extra_state(self, state: Any) -> None:
        """See ``get_extra_state``."""

    def _load_from_state_dict(self, *positional: Any, **named: Any) -> None:
        super(AnyCoreAttention, self)._load_from_state_dict(*positional, **named)  # which keeps the extra state


def unsupported(quantizer: torch.nn.Module, dims: int) -> str | None:
    """Why a quantiser of ``dims``-dimensional tensors would not compute what it does on one rank; None: it would."""
    if isinstance(quantizer, SequentialQuantizer):
        return next((reason for part in quantizer if (reason := unsupported(part, dims)) is not None), None)
    if not quantizer.is_enabled:
        return None
    axis, blocks, dynamic = _scales(quantizer, dims)
    across = [where for where in blocks if where != dims - 1]
    by_token = quantizer._dynamic and axis == tuple(range(dims - 1))
    calibrator = type(quantizer._calibrator)
    problems = {
        f"a custom backend ({quantizer.backend}): its treatment of tokens is unknown": quantizer.backend,
        "fake_quant False: attention needs real numbers": not quantizer.fake_quant,
        "a bias (affine quantisation): its mean would be that of this rank's tokens": quantizer.bias is not None,
        f"scales along the axis {axis}: use one scale, or one for each block of the last dimension": axis
        and not by_token,
        f"blocks along the dimensions {across}: they would span several tokens or heads": across,
        "static blocks: their amax would belong to positions in the calibration data": blocks and not dynamic,
        "a dynamic scale of the whole tensor: it would be that of this rank's tokens": dynamic
        and not blocks
        and not by_token,
        f"the calibrator {calibrator.__name__}: only a maximum can be combined across ranks": not dynamic
        and not issubclass(calibrator, MaxCalibrator),
    }
    return "; ".join(problem for problem, present in problems.items() if present) or None


def _scales(quantizer: torch.nn.Module, dims: int) -> tuple[tuple[int, ...] | None, dict[int, int], bool]:
    """Dimensions along which scales differ, block size by dimension, and whether scales are dynamic.

    A block of size None spans its dimension: on first use modelopt turns the other dimensions into the axis.
    """
    blocks = quantizer.block_sizes or {}
    sizes = {where % dims: size for where, size in blocks.items() if isinstance(where, int)}
    if sizes and not any(sizes.values()):
        return tuple(i for i in range(dims) if i not in sizes) or None, {}, quantizer._dynamic
    axis = (quantizer.axis,) if isinstance(quantizer.axis, int) else quantizer.axis
    return axis, sizes, quantizer._dynamic or blocks.get("type") == "dynamic"


def _all_ranks(cp_group: dist.ProcessGroup | None) -> dist.ProcessGroup | int:
    """The ranks that share this layer's amax: tensor, context and data parallel; -1: this one only."""
    group = parallel_state.get_tensor_and_data_parallel_group(check_initialized=False, with_context_parallel=True)
    if group is None:
        return -1
    ranks = dist.get_process_group_ranks(group)
    if cp_group is not None and not set(dist.get_process_group_ranks(cp_group)) <= set(ranks):
        raise ValueError(
            f"{runtime.settings().flag} cannot calibrate a layer whose context-parallel ranks are "
            f"{dist.get_process_group_ranks(cp_group)}: Megatron's tensor- and data-parallel ranks are {ranks}"
        )
    return group


def _converted(model: torch.nn.Module) -> None:
    """Called by modelopt when the model's modules are converted, before they are configured.

    ValueError for a model with other attention: quantisation scripts build models without the audit at start-up.
    """
    if not runtime.settings().active:
        return
    stage = parallel_state.get_pipeline_model_parallel_rank() if dist.is_initialized() else 0
    missed = audit.coverage([model], stage).missed
    if missed:
        raise ValueError(f"{runtime.settings().flag} does not run in every layer to quantise; missing in {missed[0]}")
    attentions = [module for module in model.modules() if isinstance(module, AnyCoreAttention)]
    for module in attentions:
        if isinstance(module, QuantCoreAttention):
            STATE.quantized[module] = weakref.ref(model)
    linear = [str(module.layer_number) for module in attentions if module.kind == "linear"]
    if linear:
        runtime.print_notice(
            f"layers {', '.join(linear)} have linear attention, which has no key/value cache: they get no "
            f"{', '.join(NAMES)}"
        )


def _refuse_other_quantizers(module: torch.nn.Module) -> None:
    """ValueError if the configuration enables quantisers inside attention, which this class does not have."""
    model = STATE.quantized.get(module, lambda: None)()
    if model is None or not ModeloptStateManager.is_converted(model):
        return
    switches: dict[str, bool] = {}
    for _, state in ModeloptStateManager(model).state_dict():
        for entry in state["config"].get("quant_cfg", ()):
            switches |= {name: entry.get("enable", True) for name in _REFUSED if name in entry["quantizer_name"]}
    inside = [f"{name} ({_REFUSED[name]})" for name, enabled in switches.items() if enabled]
    if inside:
        raise ValueError(
            f"{runtime.settings().flag} does not support {', '.join(inside)}: no kernel exposes these. Leave them out "
            f"of quant_cfg; supported are {', '.join(NAMES)}"
        )
    STATE.quantized.pop(module)


CUSTOM_POST_CONVERSION_PLUGINS.add(_converted)
