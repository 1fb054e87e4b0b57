"""Packed documents on one rank without a GPU: Megatron's own attention, one document after the other.

Its attention in plain torch takes no packs, which Megatron leaves to Transformer Engine.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from cp_plugin.megatron.patches.patching import Call, around


@around
def replace_dot_product_attention(call: Call) -> Tensor:
    """The replacement for ``DotProductAttention.forward``, for q ``[t, h, d]``, k and v ``[t, g, d]`` of a pack too.

    Padding behind a document is taken for its end, which no token before it sees.
    """
    packed = call.arguments.get("packed_seq_params")
    if packed is None:
        return call.original()
    q, k, v = (call[name] for name in ("query", "key", "value"))
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    of_each = []
    for begin, end in pairwise(sorted({*ends.tolist(), q.size(0)})):
        query, key, value = (x[begin:end].unsqueeze(1) for x in (q, k, v))
        of_each.append(call.original(query=query, key=key, value=value, packed_seq_params=None).squeeze(1))
    return torch.cat(of_each)
