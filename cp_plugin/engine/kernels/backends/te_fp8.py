"""Transformer Engine's FP8 fused attention (cuDNN), per tile: Hopper and later, for ``--cp-fp8 compute``.

    forward    q, k, v, P -> out               e4m3         one power-of-two scale per tensor
    backward   dout -> dP -> dq, dk, dv        e5m2         q, k, v, P and out' are e4m3 again

Scales come from the layer's ``core.scaling``. With current scaling, q, k, v and dout use their own largest elements. TE
has no FP8 attention with current scaling on Hopper, where kernels cannot compute the scale of their outputs; here they
are given one: out is bounded by v's largest element up to the rounding of P, and dP, dq, dk and dv are scaled by the
previous step's report, or by bounds that are loose and rely on e5m2's range. Results are in the model's dtype; payloads
between ranks have their own scales (``engine.comm.payload``).

Statistics and out' as in ``te``; ``float8`` computes the same numerics on any device. Not measured on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.core.scaling import (
    E4M3,
    E5M2,
    IN_BACKWARD,
    P_SCALE,
    Extent,
    Scaling,
    bound_of_out,
    bounds,
    scale_for,
)
from cp_plugin.engine.core.spelling import spelled
from cp_plugin.engine.kernels import fused
from cp_plugin.engine.kernels.backends import te
from cp_plugin.engine.kernels.backends.sdpa import no_half_on_cuda
from cp_plugin.engine.kernels.backends.signatures import parameters

HOPPER = (9, 0)
_QKV = ("q", "k", "v")


@dataclass(frozen=True, slots=True)
class Library:
    """The parts of Transformer Engine's FP8 that are used."""

    te: te.Library
    quantizer: Any
    """TE's ``Float8Quantizer``."""
    types: dict[torch.dtype, Any]
    """torch's float8 types -> TE's."""


@dataclass(frozen=True, slots=True)
class TransformerEngineFp8:
    """TE's fused attention in FP8."""

    name: str = "te_fp8"
    packages: ClassVar = ("transformer-engine",)
    in_fp8: ClassVar = True
    any_diagonal: bool = False
    scaling: Scaling = field(default_factory=Scaling, compare=False)

    def unsupported(self, call: CallInfo) -> str | None:
        if reason := no_half_on_cuda("Transformer Engine's FP8 attention", call):
            return reason
        if te.must_be_deterministic():
            return "Transformer Engine's FP8 attention is not tested with deterministic algorithms"
        capability = torch.cuda.get_device_capability(call.device)
        if capability < HOPPER:
            shown, needed = (".".join(map(str, c)) for c in (capability, HOPPER))
            return f"FP8 attention needs compute capability {needed} (Hopper), and {call.device} has {shown}"
        return te.refusal(call, "FP8", query_arguments)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, diagonal: int, scores: Scores) -> tuple[Tensor, Tensor]:
        arguments = forward_arguments(self.scaling, te.tile_arguments(q, k, v, diagonal, scores))
        out, aux = load().te.forward(**arguments)[:2]
        self.scaling.record("out", arguments["o_quantizer"].amax)
        return _plain(out, q.dtype), te.log_sum_exp(out, aux[0], q, v, spelled("fp8", "comm"))

    def row_term(self, dout: Tensor, delta: Tensor) -> Tensor:
        (extent,) = fused.extents((dout,))
        rounded = fused.rounded(dout, self.scaling.scale("dout", extent.largest, E5M2), E5M2)
        return fused.out_from_delta(rounded, delta)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, term: Tensor, diagonal: int, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        arguments = backward_arguments(self.scaling, te.tile_arguments(q, k, v, diagonal, scores), dout, lse, term)
        grads = load().te.backward(**arguments)[:3]
        for role in IN_BACKWARD:
            self.scaling.record(role, arguments[f"{role}_quantizer"].amax)
        dq, dk, dv = (_plain(x, q.dtype) for x in grads)
        return dq, dk, dv


@cache
def load() -> Library:
    """Transformer Engine and its quantizers. ImportError if it is missing or does not import; TypeError for an
    unsupported version."""
    library = te.load()
    try:
        made = import_module("transformer_engine.pytorch.tensor.float8_tensor").Float8Quantizer
        types = import_module("transformer_engine.pytorch.constants").DType
        wanted = {"scale", "amax", "fp8_dtype", "rowwise", "columnwise"}
        missing = {*wanted - set(parameters(made)), *{"create_tensor_from_data"} - set(dir(made))}
        missing |= {"s_quantizer", "o_quantizer"} - set(parameters(library.forward.func))
        missing |= {"s_quantizer", "dp_quantizer", "dqkv_quantizer"} - set(parameters(library.backward.func))
        if missing:
            raise AttributeError(f"it lacks {', '.join(sorted(missing))}")
        return Library(te=library, quantizer=made, types={E4M3: types.kFloat8E4M3, E5M2: types.kFloat8E5M2})
    except (ImportError, AttributeError) as wrong:
        raise TypeError(
            f"Transformer Engine {library.version} is not a version whose FP8 attention this plugin can call (2.20 "
            f"is): {wrong}"
        ) from None


def quantizer(scale: Tensor, dtype: torch.dtype) -> Any:
    """TE's quantizer of one tensor with that scale."""
    amax = torch.zeros(1, dtype=torch.float32, device=scale.device)
    made, types = load().quantizer, load().types
    return made(scale=scale.reshape(1), amax=amax, fp8_dtype=types[dtype], rowwise=True, columnwise=False)


def quantized(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Any:
    """``x`` as TE's float8 tensor with that scale."""
    data = fused.quantize(x, scale, dtype).view(torch.uint8)
    return quantizer(scale, dtype).create_tensor_from_data(data, fake_dtype=x.dtype)


def forward_arguments(scaling: Scaling, tile: te.Arguments) -> te.Arguments:
    """Arguments of ``fused_attn_fwd`` that differ between tiles; records q, k and v."""
    extents = fused.extents([tile[role] for role in _QKV])
    for role, extent in zip(_QKV, extents, strict=True):
        scaling.record(role, extent.largest)
    return {
        **te.forward_arguments(tile),
        **_quantized(scaling, tile, extents),
        "o_quantizer": quantizer(scaling.scale("out", bound_of_out(extents[2]), E4M3), E4M3),
    }


def backward_arguments(scaling: Scaling, tile: te.Arguments, dout: Tensor, lse: Tensor, out: Tensor) -> te.Arguments:
    """Arguments of ``fused_attn_bwd`` that differ between tiles; records dout."""
    q, k, v = (tile[role] for role in _QKV)
    of_dout, *of_qkv, of_out = extents = fused.extents((dout, q, k, v, out))
    scaling.record("dout", of_dout.largest)
    rows = q.size(0) * (q.size(2) // k.size(2))
    limits = zip(IN_BACKWARD, bounds(*extents, rows, tile["attn_scale"]), strict=True)
    return {
        **te.backward_arguments(tile, dout, lse, out),
        **_quantized(scaling, tile, of_qkv),
        "o": quantized(out, E4M3, scale_for(of_out.largest, E4M3)),
        "d_o": quantized(dout, E5M2, scaling.scale("dout", of_dout.largest, E5M2)),
        **{f"{role}_quantizer": quantizer(scaling.scale(role, limit, E5M2), E5M2) for role, limit in limits},
    }


def query_arguments(call: CallInfo, causal: bool) -> te.Arguments:
    """``FusedAttentionParams`` that ask TE for an FP8 kernel for tiles of any size.

    The size asked for is odd, as of some striped tiles: before cuDNN 9.7 kernels took multiples of 128 tokens.
    """
    forward, backward = (load().types[t] for t in (E4M3, E5M2))
    return {
        **te.query_arguments(call, causal),
        **dict.fromkeys(("qkv_dtype", "o_dtype"), forward),
        **dict.fromkeys(("do_dtype", "dqkv_dtype"), backward),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), 2047),
    }


def _quantized(scaling: Scaling, tile: te.Arguments, extents: Sequence[Extent]) -> te.Arguments:
    scales = {role: scaling.scale(role, extent.largest, E4M3) for role, extent in zip(_QKV, extents, strict=True)}
    return {
        **{role: quantized(tile[role], E4M3, scale) for role, scale in scales.items()},
        "s_quantizer": quantizer(torch.full((), P_SCALE, device=tile["q"].device), E4M3),
        "fused_attention_backend": load().te.tables.FusedAttnBackend["FP8"],
    }


def _plain(x: Any, dtype: torch.dtype) -> Tensor:
    """A TE result as a plain tensor; only some versions return FP8 tensors."""
    return x.dequantize(dtype=dtype) if hasattr(x, "dequantize") and hasattr(x, "_scale_inv") else x.to(dtype)


BACKEND = TransformerEngineFp8()
