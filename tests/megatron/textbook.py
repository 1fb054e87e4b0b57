"""Megatron's only core attention for multi-latent attention (MLA) is Transformer Engine's: a textbook version."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from training import MODEL

MLA = MODEL.replace("--group-query-attention --num-query-groups 2 ", "") + (
    " --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 4 --v-head-dim 8"
)
YARN = "--rope-type yarn --rotary-scaling-factor 4 --mscale 0.7 --mscale-all-dim 0.3"


class Textbook(torch.nn.Module):
    """Causal attention under the data loader's mask; the documents of a pack one after the other."""

    def __init__(self, softmax_scale: float, **kwargs: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if packed_seq_params is not None:
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            documents = zip(*(x.unsqueeze(1).split(lengths) for x in (query, key, value)), strict=True)
            return torch.cat([self.forward(*document, None).squeeze(1) for document in documents])
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.scale
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        hidden = hidden if attention_mask is None else hidden | attention_mask
        return torch.einsum("bhqk,kbhd->qbhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).flatten(2)


def install() -> None:
    """Put it in the place of the core attention of Megatron's local layers, for the rest of the process."""
    from megatron.core.models.backends import LocalSpecProvider

    LocalSpecProvider.core_attention = lambda self: Textbook
