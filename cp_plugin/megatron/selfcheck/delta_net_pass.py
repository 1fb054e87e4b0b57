"""Self-check of gated delta net by a provider (``patches.delta_net``): a layer's convolution and rule against one rank.

The reference is the token-by-token recurrence in float64. This checks the outputs and the gradient of the projected
hidden states; as in ``attention_pass``, in calls with different numbers, differentiated in reverse order, and on packs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.megatron import runtime
from cp_plugin.megatron.micro_batch import MicroBatch
from cp_plugin.megatron.patches import delta_net
from cp_plugin.megatron.selfcheck.attention_pass import Call, mismatches, tolerance

_CALLS = 2
_WEAKER = 6.0
"""Taken from alpha, so that decays are weak and states reach over several ranks."""


def delta_net_problems(layer: Any, tokens: int, packs: Sequence[PackedSeqParams], device: torch.device) -> list[str]:
    """Mismatches of one layer; tokens: of the whole sequence."""
    calls = [_call(layer, tokens, pack, number, device) for number, pack in enumerate((*[None] * _CALLS, *packs))]
    return mismatches(calls, tolerance(layer.config.params_dtype, device, linear=True))


def _call(layer: Any, tokens: int, pack: PackedSeqParams | None, number: int, device: torch.device) -> Call:
    """A call on projected hidden states ``[s, b, q + k + v + z + beta + alpha]``."""
    draw = torch.Generator().manual_seed(40 + number)
    dtype, heads = layer.config.params_dtype, layer.num_v_heads_local_tp
    rows, packed = (2, "") if pack is None else (1, "packed ")
    width = 2 * (layer.qk_dim_local_tp + layer.v_dim_local_tp + heads)
    projected = torch.randn(tokens, rows, width, generator=draw).to(dtype)
    projected[..., -heads:] -= _WEAKER
    dout = torch.randn(tokens, rows, heads, layer.value_head_dim, generator=draw)
    whole = [x.to(device, dtype) for x in (projected, dout)]
    cp = runtime.between_layers(runtime.context_parallel(layer.pg_collection.cp, "linear"))
    batch = MicroBatch.find(cp, pack, tokens)
    mine = batch.positions(device)

    def reference(x: Tensor, dout: Tensor) -> list[Tensor]:
        x, alone = x.detach().double().requires_grad_(), ContextParallel("lasp2", group=None, backend="reference")
        with torch.enable_grad():
            out, _ = delta_net.attend(_in_float64(layer), replace(batch, cp=alone), x, unit=delta_net.unit)
            (grad,) = torch.autograd.grad(out, x, dout.double())
        return [y.detach()[mine] for y in (out, grad)]

    return Call(
        attend=lambda x: delta_net.attend(layer, batch, x)[0],
        reference=reference,
        whole=whole,
        local=[x[mine] for x in whole],
        names=[f"{packed}gated delta net's {what} are" for what in ("outputs", "gradients")],
    )


def _in_float64(layer: Any) -> Any:
    """A layer with wide weights, of those that ``delta_net.attend`` reads."""
    twin = copy.copy(layer)
    twin._modules = {**layer._modules, "conv1d": copy.deepcopy(layer.conv1d).double()}
    twin._parameters = {name: weight.detach().double() for name, weight in layer._parameters.items()}
    return twin
