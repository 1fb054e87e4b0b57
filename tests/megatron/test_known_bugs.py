"""Bugs that users of context parallelism have reported elsewhere, by the number of the report: not here.

Each is a way in which training went wrong with a plausible loss, or could not run. Wrong gradients (Megatron 1464, TE
1557) are what ``test_parity`` is about, resuming with another number of ranks (Megatron 1232, 1517) is in
``test_settings_in_checkpoint``, which mask works with what (TE 2052) in ``test_support``. Reports about parts that the
plugin does not touch (CUDA graphs, NCCL, upstream's own kernels) have no test.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from harness import train
from oracle import Case, Result, assert_close, errors
from parity import compare
from test_masks_in_training import PACKED, RESET, short_documents
from thread_ranks import on_threads, run

from cp_plugin import ContextParallel
from cp_plugin.attention.shift import shift
from cp_plugin.comm import Mesh, run_threads
from cp_plugin.methods import registry as providers
from cp_plugin.testing.launch import RankError

pytestmark = pytest.mark.usefixtures("adapter")

CP2 = "--context-parallel-size 2 --cp-provider"


def refused(flags: str, *messages: str, **how: Any) -> None:
    with pytest.raises(RankError) as raised:
        train(2, flags, **how)
    for message in messages:
        assert message in str(raised.value), str(raised.value)[-800:]


def test_megatron_6156_documents_are_masked_where_their_tokens_are() -> None:
    """Tokens were cut by sequence, and attended as if they had been cut by document."""
    want = train(1, RESET, prepare=short_documents)
    compare(train(2, f"{CP2} all_gather --cp-layout zigzag {PACKED}", prepare=short_documents), want, steps=1)


def test_megatron_4494_next_tokens_of_packed_documents() -> None:
    """Multi-token prediction shifted padded documents by their lengths without padding."""
    refused(f"{CP2} striped {PACKED} --mtp-num-layers 1", "--dataloader-inter-document-masking", "--mtp-num-layers 1")


@pytest.mark.parametrize("causal", [True, False])
def test_te_3331_padding_between_documents(causal: bool) -> None:
    """Padding after documents made outputs wrong, and different from run to run."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from cp_plugin.megatron.patches import packing

    real, padded = torch.tensor([0, 5, 12]), torch.tensor([0, 8, 20])
    packed = PackedSeqParams(
        cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded
    )
    bounds = packing.bounds(packed, 24)
    assert bounds.tolist() == [0, 5, 8, 15, 20, 24]
    case = Case(seq_length=24, heads=2, kv_heads=2, causal=causal, batch=1)
    q, k, v, _ = case.inputs()
    spoiled = [x.clone() for x in (k, v)]
    for x in spoiled:
        x[5:8] = 1e4  # padding of the first document
    cp = ContextParallel("striped")
    a = cp.attention(q, k, v, causal=causal, cu_seqlens=bounds)
    b = cp.attention(q, *spoiled, causal=causal, cu_seqlens=bounds)
    assert torch.equal(a[:5], b[:5]) and torch.equal(a[8:], b[8:])


def _no_groups() -> None:
    from cp_plugin.megatron import runtime

    runtime.forget_groups()
    runtime.register = lambda group, found: None


def test_bridge_2667_context_parallelism_is_never_silently_off() -> None:
    """A missing process group was taken for a group of one rank."""
    refused(f"{CP2} striped", "cp_plugin has no process groups for the context-parallel ranks", prepare=_no_groups)


def test_megatron_7452_offsets_count_once_in_the_norm_of_gradients() -> None:
    """The softmax offsets of tensor-parallel ranks counted as copies of each other, so that clipping was wrong."""
    from test_attention_module import _config

    from cp_plugin.megatron.layers import core_attention as attention

    offset = attention._softmax_offset(_config(softmax_type="learnable", use_cpu_initialization=True))
    assert isinstance(offset, torch.nn.Parameter) and offset.tensor_model_parallel is True


def _mask_the_first_half() -> None:
    """All tokens of rank 0 on contiguous tokens: the loss counts those of the second half only."""
    from megatron.core.datasets.gpt_dataset import MockGPTDataset

    get = MockGPTDataset.__getitem__

    def wrong(self: Any, index: int | None) -> dict[str, Any]:
        found = get(self, index)
        found["loss_mask"] = found["loss_mask"].clone()
        found["loss_mask"][: found["loss_mask"].numel() // 2] = 0
        return found

    MockGPTDataset.__getitem__ = wrong


def test_megatron_1764_a_rank_with_masked_tokens_only() -> None:
    """Its mean over no tokens was not a number. (And 673, 906: losses were scaled by the number of ranks.)"""
    want = train(1, "", prepare=_mask_the_first_half)
    compare(train(2, f"{CP2} ring --cp-layout contiguous", prepare=_mask_the_first_half), want, steps=1)


def test_bridge_2055_three_ranks() -> None:
    """On three context-parallel ranks the loss was three times that of one."""
    flags = "--seq-length 66 --max-position-embeddings 66"
    compare(
        train(3, f"--context-parallel-size 3 --cp-provider ring --cp-layout zigzag {flags}"), train(1, flags), steps=1
    )


def test_megatron_3959_the_loss_of_multi_token_prediction() -> None:
    """Its scale lacked the number of ranks, or counted each rank's own tokens. (And 7498.)"""
    flags = "--mtp-num-layers 1 --calculate-per-token-loss --eod-mask-loss"
    compare(train(2, f"{CP2} striped {flags}"), train(1, flags), steps=1)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_verl_4250_next_tokens_come_from_other_ranks(layout: str) -> None:
    """Labels were shifted inside each rank's part."""
    tokens = torch.arange(24).view(1, 24)

    def rank(mesh: Mesh) -> torch.Tensor:
        cp = ContextParallel("ring" if layout != "striped" else "striped", mesh=mesh, layout=layout)
        return cp.unshard(shift(cp, cp.shard(tokens, 1).float(), dim=1), 1)

    for found in run_threads(rank, {"cp": 4}):
        assert found[0].tolist() == [*range(1, 24), 0]


def test_megatron_5243_positions_of_packed_documents_begin_anew() -> None:
    """And 1473, 560, Bridge 1292: what cu_seqlens mean for RoPE. Documents of any length, 3 of them on 4 ranks."""
    want = train(1, RESET, prepare=short_documents)
    compare(
        train(4, f"--context-parallel-size 4 --cp-provider striped {PACKED}", prepare=short_documents), want, steps=1
    )


def test_megatron_4828_dropout_of_attention_is_refused() -> None:
    """All ranks drew the same mask."""
    flags = f"{CP2} striped --attention-dropout 0.1"
    refused(flags, "--attention-dropout 0.1: every context-parallel rank would draw the same mask")


def test_megatron_1669_no_token_is_dropped() -> None:
    """Seven tokens on two ranks became six."""
    refused(f"{CP2} ring --cp-layout zigzag --seq-length 62", "--seq-length 62 cannot be divided", "use 60 or 64")


@pytest.mark.parametrize("provider", providers.names())
def test_te_3248_no_token_sees_a_later_one(provider: str) -> None:
    """FP8 attention leaked the future: what comes after a token must not change a bit before it."""
    case = Case(seq_length=64, heads=8, kv_heads=8, causal=True, dtype=torch.bfloat16, batch=1)
    later = Changed(seq_length=64, heads=8, kv_heads=8, causal=True, dtype=torch.bfloat16, batch=1)
    a, b = (on_threads(provider, 4, x)[0].out for x in (case, later))
    assert torch.equal(a[:40], b[:40]) and not torch.equal(a[40:], b[40:])


class Changed(Case):
    """The same, with other tokens from the 40th on."""

    def inputs(self) -> tuple[torch.Tensor, ...]:
        changed = super().inputs()
        for x in changed[1:3]:
            x[40:] += 3
        return changed


def test_te_2541_a_learnable_sink_on_a_ring() -> None:
    """No kernel of the ring knew sinks; here no kernel has to."""
    case = Case(seq_length=64, heads=4, kv_heads=2, causal=True, sink=True)
    ranks = on_threads("ring", 4, case)
    assert_close(ranks[0]._replace(dsink=sum(r.dsink for r in ranks)), case.reference(), 1e-10, "ring")


@pytest.mark.parametrize("provider", providers.names())
def test_accelerate_4177_windows_stay_windows(provider: str) -> None:
    """Models with sliding windows trained with full causal attention."""
    case = Case(seq_length=64, heads=8, kv_heads=8, causal=True, window=(7, 0))
    assert_close(on_threads(provider, 4, case)[0], case.reference(), 1e-10, provider)


def test_megatron_5355_dynamic_context_parallelism_is_refused() -> None:
    """RoPE took the group of the whole run. (Also 3405, 6821, 6816.)"""
    refused(f"{CP2} striped --hybrid-context-parallel", "--hybrid-context-parallel")


def _two_part_loss() -> None:
    from cp_plugin.megatron.models import gpt

    loss = gpt.loss
    gpt.loss = lambda mask, output: (lambda total, tokens, report: (total / tokens, report))(*loss(mask, output))


def test_verl_6609_a_loss_of_two_parts_is_refused() -> None:
    """It was scaled by the number of ranks while the gradients were summed over tokens."""
    refused(f"{CP2} striped", "--calculate-per-token-loss", "tokens", prepare=_two_part_loss)


def test_automodel_3507_no_layer_is_left_out() -> None:
    """Three dense layers ran without context parallelism."""
    from test_startup import _foreign_attention

    refused(f"{CP2} striped", "does not run in every attention layer of this model: 0 of 2", prepare=_foreign_attention)


def test_mcore_bridge_48_all_of_megatrons_arguments_are_accepted() -> None:
    """A custom attention was built with a keyword that it did not know."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from cp_plugin.megatron.layers.core_attention import AnyCoreAttention, CoreAttention

    ours = set(inspect.signature(AnyCoreAttention.__init__).parameters)
    assert set(inspect.signature(DotProductAttention.__init__).parameters) <= ours
    stock, call = (set(inspect.signature(c.forward).parameters) for c in (DotProductAttention, CoreAttention))
    assert stock <= call


@pytest.mark.parametrize("provider", ["ring", "striped", "attention2d", "burst"])
def test_ring_flash_attention_42_the_error_does_not_grow_with_the_ring(provider: str) -> None:
    """Partial results were kept in bfloat16."""
    case = Case(seq_length=256, heads=2, kv_heads=2, causal=True, dtype=torch.bfloat16)
    want = case.reference()
    one = errors(run(ContextParallel("ring"), case), want)
    assert_close(on_threads(provider, 16, case)[0], want, Result(*(1.5 * e for e in one)), provider)
