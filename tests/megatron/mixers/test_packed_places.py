"""Packed documents: bounds belong to the current micro-batch; and of their models what ``cases.toml`` cannot say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from feature_faults import PACKS as PACKED
from feature_faults import STRIPED, other_bounds_for_the_model
from torch import Tensor
from training import SHORT, compare, short_documents, stock, train

from cp_plugin import ContextParallel
from cp_plugin.engine.attention.packs import place_lengths
from cp_plugin.engine.comm import TraceMesh
from cp_plugin.engine.common.versions import version_tuple
from cp_plugin.megatron.patches.patching import megatron_version, original

packing = pytest.mark.skipif(version_tuple(megatron_version()) < (0, 19), reason="documents are packed since 0.19")
TOKENS = 24
PACK = [0, 0, 3, 8, 8, 20]
"""With empty documents, and padding at the end."""


def rotary(cp: ContextParallel, monkeypatch: pytest.MonkeyPatch) -> Any:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.patches import rope

    monkeypatch.setattr(runtime, "context_parallel", lambda group=None, kind=None: cp)
    patch = rope.replace_apply_rotary_thd
    return patch(original(patch.target))


def pack_of(*bounds: Tensor) -> Any:
    """Bounds of queries, keys, and both with padding."""
    from megatron.core.packed_seq_params import PackedSeqParams

    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return PackedSeqParams(**dict(zip(names, bounds, strict=False)))


def bounds_of(packed: Any, tokens: int = TOKENS) -> list[int]:
    from cp_plugin.megatron.micro_batch import MicroBatch

    bounds = MicroBatch.find(ContextParallel("ring", group=None), packed, tokens).bounds
    assert bounds is not None
    return bounds.tolist()


def angles(length: int) -> Tensor:
    return torch.rand(length, 1, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def turned(x: Tensor, places: Tensor, table: Tensor) -> Tensor:
    from megatron.core.models.common.embeddings import rope_utils

    return rope_utils._apply_rotary_pos_emb_bshd(x.unsqueeze(1), table[places]).squeeze(1)


def document_offsets(pack: list[int], longest: int) -> Tensor:
    """Positions inside the documents, token by token."""
    offsets = [t - max(start for start in pack if start <= t) for t in range(TOKENS)]
    return torch.tensor(offsets).clamp(max=longest - 1)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rope_begins_anew_in_each_document(layout: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = torch.tensor(PACK, dtype=torch.int32)
    x = torch.randn(TOKENS, 3, 12, dtype=torch.float64)
    for table, places in (
        (angles(11), document_offsets(PACK, 11)),
        (angles(TOKENS), torch.arange(TOKENS)),  # those of the whole pack
    ):
        want = turned(x, places, table)
        for index in range(size):
            cp = ContextParallel("all_gather", mesh=TraceMesh({"cp": size}, index), layout=layout)
            got = rotary(cp, monkeypatch)(cp.shard(x), bounds, table, cp_group=object())
            torch.testing.assert_close(got, cp.shard(want), rtol=0, atol=0)


def test_a_buffer_that_gets_the_next_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensor, the same shape, other documents; and two micro-batches in turn."""
    cp = ContextParallel("ring", mesh=TraceMesh({"cp": 2}, 1), layout="zigzag")
    apply, table, x = rotary(cp, monkeypatch), angles(19), torch.randn(TOKENS, 3, 12, dtype=torch.float64)
    buffer, other = torch.tensor([0, 5, 12, 24]), torch.tensor([0, 8, 9, 24])
    packed = pack_of(buffer, buffer)

    def check(bounds: Tensor, documents: list[int]) -> None:
        want = cp.shard(turned(x, document_offsets(documents, 19), table))
        torch.testing.assert_close(apply(cp.shard(x), bounds, table, cp_group=object()), want, rtol=0, atol=0)

    check(buffer, [0, 5, 12, 24])
    check(other, [0, 8, 9, 24])
    check(buffer, [0, 5, 12, 24])
    assert bounds_of(packed) == [0, 5, 12, 24]
    buffer.copy_(torch.tensor([0, 1, 22, 24]))
    check(buffer, [0, 1, 22, 24])
    assert bounds_of(packed) == [0, 1, 22, 24]
    buffer.data.copy_(torch.tensor([0, 3, 22, 24]))  # past the version counter, like a broadcast
    assert bounds_of(pack_of(buffer, buffer)) == [0, 3, 22, 24]
    with torch.inference_mode():  # without a version counter
        buffer = torch.tensor([0, 5, 24])
        packed = pack_of(buffer, buffer)
        assert bounds_of(packed) == [0, 5, 24]
        buffer[1] = 9
        assert bounds_of(packed) == [0, 9, 24]


def test_bounds_are_read_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from cp_plugin.megatron import micro_batch

    read, calls = micro_batch._same, []
    monkeypatch.setattr(micro_batch, "_same", lambda *pair: (calls.append(1), read(*pair))[1])
    bounds = torch.tensor([0, 5, 24])
    packed, other = (pack_of(b, b) for b in (bounds, bounds.clone()))
    for _ in range(3):
        assert bounds_of(packed) == bounds_of(other) == [0, 5, 24]
    assert len(calls) == 2 * 2, "without padding and with it"
    packed.cu_seqlens_q = packed.cu_seqlens_kv = torch.tensor([0, 7, 24])
    assert bounds_of(packed) == [0, 7, 24]
    assert bounds_of(packed, 2 * TOKENS) == [0, 7, 24, 48]
    assert len(calls) == 2 * 4


def test_a_batch_is_placed_by_its_padded_bounds() -> None:
    from cp_plugin.megatron.patches import batch

    cp = ContextParallel("needed", mesh=TraceMesh({"cp": 4}, 1), layout="documents")
    entries = {"tokens": torch.arange(TOKENS)[None], "cu_seqlens": torch.tensor([0, 5, 12])}
    padded = {"cu_seqlens_padded": torch.tensor([0, 8, 24])}
    for batch_of_rank, lengths in ((entries, [5, 7, 12]), (entries | padded, [8, 16])):
        placed = place_lengths(cp, lengths).shard(torch.arange(TOKENS))
        assert torch.equal(batch._slice(dict(batch_of_rank), cp, None)["tokens"][0], placed)


def padded_pack() -> Any:
    """Documents of 5 and 7 tokens in places for 8 and 12."""
    real, padded = torch.tensor([0, 5, 12]), torch.tensor([0, 8, 20])
    return pack_of(real, real, padded, padded)


def test_padding_is_a_document_of_its_own() -> None:
    assert bounds_of(padded_pack()) == [0, 5, 8, 15, 20, 24]


WIDE, NARROW = [0, 8, 16, 24], r"documents of \[8, 8, 8\] tokens are in places for \[5, .*: give their bounds"
OTHERS = r"queries and keys are packed differently: .*\[0, 8, 24\] and \[0, 9, 24\]"


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (([0, 8, 24], [0, 9, 24], [0, 8, 24], [0, 8, 24]), OTHERS),
        (([0, 8, 24], [0, 8, 24], [0, 8, 24], [0, 9, 24]), OTHERS),
        ((WIDE, WIDE, [0, 5, 12, 24], [0, 5, 12, 24]), NARROW),  # documents would overlap
        ((WIDE, WIDE, [0, 5, 24], [0, 5, 24]), NARROW),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(bounds: tuple[list[int], ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bounds_of(pack_of(*map(torch.tensor, bounds)))


@packing
@pytest.mark.usefixtures("adapter")
def test_experts_balance_each_sample_of_a_pack() -> None:
    """On one rank: two samples in a pack have the losses and gradients of two packs."""
    flags = f"{PACKED} --num-experts 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1"
    packed, alone = (
        stock(1, f"{flags} --micro-batch-size {size}", steps=2, prepare=short_documents) for size in (2, 1)
    )
    compare(packed, alone, steps=2)


@packing
@pytest.mark.usefixtures("adapter")
def test_a_pack_of_unknown_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron then does not tell Mamba where states restart; the tokens after the last document are one more."""
    from cp_plugin.megatron.micro_batch import MicroBatch
    from cp_plugin.megatron.mixers import mamba

    alone = ContextParallel("ring", group=None)
    packed = pack_of(torch.tensor([0, 5, 12]))
    assert packed.seq_idx is None
    monkeypatch.setattr(mamba, "batch_of", lambda tokens, size, packed: MicroBatch.find(alone, packed, tokens))
    mamba.replace_undo(original(mamba.REORDER))(torch.zeros(16, 1, 4), 2, packed)
    assert packed.seq_idx.tolist() == [5 * [1] + 7 * [2] + 4 * [3]]


@packing
@pytest.mark.usefixtures("adapter")
def test_layouts_that_do_not_place_documents_do_not_depend_on_their_bounds() -> None:
    train(2, f"{STRIPED} {PACKED}", documents=SHORT, prepare=other_bounds_for_the_model)
