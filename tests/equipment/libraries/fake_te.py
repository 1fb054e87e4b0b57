"""A fake of Transformer Engine 2.20's fused attention: real parameter lists, bodies from the reference kernel.

It checks what the real kernels assume silently: dense ``[s, b, h, d]`` tensors, sequence offsets of a dense batch,
statistics ``[b, h, s, 1]`` in float32. ``tests/te`` holds the parameter lists equal to the real ones.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import pytest
import torch
from library_signatures import function, put, recorded
from torch import Tensor

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.kernels.backends import te
from cp_plugin.engine.kernels.backends.reference import Reference

FORWARD, BACKWARD = (recorded("te", "2.20.2", f"fused_attn_{end}") for end in ("fwd", "bwd"))
PARAMETERS = (
    "is_training=True, deterministic=False, attn_mask_type=None, bottom_right_diagonal=True, attn_scale=1.0, "
    "qkv_dtype=None, o_dtype=None, do_dtype=None, dqkv_dtype=None, qkv_layout=None, o_format=None, do_format=None, "
    "dqkv_layout=None, batch_size=0, num_attn_heads=0, num_gqa_groups=0, head_dim_qk=0, head_dim_v=0, max_seqlen_q=0, "
    "max_seqlen_kv=0"
)
"""The fields of ``FusedAttentionParams`` that the plugin sets."""

Call = dict[str, Any]


class Kinds(IntEnum):
    No_Backend = -1
    F16_arbitrary_seqlen = 1
    FP8 = 2


def forward(call: Call) -> tuple[Tensor, list[Tensor]]:
    """Out, and the statistics and generator state for the backward."""
    q, k, v = _checked(call, "q k v")
    assert call["is_training"] is True and isinstance(call["rng_gen"], torch.Generator)
    assert call["rng_gen"] is not torch.default_generator
    out, lse = Reference().forward(q, k, v, _diagonal(call), Scores(call["attn_scale"]))
    return out.contiguous(), [lse.permute(1, 2, 0).unsqueeze(-1).contiguous(), torch.zeros(2, dtype=torch.int64)]


def backward(call: Call) -> list[Any]:
    """dq, dk, dv, and None for absent inputs."""
    q, k, v, out, dout = _checked(call, "q k v o d_o")
    assert call["do_format"] == "sbhd" and call["dqkv_layout"] == "sbhd_sbhd_sbhd"
    statistics, rng_state = call["aux_ctx_tensors"]
    assert statistics.shape == (q.size(1), q.size(2), q.size(0), 1) and statistics.is_contiguous()
    assert statistics.dtype == torch.float32 and rng_state.dtype == torch.int64 and rng_state.numel() == 2
    delta = (dout.float() * out.float()).sum(-1)
    lse = statistics.squeeze(-1).permute(2, 0, 1)
    return [*Reference().backward(dout, q, k, v, lse, delta, _diagonal(call), Scores(call["attn_scale"])), None, None]


def _checked(call: Call, names: str) -> list[Tensor]:
    tensors = [call[name] for name in names.split()]
    for x in tensors:
        assert x.is_contiguous() and x.dtype == call["fake_dtype"] in (torch.bfloat16, torch.float16)
    q, k = call["q"], call["k"]
    for side, x in (("q", q), ("kv", k)):
        offsets = call[f"cu_seqlens_{side}"]
        assert call[f"max_seqlen_{side}"] == x.size(0) and offsets.dtype == torch.int32
        assert offsets.tolist() == [i * x.size(0) for i in range(x.size(1) + 1)]
    assert call["qkv_layout"] == "sbhd_sbhd_sbhd" and call["o_format"] == "sbhd"
    assert call["attn_bias_type"] == "no_bias" and call["softmax_type"] == "vanilla" and call["dropout"] == 0.0
    assert tuple(call["window_size"]) == (-1, -1) and not call["bottom_right_diagonal"]
    assert call["fused_attention_backend"] == Kinds.F16_arbitrary_seqlen
    assert not any(call[name] is not None for name in call if name.endswith("_quantizer"))
    return tensors


def _diagonal(call: Call) -> int:
    return {"causal": 0, "no_mask": call["max_seqlen_kv"] - 1}[call["attn_mask_type"]]


def install(patch: pytest.MonkeyPatch, forward_list: str = FORWARD, **other: Any) -> list[Call]:
    """Put it in the place of the real package; returns the questions it is asked about its kernels.

    other: attributes of TE's modules that are not as here; None: not there.
    """
    questions: list[Call] = []

    def query(parameters: Call) -> tuple[Kinds, str]:
        questions.append(parameters)
        return (Kinds.F16_arbitrary_seqlen, "") if parameters["head_dim_qk"] <= 256 else (Kinds.No_Backend, "too large")

    masks, layouts, formats = ({n: n for n in names} for names in (("causal", "no_mask"), (te.LAYOUT,), ("sbhd",)))
    tables = {"AttnMaskType": masks, "QKVLayout": layouts, "QKVFormat": formats, "FusedAttnBackend": Kinds}
    tables["fused_attn_fwd"] = function("fused_attn_fwd", forward_list, forward)
    tables["fused_attn_bwd"] = function("fused_attn_bwd", BACKWARD, backward)
    content: dict[str, Call] = {
        "transformer_engine": {},
        "transformer_engine.pytorch.cpp_extensions.fused_attn": tables,
        "transformer_engine.pytorch.attention.dot_product_attention.utils": {
            "FusedAttentionParams": function("FusedAttentionParams", PARAMETERS, dict)
        },
        "transformer_engine.pytorch.constants": {"TE_DType": {torch.bfloat16: "bf16", torch.float16: "fp16"}},
        "transformer_engine_torch": {"get_fused_attn_backend": query},
    }
    for name, attributes in content.items():
        there = {n: other.get(n, value) for n, value in attributes.items()}
        put(patch, name, **{n: value for n, value in there.items() if value is not None})
    patch.setattr(te, "version", lambda name: "2.20.2")
    forget()
    return questions


def forget() -> None:
    """Make the adapter look for the library again."""
    te.load.cache_clear()
