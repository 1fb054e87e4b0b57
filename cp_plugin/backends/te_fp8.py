"""Transformer Engine's FP8 fused attention (cuDNN), tile by tile: Hopper and later, chosen by ``--cp-fp8 compute``.

    forward    q, k, v, P -> out               e4m3         one scale for each tensor, a power of two
    backward   dout -> dP -> dq, dk, dv        e5m2         q, k, v, P and out' e4m3 again

Where a scale comes from depends on who knows the tensor. What a call is given is scaled by its own largest element
(current scaling). P is 1 at most and has a fixed scale. out is at most v's largest element, but for the rounding of P.
dP, dq, dk and dv are known to the kernel alone, which reports their largest elements: they are scaled by what earlier
calls reported (delayed scaling), with room for four times as much. The first call takes bounds, which are far too
large but for e5m2's wide range. Scales are of one rank and need no reduction over ranks: what leaves a call is in the
model's dtype, and what travels between ranks has scales of its own (``cp_plugin.mesh.payload``). Since all are powers
of two, what was rounded to e4m3 on its way is not rounded again here.

The statistics are log-sum-exps of the whole row, and the backward takes delta from an out' that gives it, as in ``te``.
``float8`` computes the same numerics on any device. Not measured on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cp_plugin.backends import te
from cp_plugin.backends.float8 import E4M3, E5M2, P_SCALE, rounded, scale_for
from cp_plugin.backends.sdpa import is_causal
from cp_plugin.backends.signatures import parameters
from cp_plugin.backends.stand_in import out_from_delta

HOPPER = (9, 0)
_ROOM = 4.0
"""Of delayed scales, over the largest element that was reported."""
_FADING = 0.999
"""By which each call lowers what was reported before it."""


@dataclass(frozen=True, slots=True)
class Library:
    """What this plugin uses of Transformer Engine's FP8."""

    te: te.Library
    quantizer: Any
    """TE's ``Float8Quantizer``: a scale, a place for the largest element, a type."""
    types: dict[torch.dtype, Any]
    """torch's float8 types -> TE's."""


@dataclass(slots=True)
class Reported:
    """The largest elements that kernels reported of one kind of tensor, fading; on the device, never waited for."""

    largest: Tensor | None = None

    def scale(self, bound: Tensor) -> Tensor:
        """For the next call; ``bound``: no element can be larger."""
        return scale_for(bound if self.largest is None else torch.minimum(self.largest * _ROOM, bound), E5M2)

    def note(self, amax: Tensor) -> None:
        """What a call reported."""
        before = amax.new_zeros(()) if self.largest is None else self.largest * _FADING
        found = torch.where(amax.isfinite(), amax, 0.0).amax()
        self.largest = torch.maximum(before, found)


@dataclass(frozen=True, slots=True)
class TransformerEngineFp8:
    """TE's fused attention in FP8."""

    name: str = "te_fp8"
    any_diagonal: bool = False
    reported: dict[tuple[torch.device, str], Reported] = field(default_factory=dict, compare=False, repr=False)
    """(device, kind of tensor) -> what its kernels reported."""

    def unsupported(self, device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
        if device.type != "cuda":
            return "Transformer Engine's FP8 attention runs on CUDA devices only"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"Transformer Engine's FP8 attention takes bfloat16 and float16, not {dtype}"
        if te.must_be_deterministic():
            return "Transformer Engine's FP8 attention is not tested for deterministic backwards"
        capability = torch.cuda.get_device_capability(device)
        if capability < HOPPER:
            shown, needed = (".".join(map(str, c)) for c in (capability, HOPPER))
            return f"FP8 attention needs compute capability {needed} (Hopper), and {device} has {shown}"
        return _refusal(device, dtype, head_dim, v_head_dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, diagonal: int, scale: float) -> tuple[Tensor, Tensor]:
        library = load()
        if q.is_cuda:
            self._check_tile(q, k, v, is_causal(q, k, diagonal))
        out, aux = library.te.forward(**forward_arguments(library, q, k, v, is_causal(q, k, diagonal), scale))[:2]
        rows, batch, heads, _ = q.shape
        if aux[0].shape != (batch, heads, rows, 1) or out.shape != (rows, batch, heads, v.size(3)):
            raise RuntimeError(
                f"Transformer Engine {library.te.version} answers a q {tuple(q.shape)} with an out {tuple(out.shape)} "
                f"and statistics {tuple(aux[0].shape)}: not what this plugin knows; use --cp-fp8 comm"
            )
        return _plain(out, q.dtype), aux[0].squeeze(-1).permute(2, 0, 1)

    def _check_tile(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        sizes = (q.size(1), q.size(2), k.size(2), q.size(0), k.size(0))
        reason = _no_kernel(q.device, q.dtype, q.size(3), v.size(3), causal, sizes)
        if reason is not None:
            raise ValueError(f"--cp-fp8 compute cannot do this tile: {reason}; use --cp-fp8 comm")

    def row_term(self, dout: Tensor, delta: Tensor) -> Tensor:
        return out_from_delta(rounded(dout, E5M2).to(dout.dtype), delta)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, row_term: Tensor, diagonal: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        library, causal = load(), is_causal(q, k, diagonal)
        dp, grads = (self.reported.setdefault((q.device, kind), Reported()) for kind in ("dp", "grads"))
        bound_dp, bound_grads = bounds(dout, q, k, v, row_term, scale)
        given = backward_arguments(library, dout, q, k, v, lse, row_term, causal, scale)
        given["dp_quantizer"] = quantizer(library, dp.scale(bound_dp), E5M2)
        given["dqkv_quantizer"] = quantizer(library, grads.scale(bound_grads), E5M2)
        found = library.te.backward(**given)[:3]
        dp.note(given["dp_quantizer"].amax)
        grads.note(given["dqkv_quantizer"].amax)
        dq, dk, dv = (_plain(x, q.dtype) for x in found)
        return dq, dk, dv


@cache
def load() -> Library:
    """Transformer Engine and its quantisers.

    Raises:
        ImportError: if it is not there, or does not import; TypeError: if it is another version.
    """
    library = te.load()
    try:
        made = import_module("transformer_engine.pytorch.tensor.float8_tensor").Float8Quantizer
        types = import_module("transformer_engine.pytorch.constants").DType
        wanted = {"scale", "amax", "fp8_dtype", "rowwise", "columnwise"}
        missing = {*wanted - set(parameters(made)), *{"create_tensor_from_data"} - set(dir(made))}
        missing |= {"s_quantizer", "o_quantizer"} - set(parameters(library.forward.function))
        missing |= {"s_quantizer", "dp_quantizer", "dqkv_quantizer"} - set(parameters(library.backward.function))
        if missing:
            raise AttributeError(f"it lacks {', '.join(sorted(missing))}")
        return Library(te=library, quantizer=made, types={E4M3: types.kFloat8E4M3, E5M2: types.kFloat8E5M2})
    except (ImportError, AttributeError) as wrong:
        raise TypeError(
            f"Transformer Engine {library.version} is not a version whose FP8 this plugin can call (2.20 is): {wrong}"
        ) from None


def quantizer(library: Library, scale: Tensor, dtype: torch.dtype) -> Any:
    """TE's quantiser of one tensor with that scale."""
    amax = torch.zeros(1, dtype=torch.float32, device=scale.device)
    return library.quantizer(
        scale=scale.reshape(1), amax=amax, fp8_dtype=library.types[dtype], rowwise=True, columnwise=False
    )


def quantized(library: Library, x: Tensor, dtype: torch.dtype) -> Any:
    """``x`` as TE's float8 tensor, scaled by its own largest element."""
    x = x.contiguous()
    scale = scale_for(x.abs().amax().float(), dtype)
    elements = (x.float() * scale).to(dtype).view(torch.uint8)
    return quantizer(library, scale, dtype).create_tensor_from_data(elements, fake_dtype=x.dtype)


def bounds(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What no element of dP (P times dout v - delta), and none of dq, dk and dv, exceeds; float32, on the device.

    Rows of P add up to 1 at most, its columns to the number of rows that share a key head; delta is dout out. A tenth
    is for rounding.
    """
    rows = q.size(0) * (q.size(2) // k.size(2))
    dp = 1.1 * _longest(dout) * (_longest(v) + _longest(out))
    largest = torch.maximum(rows * _largest(q), _largest(k))
    return dp, torch.maximum(1.1 * scale * dp * largest, 1.1 * rows * _largest(dout))


def forward_arguments(library: Library, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> dict[str, Any]:
    """Everything that ``fused_attn_fwd`` is given for a tile, besides what is the same for all."""
    return {
        **te.forward_arguments(library.te, q, k, v, causal, scale),
        **_in_fp8(library, q, k, v),
        "o_quantizer": quantizer(library, scale_for(1.125 * _largest(v), E4M3), E4M3),
    }


def backward_arguments(
    library: Library,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    out: Tensor,
    causal: bool,
    scale: float,
) -> dict[str, Any]:
    """Everything that ``fused_attn_bwd`` is given for a tile, but for the quantisers of what only it knows."""
    return {
        **te.backward_arguments(library.te, dout, q, k, v, lse, out, causal, scale),
        **_in_fp8(library, q, k, v),
        "o": quantized(library, out, E4M3),
        "d_o": quantized(library, dout, E5M2),
    }


def query_arguments(
    library: Library, dtype: torch.dtype, head_dim: int, v_head_dim: int, causal: bool, sizes: tuple[int, ...] = ()
) -> dict[str, Any]:
    """The question whether TE has an FP8 kernel for such tiles, as ``FusedAttentionParams``.

    sizes: batch, query heads, key heads, rows and keys; without them those of a large tile.
    """
    names = ("batch_size", "num_attn_heads", "num_gqa_groups", "max_seqlen_q", "max_seqlen_kv")
    forward, backward = (library.types[t] for t in (E4M3, E5M2))
    return {
        **te.query_arguments(library.te, dtype, head_dim, v_head_dim, causal, deterministic=False),
        **dict.fromkeys(("qkv_dtype", "o_dtype"), forward),
        **dict.fromkeys(("do_dtype", "dqkv_dtype"), backward),
        **dict(zip(names, sizes, strict=False)),
    }


def _refusal(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
    try:
        load()
    except (ImportError, TypeError) as wrong:
        return str(wrong)
    found = (_no_kernel(device, dtype, head_dim, v_head_dim, causal) for causal in (False, True))
    return next((reason for reason in found if reason is not None), None)


@lru_cache(maxsize=1024)
def _no_kernel(
    device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int, causal: bool, sizes: tuple[int, ...] = ()
) -> str | None:
    library = load()
    asked = library.te.parameters(**query_arguments(library, dtype, head_dim, v_head_dim, causal, sizes))
    with torch.cuda.device(device):
        found, reason = library.te.query(asked)
    if found == library.te.tables.FusedAttnBackend["FP8"]:
        return None
    tile = f"{'causal' if causal else 'full'} tiles" + (f" of {sizes[3]} rows and {sizes[4]} keys" if sizes else "")
    return (
        f"Transformer Engine {library.te.version} has no FP8 kernel for {tile}, head sizes {head_dim}, {v_head_dim}: "
        f"{reason or 'it does not say why'}"
    )


def _in_fp8(library: Library, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    return {
        **{name: quantized(library, x, E4M3) for name, x in (("q", q), ("k", k), ("v", v))},
        "s_quantizer": quantizer(library, torch.full((), P_SCALE, device=q.device), E4M3),
        "fused_attention_backend": library.te.tables.FusedAttnBackend["FP8"],
    }


def _plain(x: Any, dtype: torch.dtype) -> Tensor:
    """A result of TE as a plain tensor: some versions return it in FP8, others do not."""
    return x.dequantize(dtype=dtype) if hasattr(x, "dequantize") and hasattr(x, "_scale_inv") else x.to(dtype)


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax().float()


def _longest(x: Tensor) -> Tensor:
    """The largest norm of a row, over all tokens and heads."""
    return x.float().square().sum(-1).amax().sqrt()
