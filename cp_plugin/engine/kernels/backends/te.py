"""Transformer Engine's fused attention (cuDNN), per tile: bfloat16 and float16 on CUDA.

Called below TE's modules, as TE's own context parallelism does (transformer_engine 2.20,
pytorch/attention/dot_product_attention/context_parallel.py). From there: the forward's statistics ``[b, h, s, 1]`` are
natural log-sum-exps, and the backward takes those over all keys of each row. The kernels take dense ``[s, b, h, d]``
tensors by address and ignore strides. The forward pass draws random numbers even without dropout, so it gets its own
generator, and tiles do not shift the model's.

Not measured on a GPU yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.core.spelling import spelled
from cp_plugin.engine.kernels.backends.sdpa import TakesOut, is_causal, no_half_on_cuda
from cp_plugin.engine.kernels.backends.signatures import bind

Arguments = dict[str, Any]
LAYOUT = "sbhd_sbhd_sbhd"
_SHARED = ("max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv", "q", "k", "v", "fake_dtype")
_SHARED = (*_SHARED, "fused_attention_backend", "attn_scale", "attn_mask_type")
_FORWARD = (*_SHARED, "is_training", "rng_gen")
_BACKWARD = (*_SHARED, "o", "d_o", "aux_ctx_tensors", "deterministic")
_OFF = dict(dropout=0.0, qkv_layout=LAYOUT, o_format="sbhd", attn_bias_type="no_bias", softmax_type="vanilla")


@dataclass(frozen=True, slots=True)
class Library:
    """The parts of Transformer Engine that are used."""

    version: str
    forward: partial[Any]
    backward: partial[Any]
    tables: Any
    """TE's module with names of layouts, masks and kernel kinds."""
    query: Callable[[Any], tuple[Any, str]]
    """``FusedAttentionParams`` -> the kernel kind that supports it, or why none does."""
    parameters: Callable[..., Any]
    dtypes: Any
    """torch's dtypes -> TE's."""


@dataclass(frozen=True, slots=True)
class TransformerEngine(TakesOut):
    """TE's fused attention in the model's precision."""

    name: str = "te"
    packages: ClassVar = ("transformer-engine",)

    def unsupported(self, call: CallInfo) -> str | None:
        reason = no_half_on_cuda("Transformer Engine's attention", call)
        return reason or refusal(call, "F16_arbitrary_seqlen", query_arguments)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, diagonal: int, scores: Scores) -> tuple[Tensor, Tensor]:
        out, statistics = load().forward(**forward_arguments(tile_arguments(q, k, v, diagonal, scores)))[:2]
        return out, log_sum_exp(out, statistics[0], q, v, spelled("backend", "sdpa"))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, term: Tensor, diagonal: int, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        tile = tile_arguments(q, k, v, diagonal, scores)
        dq, dk, dv, *_ = load().backward(**backward_arguments(tile, dout, lse, term))
        return dq, dk, dv


@cache
def load() -> Library:
    """Transformer Engine, if it is installed and has the expected functions. ImportError if it is missing or does not
    import; TypeError for an unsupported version."""
    if find_spec("transformer_engine") is None:
        raise ImportError("Transformer Engine is not installed: ci/gpu/build_te.sh builds it")
    title = f"Transformer Engine {version('transformer-engine')}"
    try:
        tables = import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
        utils = import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
        constants = import_module("transformer_engine.pytorch.constants")
        extension = import_module("transformer_engine_torch")
    except (ImportError, OSError, RuntimeError, AssertionError) as wrong:
        raise ImportError(
            f"{title} does not import: {wrong} (ci/gpu/build_te.sh --env sets its library path)"
        ) from wrong
    try:
        return Library(
            version=version("transformer-engine"),
            forward=bind(tables.fused_attn_fwd, _FORWARD, _OFF),
            backward=bind(tables.fused_attn_bwd, _BACKWARD, _OFF | {"do_format": "sbhd", "dqkv_layout": LAYOUT}),
            tables=tables,
            query=extension.get_fused_attn_backend,
            parameters=utils.FusedAttentionParams,
            dtypes=constants.TE_DType,
        )
    except (AttributeError, TypeError) as wrong:
        raise TypeError(f"{title} is not a version that this plugin can call (2.20 is): {wrong}") from None


def log_sum_exp(out: Any, statistics: Tensor, q: Tensor, v: Tensor, instead: str) -> Tensor:
    """``[s, b, h]`` of a forward's statistics; RuntimeError for results of unexpected shapes."""
    rows, batch, heads, _ = q.shape
    if statistics.shape != (batch, heads, rows, 1) or out.shape != (rows, batch, heads, v.size(3)):
        raise RuntimeError(
            f"Transformer Engine {load().version} returned an out {tuple(out.shape)} and statistics "
            f"{tuple(statistics.shape)} for a q {tuple(q.shape)}: not supported; use {instead}"
        )
    return statistics.squeeze(-1).permute(2, 0, 1)


def must_be_deterministic() -> bool:
    """Return True if torch or TE's environment variable requires deterministic backwards."""
    return torch.are_deterministic_algorithms_enabled() or os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"


def forward_arguments(tile: Arguments) -> Arguments:
    """Arguments of ``fused_attn_fwd`` that differ between tiles."""
    return {**tile, "is_training": True, "rng_gen": _generator(tile["q"].device)}


def backward_arguments(tile: Arguments, dout: Tensor, lse: Tensor, out: Tensor) -> Arguments:
    """Arguments of ``fused_attn_bwd`` that differ between tiles."""
    statistics = lse.permute(1, 2, 0).unsqueeze(-1).contiguous()
    rng_state = torch.empty(2, dtype=torch.int64, device=lse.device)  # unused without dropout
    return {
        **tile,
        "o": out.contiguous(),
        "d_o": dout.contiguous(),
        "aux_ctx_tensors": [statistics, rng_state],
        "deterministic": must_be_deterministic(),
    }


def query_arguments(call: CallInfo, causal: bool) -> Arguments:
    """``FusedAttentionParams`` that ask TE for a kernel for such tiles."""
    tables, te_dtype = load().tables, load().dtypes[call.dtype]
    return {
        "is_training": True,
        "deterministic": must_be_deterministic(),
        "attn_mask_type": tables.AttnMaskType[_mask(causal)],
        "bottom_right_diagonal": False,
        "attn_scale": call.head_dim**-0.5,
        **dict.fromkeys(("qkv_dtype", "o_dtype", "do_dtype", "dqkv_dtype"), te_dtype),
        **dict.fromkeys(("qkv_layout", "dqkv_layout"), tables.QKVLayout[LAYOUT]),
        **dict.fromkeys(("o_format", "do_format"), tables.QKVFormat["sbhd"]),
        "batch_size": 1,
        **dict.fromkeys(("num_attn_heads", "num_gqa_groups"), 8),
        "head_dim_qk": call.head_dim,
        "head_dim_v": call.v_head_dim,
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), 2048),
    }


def refusal(call: CallInfo, kind: str, ask: Callable[[CallInfo, bool], Arguments]) -> str | None:
    """Return why TE has no kernel of that kind for such full or causal tiles, or None.

    ask: makes ``query_arguments``; ImportError or TypeError: the library cannot be used.
    """
    try:
        library, questions = load(), {_mask(causal): ask(call, causal) for causal in (False, True)}
    except (ImportError, TypeError) as wrong:
        return str(wrong)
    for mask, question in questions.items():
        try:
            with torch.cuda.device(call.device):
                selected, reason = library.query(library.parameters(**question))
        except RuntimeError as wrong:
            return f"Transformer Engine {library.version} fails to select a kernel: {wrong}"
        if selected != library.tables.FusedAttnBackend[kind]:
            what = f"{mask}, {call.dtype}, head sizes {call.head_dim}, {call.v_head_dim}"
            name = "FP8 kernel" if kind == "FP8" else "kernel"
            return f"Transformer Engine {library.version} has no {name} for {what}: {reason or 'no reason given'}"
    return None


def row_offsets(batch: int, rows: int, device: torch.device) -> Tensor:
    """Cumulative lengths of a dense batch: int32 ``[batch + 1]``."""
    return torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device=device)


def tile_arguments(q: Tensor, k: Tensor, v: Tensor, diagonal: int, scores: Scores) -> Arguments:
    """Arguments of both directions."""
    return {
        "max_seqlen_q": q.size(0),
        "max_seqlen_kv": k.size(0),
        "cu_seqlens_q": row_offsets(q.size(1), q.size(0), q.device),
        "cu_seqlens_kv": row_offsets(k.size(1), k.size(0), k.device),
        "q": q.contiguous(),
        "k": k.contiguous(),
        "v": v.contiguous(),
        "fake_dtype": q.dtype,
        "fused_attention_backend": load().tables.FusedAttnBackend["F16_arbitrary_seqlen"],
        "attn_scale": scores.scale,
        "attn_mask_type": _mask(is_causal(q, k, diagonal)),
    }


def _mask(causal: bool) -> str:
    return "causal" if causal else "no_mask"


@cache
def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)


BACKEND = TransformerEngine()
