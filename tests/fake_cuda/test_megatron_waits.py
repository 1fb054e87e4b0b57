"""Packed RoPE as Megatron calls it: for queries and keys of every layer, on the device."""

from __future__ import annotations

import pytest
import torch
from device_cases import COPIES, RANK, RANKS, Peerless
from fake_device import CUDA, Start, once_warm
from torch import Tensor

from cp_plugin import ContextParallel

DOCUMENTS, TOKENS = (0, 5, 37, 64, 100), 128


@COPIES
@pytest.mark.parametrize("angles", [64, TOKENS], ids=["of one document", "of the whole pack"])
def test_packed_rope_waits_nowhere(gpu: Start, monkeypatch: pytest.MonkeyPatch, angles: int) -> None:
    from cp_plugin.megatron import packing, runtime

    device = gpu()
    cp = ContextParallel("ring", mesh=Peerless({"cp": RANKS}, RANK), layout="zigzag")
    monkeypatch.setattr(runtime, "context_parallel", lambda group=None, kind=None: cp)
    rope = packing.replace_apply_rotary_thd(lambda *_: None)
    bounds = torch.empty(len(DOCUMENTS), dtype=torch.int32, device=CUDA)
    freqs = torch.empty(angles, 1, 1, 32, device=CUDA)

    def layer() -> list[Tensor]:
        sides = [torch.empty(TOKENS // RANKS, heads, 64, dtype=torch.bfloat16, device=CUDA) for heads in (8, 2)]
        return [rope(t, bounds, freqs, cp_group=object()) for t in sides]

    turned = once_warm(device, layer)
    assert [tuple(t.shape) for t in turned] == [(TOKENS // RANKS, heads, 64) for heads in (8, 2)]
