"""Attention of packed documents in plain torch for Megatron on one rank: its own, for THD, needs Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def install() -> None:
    """Let the local spec build it; for a process that ends after its training."""
    from megatron.core.models import backends

    backends.LocalSpecProvider.core_attention = lambda self: PackedAttention


class PackedAttention(torch.nn.Module):
    """Causal, q ``[t, h, d]``, k and v ``[t, g, d]``, of documents that begin at ``cu_seqlens_q``, or where these are
    padded, which is at the end of each, at ``cu_seqlens_q_padded``; within the window of the layer, if it has one."""

    def __init__(self, config: Any, layer_number: int, *positional: Any, **named: Any) -> None:
        super().__init__()
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.left = config.window_size[0] if windowed else -1

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, packed_seq_params: Any, **unused: Any
    ) -> Tensor:
        places = torch.arange(query.size(0))
        real, padded = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_q_padded
        document = torch.bucketize(places, real if padded is None else padded, right=True)
        seen = (document[:, None] == document) & (places[:, None] >= places)
        if self.left >= 0:
            seen &= places[:, None] - places <= self.left
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)
