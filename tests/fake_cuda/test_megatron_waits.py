"""Megatron's calls beside attention on the device: packed RoPE, multi-token prediction, and layers with a state."""

from __future__ import annotations

import pytest
import torch
from equipment.cuda.calls import RANK, RANKS, Peerless
from equipment.cuda.device import CUDA, Start, once_warm
from torch import Tensor

from cp_plugin import ContextParallel

DOCUMENTS, TOKENS = (0, 5, 37, 64, 100), 128
layouts = pytest.mark.parametrize("layout", ["zigzag", "documents"])


@pytest.mark.parametrize("angles", [64, TOKENS], ids=["of one document", "of the whole pack"])
@layouts
def test_packed_rope_waits_nowhere(gpu: Start, monkeypatch: pytest.MonkeyPatch, angles: int, layout: str) -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.patches import patching, rope

    device = gpu()
    cp = ContextParallel("ring", mesh=Peerless({"cp": RANKS}, RANK), layout=layout)
    monkeypatch.setattr(runtime, "context_parallel", lambda group=None, kind=None: cp)
    rotary = rope.replace_apply_rotary_thd(patching.original(rope.replace_apply_rotary_thd.target))
    bounds = torch.empty(len(DOCUMENTS), dtype=torch.int32, device=CUDA)
    freqs = torch.empty(angles, 1, 1, 32, device=CUDA)

    def layer() -> list[Tensor]:
        sides = [torch.empty(TOKENS // RANKS, heads, 64, dtype=torch.bfloat16, device=CUDA) for heads in (8, 2)]
        return [rotary(t, bounds, freqs, cp_group=object()) for t in sides]

    turned = once_warm(device, layer)
    assert [tuple(t.shape) for t in turned] == [(TOKENS // RANKS, heads, 64) for heads in (8, 2)]


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@layouts
def test_masks_of_multi_token_prediction_wait_nowhere(gpu: Start, packed: bool, layout: str) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from cp_plugin.megatron.patches import mtp

    device = gpu()
    cp = ContextParallel("ring", mesh=Peerless({"cp": RANKS}, RANK), layout=layout)
    mask = torch.empty(1, TOKENS // RANKS, device=CUDA)
    bounds = torch.empty(4, dtype=torch.int32, device=CUDA)
    pack = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds) if packed else None
    first = once_warm(device, lambda: mtp._with_following(mask, 2, cp, pack))
    following = getattr(first, mtp._FOLLOWING)
    last = getattr(following, mtp._FOLLOWING)
    assert first.shape == following.shape == last.shape == mask.shape and last.sum().shape == ()


@layouts
def test_documents_of_layers_with_a_state_are_read_once_in_a_micro_batch(
    gpu: Start, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from cp_plugin.megatron.mixers import mamba
    from cp_plugin.megatron.mixers.gated_delta_net import replace_resolve_cu_seqlens
    from cp_plugin.megatron.patches.patching import original

    device = gpu()
    cp = ContextParallel("ring", mesh=Peerless({"cp": RANKS}, RANK), layout=layout)
    monkeypatch.setattr(mamba.runtime, "context_parallel", lambda: cp)
    undo = mamba.replace_undo(original(mamba.REORDER))
    resolve = replace_resolve_cu_seqlens(lambda self, cu_seqlens_padded, cu_seqlens_actual, total_seq_len: None)
    bounds = torch.empty(len(DOCUMENTS), dtype=torch.int32, device=CUDA)
    pack = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    x = torch.empty(TOKENS, 1, 8, device=CUDA)

    def layers() -> tuple[Tensor | None, Tensor, Tensor]:
        undo(x, RANKS, pack)
        return pack.seq_idx, *(resolve(None, None, side, TOKENS) for side in (pack.cu_seqlens_q, pack.cu_seqlens_kv))

    of_mamba, of_queries, of_keys = once_warm(device, layers)
    assert of_mamba is layers()[0] and of_queries is of_keys, "made again"
