"""Planted faults: each makes training go wrong without an error, and the self-check must find every one of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from harness import train
from nightly import slow
from torch import Tensor

from cp_plugin import ContextParallel
from cp_plugin.attention.tokens import segments_of
from cp_plugin.comm import Pending
from cp_plugin.testing.launch import RankError

pytestmark = pytest.mark.usefixtures("adapter")

STRIPED = "--context-parallel-size 2 --cp-provider striped"
HEAD_AXIS = "--context-parallel-size 4 --cp-provider striped --cp-head-parallel 2"
"""Rank 1 holds the tokens that the layout gives number 2, and rank 2 those of number 1."""
GRID = "--context-parallel-size 4 --cp-provider attention2d --cp-grid 2x2"
BURST = "--context-parallel-size 2 --cp-provider burst --cp-backward q"
WINDOW = f"{STRIPED} --window-size 3,0"
SINK = f"{STRIPED} --softmax-type learnable"
PACKED = f"{STRIPED} --dataloader-inter-document-masking"
LINEAR = "--context-parallel-size 2 --cp-linear-attention basic"
SECOND = "in the second call alone"

# -- the batch


def _replace_slicer(slicer: Callable[..., Any]) -> None:
    """Everywhere where it is imported, as another extension might."""
    from cp_plugin.megatron.patches import patching

    ours = sys.modules["megatron.core.utils"].get_batch_on_this_cp_rank
    for module, name in patching._holders([ours])[id(ours)]:
        setattr(module, name, slicer)


def _stock_batch() -> None:
    """The batch is cut by Megatron's own function, in zigzag."""
    from cp_plugin.megatron.patches import patching

    _replace_slicer(patching.original("megatron.core.utils:get_batch_on_this_cp_rank"))


def _stock_batch_in_the_script() -> None:
    """A script that came by Megatron's own function in a way the plugin does not know of."""
    from cp_plugin.megatron.patches import patching

    main = sys.modules["__main__"]
    main.get_batch_on_this_cp_rank = patching.original("megatron.core.utils:get_batch_on_this_cp_rank")


def _batch_by_rank_number() -> None:
    from cp_plugin.megatron.patches import batch

    slice_batch = batch.slice_batch

    def wrong(tensors: dict[str, Any], cp: ContextParallel) -> dict[str, Any]:
        numbers, cp.numbers = cp.numbers, tuple(range(cp.size))
        try:
            return slice_batch(tensors, cp)
        finally:
            cp.numbers = numbers

    batch.slice_batch = wrong


def _one_key(key: str) -> Callable[[], None]:
    """One part of the batch is cut in halves, the others by the layout."""

    def plant() -> None:
        from cp_plugin.megatron.patches import batch

        slice_batch = batch.slice_batch

        def wrong(tensors: dict[str, Any], cp: ContextParallel) -> dict[str, Any]:
            half = tensors[key].chunk(cp.size, 1)[cp.index]
            return slice_batch(tensors, cp) | {key: half}

        batch.slice_batch = wrong

    plant.__name__ = f"{key} in halves"
    return plant


# -- RoPE


def _contiguous_rope() -> None:
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    def slice_rope(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
        return pos_emb.chunk(cp_group.size(), seq_dim)[cp_group.rank()]

    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = slice_rope


def _rope_by_rank_number() -> None:
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    from cp_plugin.megatron import runtime

    def slice_rope(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
        cp = runtime.context_parallel(cp_group)
        return cp.layout.shard(pos_emb, seq_dim, cp.size, cp.index)

    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = slice_rope


def _rope_begins_at_1() -> None:
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    slice_rope = rotary_pos_embedding.get_pos_emb_on_this_cp_rank
    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = lambda emb, dim, group: slice_rope(emb.roll(1, dim), dim, group)


def _packed_rope_goes_on() -> None:
    """The second document's positions follow those of the first."""
    from megatron.core.models.common.embeddings import rope_utils

    apply = rope_utils._apply_rotary_pos_emb_thd

    def wrong(t: Tensor, cu_seqlens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return apply(t, cu_seqlens[[0, -1]], *args, **kwargs)

    rope_utils._apply_rotary_pos_emb_thd = wrong


# -- attention


def _zigzag_attention() -> None:
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.layers import core_attention as attention

    def wrong(self: Any) -> ContextParallel:
        return ContextParallel("ring", mesh=runtime.context_parallel().mesh, layout="zigzag")

    attention.CoreAttention.context_parallel = property(wrong)


def _wrong_scale() -> None:
    attend = ContextParallel.attention

    def attention(self: ContextParallel, *args: Any, scale: float | None, **kwargs: Any) -> Tensor:
        return attend(self, *args, scale=1.01 * 16**-0.5, **kwargs)

    ContextParallel.attention = attention


def _wrong_key_gradient_on_rank_1() -> None:
    attend = ContextParallel.attention

    def attention(self: ContextParallel, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        if torch.distributed.get_rank() == 1:
            k.register_hook(lambda grad: 1.001 * grad)
        return attend(self, q, k, v, **kwargs)

    ContextParallel.attention = attention


def _attention_by_rank_number() -> None:
    """Its tiles are those of other tokens than the rank has."""

    def wrong(self: ContextParallel, seq_length: int, owners: Any) -> Any:
        return segments_of(self.layout, tuple(range(self.size)), seq_length, owners(self.index))

    ContextParallel.segments = wrong


def _without(option: str, value: Any = None) -> Callable[[], None]:
    """Attention is called as if the option had not been asked for."""

    def plant() -> None:
        attend = ContextParallel.attention

        def attention(self: ContextParallel, *args: Any, **kwargs: Any) -> Tensor:
            return attend(self, *args, **{**kwargs, option: value})

        ContextParallel.attention = attention

    plant.__name__ = f"without {option}"
    return plant


def _last_tile_dropped() -> None:
    from cp_plugin.kernels.blocks import Tiled

    found = Tiled.tiles
    Tiled.tiles = lambda self, block: found(self, block)[:-1]


def _masks_shifted_by_one() -> None:
    """Every query sees the token after itself."""
    from cp_plugin.attention import api as attention
    from cp_plugin.core import mask

    of = mask.Mask.of
    attention.Mask.of = lambda causal, *rest: mask.Mask(of(causal, *rest).left, 1)


def _gradients(change: Callable[[Any], Any]) -> None:
    from cp_plugin.methods.local import Local

    backward = Local.backward

    def wrong(self: Any, *args: Any) -> Any:
        found = backward(self, *args)
        return None if found is None else change(found)

    Local.backward = wrong


def _value_gradient_doubled() -> None:
    _gradients(lambda found: found._replace(dv=2 * found.dv))


def _query_gradient_negated() -> None:
    _gradients(lambda found: found._replace(dq=-found.dq))


def _log_sum_exp_ignored_in_merging() -> None:
    """Partial results are averaged."""
    from cp_plugin.kernels import fused

    fused._weight = lambda part, whole: torch.full_like(part, 0.5).unsqueeze(-1)


def _in_transit(verb: str, change: Callable[[Tensor], Tensor]) -> None:
    from cp_plugin.comm import GroupMesh

    send = getattr(GroupMesh, verb)

    def wrong(self: Any, axis: str, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return send(self, axis, tuple(change(t) for t in tensors), *args, **kwargs)

    setattr(GroupMesh, verb, wrong)


def _halves_swapped_in_transit() -> None:
    _in_transit("_exchange", lambda t: t.roll(t.size(0) // 2, 0))


def _rounded_in_transit() -> None:
    """To bfloat16, as a careless saving of bytes would."""
    _in_transit("_exchange", lambda t: t.bfloat16().to(t.dtype))


def _gathered_in_the_wrong_order() -> None:
    from cp_plugin.comm import GroupMesh

    gather = GroupMesh._all_gather

    def wrong(self: Any, axis: str, tensors: Any) -> Any:
        n = self.axes[axis]
        return gather(self, axis, tensors).then(lambda t: torch.cat(t.chunk(n)[::-1]))

    GroupMesh._all_gather = wrong


def _sums_of_one_rank_lost() -> None:
    from cp_plugin.comm import GroupMesh

    reduce = GroupMesh._reduce_scatter

    def wrong(self: Any, axis: str, tensors: Any) -> Any:
        lost = 0 if self.coordinates[axis] == 1 else 1
        return reduce(self, axis, tuple(t * lost for t in tensors))

    GroupMesh._reduce_scatter = wrong


def _received_in_the_call_before() -> None:
    """Rank 1 attends with the keys and values of its call before: a buffer that is used again too soon, on a GPU."""
    from cp_plugin.comm import GroupMesh

    exchange, before = GroupMesh._exchange, dict[Any, Any]()

    def wrong(self: Any, axis: str, tensors: Any, *ends: Any) -> Any:
        pending = exchange(self, axis, tensors, *ends)
        if torch.distributed.get_rank() != 1 or self.ledger.current_phase != "forward":
            return pending
        shapes = tuple(t.shape for t in tensors)

        def stale() -> Any:
            received = pending.wait()
            found, before[shapes] = before.get(shapes, received), received
            return found

        return Pending(stale)

    GroupMesh._exchange = wrong


def _states_of_the_call_before() -> None:
    """The same of the states of linear attention."""
    from cp_plugin.comm import GroupMesh

    gather, before = GroupMesh._all_gather, dict[Any, Any]()

    def wrong(self: Any, axis: str, tensors: Any) -> Any:
        found = gather(self, axis, tensors).wait()
        stale = torch.distributed.get_rank() == 1 and self.ledger.current_phase == "forward"
        shapes = tuple(t.shape for t in tensors)
        kept, before[shapes] = before.get(shapes, found), found
        return Pending.done(kept if stale else found)

    GroupMesh._all_gather = wrong


def _saved_for_the_backward_in_one_buffer() -> None:
    """The output that a call keeps for its backward is overwritten by the next call."""
    from cp_plugin.attention import softmax

    attend, buffers = softmax.attend, dict[Any, Tensor]()

    def wrong(*args: Any) -> Any:
        done = attend(*args)
        kept = buffers.setdefault(done.out.shape, torch.empty_like(done.out))
        kept.detach().copy_(done.out.detach())
        return done._replace(home=done.home.clone(), out=kept.data)

    softmax.attend = wrong


def _bounds_of_the_first_pack() -> None:
    """Documents are looked up once."""
    from cp_plugin.megatron.patches import packing

    bounds, first = packing.bounds, list[Tensor]()

    def wrong(packed: Any, tokens: int) -> Tensor:
        first.append(bounds(packed, tokens))
        return first[0]

    packing.bounds = wrong


def _sinks_of_other_heads() -> None:
    from cp_plugin.attention import sinks

    apply = sinks.apply
    sinks.apply = lambda out, lse, sink: apply(out, lse, sink.roll(1) + 0.5)


class Fault(NamedTuple):
    plant: Callable[[], None]
    flags: str
    found: str
    """What the self-check says."""
    alike: bool = False
    """It is found where another one is, and so not planted by day."""


FAULTS = (
    Fault(_stock_batch, STRIPED, r"rank 0: tokens differ; labels differ; loss_mask .*; position_ids .* \| rank 1"),
    Fault(_stock_batch_in_the_script, STRIPED, "rank 0: module __main__ holds a get_batch_on_this_cp_rank of its own"),
    Fault(_batch_by_rank_number, HEAD_AXIS, r"rank 1: tokens differ; labels differ; .* \| rank 2"),
    Fault(_one_key("labels"), STRIPED, "failed. rank 0: labels differ", alike=True),
    Fault(_one_key("loss_mask"), STRIPED, "failed. rank 0: loss_mask differ"),
    Fault(_one_key("position_ids"), STRIPED, "failed. rank 0: position_ids differ", alike=True),
    Fault(_contiguous_rope, STRIPED, r"rank 0: rope differs; out is off by .* \| rank 1: rope differs"),
    Fault(_rope_by_rank_number, HEAD_AXIS, r"rank 1: rope differs; out is off by .* \| rank 2: rope differs"),
    Fault(_rope_begins_at_1, STRIPED, "rank 0: rope differs", alike=True),
    Fault(_packed_rope_goes_on, PACKED, "rope of packed documents differs"),
    Fault(_zigzag_attention, STRIPED, "rank 0: out is off by"),
    Fault(_wrong_scale, STRIPED, "rank 0: out is off by .*dq is off by .*dk is off by"),
    Fault(_wrong_key_gradient_on_rank_1, STRIPED, r"failed. rank 1: dk is off by 1.0e-03 \(relative; allowed 1e-05\)"),
    Fault(_attention_by_rank_number, HEAD_AXIS, r"rank 1: out is off by .*; dq is off by .* \| rank 2: out is off by"),
    Fault(_without("causal", False), STRIPED, "rank 0: out is off by", alike=True),
    Fault(_without("window"), WINDOW, "rank 0: out is off by"),
    Fault(_without("sink"), SINK, "rank 0: out is off by"),
    Fault(_without("cu_seqlens"), PACKED, "packed out is off by"),
    Fault(_last_tile_dropped, STRIPED, "out is off by", alike=True),
    Fault(_masks_shifted_by_one, STRIPED, "out is off by", alike=True),
    Fault(_value_gradient_doubled, STRIPED, r"failed. rank 0: dv is off by 1.0e\+00", alike=True),
    Fault(_query_gradient_negated, STRIPED, r"failed. rank 0: dq is off by \d.\de\+00", alike=True),
    Fault(_log_sum_exp_ignored_in_merging, STRIPED, "out is off by"),
    Fault(_halves_swapped_in_transit, STRIPED, "out is off by", alike=True),
    Fault(_rounded_in_transit, STRIPED, "out is off by .*e-03", alike=True),
    Fault(_rounded_in_transit, BURST, "dq is off by .*e-03"),
    Fault(_gathered_in_the_wrong_order, GRID, "out is off by", alike=True),
    Fault(_sums_of_one_rank_lost, GRID, "dk is off by"),
    Fault(_sinks_of_other_heads, SINK, "out is off by", alike=True),
    Fault(_received_in_the_call_before, STRIPED, rf"rank 1: out is off by \S+ {SECOND}"),
    Fault(_received_in_the_call_before, PACKED, rf"rank 1: out .*; packed out is off by \S+ {SECOND}"),
    Fault(_states_of_the_call_before, LINEAR, rf"rank 1: linear out is off by \S+ {SECOND}"),
    Fault(_saved_for_the_backward_in_one_buffer, STRIPED, r"failed. rank 0: dq is off by \S+ \(relative"),
    Fault(_bounds_of_the_first_pack, PACKED, rf"failed. rank 0: packed out is off by \S+ {SECOND}"),
)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=slow if fault.alike else ()) for fault in FAULTS],
    ids=lambda fault: f"{fault.plant.__name__.strip('_')}-{fault.flags.split()[3]}",
)
def test_the_self_check_finds_it(fault: Fault) -> None:
    with pytest.raises(RankError) as raised:
        train(int(fault.flags.split()[1]), fault.flags, prepare=fault.plant)
    assert "ValueError: the self-check of --cp-" in str(raised.value)
    assert re.search(fault.found, str(raised.value)) is not None, str(raised.value)


def test_without_the_self_check_such_a_fault_trains() -> None:
    """Which is why it is on by default."""
    records = train(2, f"{STRIPED} --cp-selfcheck off", prepare=_zigzag_attention)
    assert all(r.losses[0] == r.losses[0] for r in records)
