"""The part of the self-check that concerns packed documents: positions and attention must start anew with each.

document      0 0 0 0 0 1 1 1 1 1 1 1 1 ... 2 2 2        bounds that no layout and no chunk agrees with
RoPE's place  0 1 2 3 4 0 1 2 3 4 5 6 7 ... 0 1 2

No two calls have the same pack: what is kept of the bounds of an earlier one must not be used in the next.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from cp_plugin.megatron.layers.core_attention import CoreAttention
from cp_plugin.megatron.selfcheck.attention_pass import Call, compare, random_inputs
from cp_plugin.megatron.selfcheck.reference import softmax

_SEED = 10
"""Of the first pack: the calls without packing have seeds below."""


def packed_problems(module: CoreAttention, tokens: int, mine: Tensor, table: Tensor | None) -> list[str]:
    """What is wrong with a softmax core attention, or with RoPE, on packs of three documents.

    Args: as of ``attention_problems``; ``table``: rotary angles from the first position on, None without RoPE.
    """

    def call(number: int) -> Call:
        bounds = _bounds(tokens, number, mine.device)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        whole = random_inputs(module, tokens, mine.device, batch=1, seed=_SEED + number)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return module(q.squeeze(1), k.squeeze(1), v.squeeze(1), None, packed_seq_params=packed).unsqueeze(1)

        return Call(attend, softmax(module, mine, _documents(bounds)), whole, [x[mine] for x in whole])

    problems = [] if table is None else _rotary_problems(mine, table, _bounds(tokens, 0, mine.device))
    return problems + [f"packed {problem}" for problem in compare(module, call)]


def _bounds(tokens: int, number: int, device: torch.device) -> Tensor:
    return torch.tensor([0, 5 + 2 * number, tokens // 2 + 3 + number, tokens], dtype=torch.int32, device=device)


def _documents(bounds: Tensor) -> Tensor:
    """The number of each token's document."""
    return torch.repeat_interleave(torch.arange(bounds.numel() - 1, device=bounds.device), bounds.diff())


def _rotary_problems(mine: Tensor, table: Tensor, bounds: Tensor) -> list[str]:
    document = _documents(bounds)
    tokens = document.numel()
    place = torch.arange(tokens, device=mine.device) - bounds[document]
    x = torch.randn(tokens, 2, table.size(1), generator=torch.Generator().manual_seed(0)).to(mine.device)
    group = parallel_state.get_context_parallel_group()
    longest = int(bounds.diff().max())
    got = rope_utils._apply_rotary_pos_emb_thd(x[mine], bounds, table[:longest, None, None], cp_group=group)
    want = rope_utils._apply_rotary_pos_emb_bshd(x[:, None], table[place][:, None, None]).squeeze(1)
    return [] if torch.allclose(got, want[mine], atol=1e-6) else ["rope of packed documents differs"]
