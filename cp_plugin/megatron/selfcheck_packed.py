"""The part of the self-check that concerns packed documents: positions and attention must start anew with each.

document      0 0 0 0 0 1 1 1 1 1 1 1 1 ... 2 2 2        bounds that no layout and no chunk agrees with
RoPE's place  0 1 2 3 4 0 1 2 3 4 5 6 7 ... 0 1 2
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from cp_plugin.megatron.attention import CoreAttention
from cp_plugin.megatron.selfcheck_attention import compare, random_inputs, softmax


def packed_problems(module: CoreAttention, tokens: int, mine: Tensor, table: Tensor | None) -> list[str]:
    """What is wrong with a softmax core attention, or with RoPE, on a pack of three documents.

    Args: as of ``attention_problems``; ``table``: rotary angles from the first position on, None without RoPE.
    """
    bounds = torch.tensor([0, 5, tokens // 2 + 3, tokens], dtype=torch.int32, device=mine.device)
    document = torch.bucketize(torch.arange(tokens, device=mine.device), bounds, right=True) - 1
    problems = []
    if table is not None:
        problems = _rotary_problems(mine, table, bounds, document)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    whole = random_inputs(module, tokens, mine.device, batch=1)
    reference = softmax(module, document)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module(q.squeeze(1), k.squeeze(1), v.squeeze(1), None, packed_seq_params=packed).unsqueeze(1)

    return problems + [f"packed {problem}" for problem in compare(module, attend, reference, whole, mine)]


def _rotary_problems(mine: Tensor, table: Tensor, bounds: Tensor, document: Tensor) -> list[str]:
    tokens = document.numel()
    place = torch.arange(tokens, device=mine.device) - bounds[document]
    x = torch.randn(tokens, 2, table.size(1), generator=torch.Generator().manual_seed(0)).to(mine.device)
    group = parallel_state.get_context_parallel_group()
    longest = int(bounds.diff().max())
    got = rope_utils._apply_rotary_pos_emb_thd(x[mine], bounds, table[:longest, None, None], cp_group=group)
    want = rope_utils._apply_rotary_pos_emb_bshd(x[:, None], table[place][:, None, None]).squeeze(1)
    return [] if torch.allclose(got, want[mine], atol=1e-6) else ["rope of packed documents differs"]
