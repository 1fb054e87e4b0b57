"""Self-check of gated delta net by a provider (``patches.delta_net``): a layer's convolution and rule against one rank.

The reference is the token-by-token recurrence in float64. Checked are the outputs and the gradient of the projected
hidden states; as in ``attention_pass``, in calls with different numbers, differentiated in reverse order, and on packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from cp_plugin.attention.api import ContextParallel
from cp_plugin.megatron import runtime
from cp_plugin.megatron.patches import delta_net, packing
from cp_plugin.megatron.selfcheck.attention_pass import TOLERANCE, TOLERANCE_LINEAR, TOLERANCE_TF32

_CALLS = 2
_WEAKER = 6.0
"""Taken from alpha, so that decays are weak and states reach over several ranks."""


class _Call(NamedTuple):
    projected: Tensor
    """Of the whole sequence: ``[s, b, q + k + v + z + beta + alpha]``."""
    dout: Tensor
    mine: Tensor
    """Positions of this rank's tokens."""
    cp: ContextParallel
    bounds: Tensor | None


def delta_net_problems(layer: Any, tokens: int, packs: Sequence[PackedSeqParams], device: torch.device) -> list[str]:
    """Mismatches of one layer; tokens: of the whole sequence."""
    cp = runtime.between_layers(runtime.context_parallel(layer.pg_collection.cp, "linear"))
    dtype = layer.config.params_dtype
    calls = [_call(layer, cp, tokens, pack, number, device) for number, pack in enumerate((*[None] * _CALLS, *packs))]
    leaves = [call.projected[call.mine].to(dtype).requires_grad_() for call in calls]
    with torch.enable_grad():
        outs = [delta_net.attend(layer, c.cp, x, c.bounds)[0] for c, x in zip(calls, leaves, strict=True)]
        pairs = reversed(list(zip(calls, leaves, outs, strict=True)))
        grads = [torch.autograd.grad(out, x, call.dout[call.mine].to(dtype))[0] for call, x, out in pairs][::-1]
    allowed = TOLERANCE[dtype]
    if dtype == torch.float32:
        allowed = TOLERANCE_TF32 if device.type == "cuda" else TOLERANCE_LINEAR
    found: dict[str, str] = {}
    for call, out, grad in zip(calls, outs, grads, strict=True):
        wanted = _reference(layer, call)
        for name, got, want in zip(("outputs", "gradients"), (out, grad), wanted, strict=True):
            error = ((got.double() - want[call.mine]).norm() / want[call.mine].norm()).item()
            name = f"{'packed ' if call.bounds is not None else ''}gated delta net's {name}"
            if name not in found and not error <= allowed:  # true for NaN, too
                found[name] = f"{name} are off by {error:.1e} (relative; allowed {allowed:.0e})"
    return list(found.values())


def _call(
    layer: Any, cp: ContextParallel, tokens: int, pack: PackedSeqParams | None, number: int, device: torch.device
) -> _Call:
    generator = torch.Generator().manual_seed(40 + number)
    where, batch = packing.places(pack), 2 if pack is None else 1
    cp = packing.on_pack(cp, where, tokens)
    heads = layer.num_v_heads_local_tp
    width = 2 * (layer.qk_dim_local_tp + layer.v_dim_local_tp + heads)
    rounded = torch.randn(tokens, batch, width, generator=generator).to(layer.config.params_dtype)
    rounded[..., -heads:] -= _WEAKER
    dout = torch.randn(tokens, batch, heads, layer.value_head_dim, generator=generator).to(layer.config.params_dtype)
    bounds = None if pack is None else packing.bounds(pack, tokens)
    return _Call(rounded.double().to(device), dout.double().to(device), cp.positions(tokens, device), cp, bounds)


def _reference(layer: Any, call: _Call) -> tuple[Tensor, Tensor]:
    """Outputs and gradients of the whole sequence, in float64 on one rank."""
    x = call.projected.detach().requires_grad_()
    alone = ContextParallel("lasp2", group=None, backend="reference")
    with torch.enable_grad():
        out, _ = delta_net.attend(_in_float64(layer), alone, x, call.bounds, unit=delta_net.unit)
        (grad,) = torch.autograd.grad(out, x, call.dout)
    return out.detach(), grad


def _in_float64(layer: Any) -> Any:
    """What ``delta_net.attend`` reads of a layer, with wide weights."""
    names = ("qk_dim_local_tp", "v_dim_local_tp", "num_v_heads_local_tp", "key_head_dim", "use_qk_l2norm", "act_fn")
    values = {name: getattr(layer, name) for name in (*names, "num_value_heads", "num_key_heads")}

    def wide(weight: nn.Parameter | None) -> Tensor | None:
        return None if weight is None else weight.detach().double()

    conv = SimpleNamespace(weight=wide(layer.conv1d.weight), bias=wide(layer.conv1d.bias))
    return SimpleNamespace(**values, conv1d=conv, A_log=wide(layer.A_log), dt_bias=wide(layer.dt_bias))
