"""Planted faults: each trains without an error, and the start-up self-check must find it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from fault_rows import Fault, Plant, instead, planted, ranks_of, replace_slicer
from feature_faults import ATTENTION, FEATURES, OUT, STEP, STRIPED, attend_in
from torch import Tensor
from training import SHORT, compare, stock, train

from cp_plugin import ContextParallel
from cp_plugin.engine.comm import Pending
from cp_plugin.testing.launch import RankError

pytestmark = pytest.mark.usefixtures("adapter")

HEAD_AXIS = "--context-parallel-size 4 --cp-provider striped --cp-head-parallel 2"
"""Rank 1 holds the tokens that the layout gives number 2, and rank 2 those of number 1."""
GRID = "--context-parallel-size 4 --cp-provider attention2d --cp-grid 2x2"
PACKED = f"{STRIPED} --dataloader-inter-document-masking"
LINEAR = "--context-parallel-size 2 --cp-linear-attention basic"

SLICER = "megatron.core.utils:get_batch_on_this_cp_rank"
BATCH = "cp_plugin.megatron.patches.batch:slice_batch"
ROPE = "megatron.core.models.common.embeddings.rotary_pos_embedding:get_pos_emb_on_this_cp_rank"
OF_PACKS = "cp_plugin.megatron.micro_batch:Documents.offset_of"
MESH = "cp_plugin.engine.comm:GroupMesh"


def stock_batch() -> None:
    from cp_plugin.megatron.patches import patching

    replace_slicer(patching.original(SLICER))


@instead(BATCH)
def batch_by_rank_number(slice_batch: Any, tensors: dict[str, Any], cp: ContextParallel) -> dict[str, Any]:
    numbers, cp.numbers = cp.numbers, tuple(range(cp.size))
    try:
        return slice_batch(tensors, cp)
    finally:
        cp.numbers = numbers


contiguous_rope = instead(ROPE, "contiguous_rope")(
    lambda _, emb, dim, group: emb.chunk(group.size(), dim)[group.rank()]
)
packed_rope_goes_on = instead(OF_PACKS, "packed_rope_goes_on")(  # the second document continues the first
    lambda _, documents, positions: positions
)


zigzag_attention = attend_in("zigzag", "ring", "softmax", "core_attention:CoreAttention")


@instead(f"{ATTENTION}.attention")
def wrong_key_gradient_on_rank_1(attend: Any, self: Any, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    if torch.distributed.get_rank() == 1:
        k.register_hook(lambda grad: 1.001 * grad)
    return attend(self, q, k, v, **kwargs)


def called_with(name: str, **changed: Any) -> Plant:
    """Call attention with other options than were asked for."""
    fault = instead(f"{ATTENTION}.attention", name)
    return fault(lambda attend, self, *args, **kw: attend(self, *args, **{**kw, **changed}))


def gradient(fault: str, name: str, factor: float) -> Plant:
    def wrong(backward: Any, self: Any, *args: Any) -> Any:
        grads = backward(self, *args)
        return None if grads is None else grads._replace(**{name: factor * getattr(grads, name)})

    return instead("cp_plugin.engine.methods.local:Local.backward", fault)(wrong)


sums_of_one_rank_lost = instead(f"{MESH}._reduce_scatter", "sums_of_one_rank_lost")(
    lambda reduce, self, axis, x: reduce(self, axis, tuple(t * (self.coordinates[axis] != 1) for t in x))
)


def keep_the_last(method: str, name: str) -> Plant:
    """Rank 1 attends with what its previous call received: a GPU buffer that is reused too soon."""
    last = dict[Any, Any]()

    def wrong(move: Any, self: Any, axis: str, tensors: Any, *ends: Any) -> Any:
        def swap(received: Any) -> Any:
            stale, last[shapes] = last.get(shapes, received), received
            return stale

        shapes = tuple(t.shape for t in tensors)
        pending = move(self, axis, tensors, *ends)
        stale = torch.distributed.get_rank() == 1 and self.ledger.current_phase == "forward"
        return Pending(lambda: swap(pending.wait())) if stale else pending

    return instead(f"{MESH}.{method}", name)(wrong)


received_in_the_call_before = keep_the_last("_exchange", "received_in_the_call_before")
states_of_the_call_before = keep_the_last("_all_gather", "states_of_the_call_before")


@planted("cp_plugin.engine.attention.softmax:attend")
def saved_for_the_backward_in_one_buffer(attend: Any) -> Any:
    """The output that a call saves for its backward is overwritten by the next call."""
    buffers = dict[Any, Tensor]()

    def wrong(*args: Any) -> Any:
        done = attend(*args)
        kept = buffers.setdefault(done.out.shape, torch.empty_like(done.out))
        kept.detach().copy_(done.out.detach())
        return done._replace(home=done.home.clone(), out=kept.data)

    return wrong


@planted("cp_plugin.megatron.micro_batch:Documents.bounds")
def bounds_of_the_first_pack(bounds: Any) -> Any:
    first = list[Tensor]()

    def wrong(documents: Any) -> Tensor:
        first.append(bounds.func(documents))
        return first[0]

    return property(wrong)


DQ = OUT.replace("out of", "dq of")
GRADIENTS = r"layer \d, gradients: head \d"
FAULTS = (
    Fault(stock_batch, STRIPED, "without slicing its batch"),
    Fault(batch_by_rank_number, HEAD_AXIS, STEP),
    Fault(contiguous_rope, STRIPED, STEP),
    Fault(packed_rope_goes_on, PACKED, STEP),
    Fault(called_with("wrong_scale", scale=1.01 / 4), STRIPED, f"rank 0: {OUT}"),
    Fault(wrong_key_gradient_on_rank_1, STRIPED, GRADIENTS),
    Fault(called_with("without cu_seqlens", cu_seqlens=None), PACKED, OUT),
    Fault(sums_of_one_rank_lost, GRID, GRADIENTS),
    Fault(received_in_the_call_before, STRIPED, f"rank 0: {GRADIENTS}.*rank 1: {OUT}"),
    Fault(states_of_the_call_before, LINEAR, f"rank 0: {GRADIENTS}.*rank 1: {OUT}"),
    Fault(saved_for_the_backward_in_one_buffer, STRIPED, f"rank 0: {DQ}"),
    Fault(bounds_of_the_first_pack, PACKED, f"rank 0: {OUT}"),
)


@pytest.mark.parametrize("fault", (*FAULTS, *FEATURES), ids=lambda fault: fault.name)
def test_the_self_check_finds_it(fault: Fault) -> None:
    with pytest.raises(RankError) as raised:
        train(ranks_of(fault.flags), fault.flags, steps=2, documents=SHORT, prepare=fault.plant)
    assert re.search(fault.error, str(raised.value)) is not None, str(raised.value)


def test_without_the_self_check_such_a_fault_trains_and_is_seen_in_gradients() -> None:
    with pytest.raises(AssertionError, match="gradient of"):
        compare(
            train(2, f"{STRIPED} --cp-selfcheck off", steps=1, prepare=zigzag_attention), stock(1, steps=1), steps=1
        )
