"""Probe of ``GatedDeltaNet.forward``: a small layer on one rank, by Megatron's code for determinism, and by ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cp_plugin.attention.api import ContextParallel
from cp_plugin.megatron import compat
from cp_plugin.megatron.patches import delta_net, patching, stock
from cp_plugin.megatron.patches.probing import accepted, config, difference, numbers

_COMMON = "megatron.core.ssm.gated_delta_net.common"
LAYER = "megatron.core.ssm.gated_delta_net.gdn:GatedDeltaNet"
_TOKENS, _BATCH = 12, 2
_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LIMIT = 1e-4
_KERNELS = {"HAVE_FLA": True, "l2norm": lambda y, *_, **__: delta_net.unit(y)}


class _Linear(torch.nn.Linear):
    """As Megatron's, whose bias is returned apart."""

    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False, device=stock.device())

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class _Norm(torch.nn.RMSNorm):
    def __init__(self, *, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps, device=stock.device())


def forward(original: Callable[..., Any], _: Any) -> str | None:
    """Outputs, and gradients of the hidden states; documents and ranks are for the start-up self-check."""
    holder, layer_of_megatron = compat.find(LAYER)
    modules = {compat.find(delta_net.NORM)[0], holder}
    _, parts = compat.find(f"{_COMMON}:GatedDeltaNetSubmodules")
    settings = config(activation_func=F.silu, deterministic_mode=True, perform_initialization=False, **_SIZES)
    alone = ContextParallel("lasp2", group=None, backend="reference")
    with ExitStack() as stack:
        group = stack.enter_context(stock.alone())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in modules:  # the packages of kernels need not be there
            needed = {name: value for name, value in _KERNELS.items() if name in vars(module)}
            stack.enter_context(patching.lent(module, **needed))
        groups = SimpleNamespace(**dict.fromkeys(("tp", "cp", "tp_cp"), group))
        flags = accepted(layer_of_megatron, layer_number=1, pg_collection=groups)
        layer = layer_of_megatron(settings, parts(in_proj=_Linear, out_norm=_Norm, out_proj=_Linear), **flags)
        for number, parameter in enumerate(layer.parameters(), 1):
            parameter.data.copy_(numbers(*parameter.shape, number)[..., 0] / 2)
        hidden = numbers(_TOKENS, _BATCH, settings.hidden_size).to(stock.device()).requires_grad_()
        with torch.enable_grad():
            want, _bias = original(layer, hidden, None)
            got, _bias = delta_net.computed(layer, alone, layer.in_proj(hidden)[0], None, delta_net.unit)
            dout = numbers(*want.shape).to(want)
            grads = [torch.autograd.grad(out, hidden, dout)[0] for out in (want, got)]
    return difference("outputs", want, got, _LIMIT) or difference("gradients", *grads, _LIMIT)
