"""Planted faults: each trains without an error, and the start-up self-check must find it."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import pytest
import torch
from harness import train
from nightly import slow
from torch import Tensor

from cp_plugin import ContextParallel
from cp_plugin.attention.tokens import segments_of
from cp_plugin.comm import Pending
from cp_plugin.core.mask import Mask
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

SLICER = "megatron.core.utils:get_batch_on_this_cp_rank"
BATCH = "cp_plugin.megatron.patches.batch:slice_batch"
ROPE = "megatron.core.models.common.embeddings.rotary_pos_embedding:get_pos_emb_on_this_cp_rank"
PACKED_ROPE = "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd"
ATTENTION = "cp_plugin.attention.api:ContextParallel"
LOCAL_BACKWARD = "cp_plugin.methods.local:Local.backward"
MESH = "cp_plugin.comm:GroupMesh"

type Make = Callable[[Any], Any]


def planted(target: str, make: Make) -> Callable[[], None]:
    """Replace ``module:qualified.name`` by what ``make`` returns for the original."""

    def plant() -> None:
        module, _, path = target.partition(":")
        *owners, name = path.split(".")
        owner = reduce(getattr, owners, importlib.import_module(module))
        setattr(owner, name, make(getattr(owner, name)))

    return plant


def replace_slicer(slicer: Callable[..., Any]) -> None:
    """Replace the batch slicer in every module that imported it, as another extension might."""
    from cp_plugin.megatron.patches import patching

    ours = sys.modules["megatron.core.utils"].get_batch_on_this_cp_rank
    for module, name in patching._holders([ours])[id(ours)]:
        setattr(module, name, slicer)


def stock_batch() -> None:
    from cp_plugin.megatron.patches import patching

    replace_slicer(patching.original(SLICER))


def stock_batch_in_the_script() -> None:
    """The script obtained Megatron's own slicer in a way the plugin does not see."""
    from cp_plugin.megatron.patches import patching

    sys.modules["__main__"].get_batch_on_this_cp_rank = patching.original(SLICER)


def batch_by_rank_number(slice_batch: Any) -> Any:
    def wrong(tensors: dict[str, Any], cp: ContextParallel) -> dict[str, Any]:
        numbers, cp.numbers = cp.numbers, tuple(range(cp.size))
        try:
            return slice_batch(tensors, cp)
        finally:
            cp.numbers = numbers

    return wrong


def in_halves(key: str) -> Callable[[], None]:
    """Cut one part of the batch in halves, the others by the layout."""
    return planted(BATCH, lambda cut: lambda x, cp: cut(x, cp) | {key: x[key].chunk(cp.size, 1)[cp.index]})


def rope_by_rank_number(_: Any) -> Any:
    from cp_plugin.megatron import runtime

    def wrong(emb: Tensor, dim: int, group: Any) -> Tensor:
        cp = runtime.context_parallel(group)
        return cp.layout.shard(emb, dim, cp.size, cp.index)

    return wrong


def zigzag(_: Any) -> property:
    from cp_plugin.megatron import runtime

    return property(lambda self: ContextParallel("ring", mesh=runtime.context_parallel().mesh, layout="zigzag"))


zigzag_attention = planted("cp_plugin.megatron.layers.core_attention:CoreAttention.context_parallel", zigzag)


def wrong_key_gradient_on_rank_1(attend: Any) -> Any:
    def attention(self: ContextParallel, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        if torch.distributed.get_rank() == 1:
            k.register_hook(lambda grad: 1.001 * grad)
        return attend(self, q, k, v, **kwargs)

    return attention


def called_with(**changed: Any) -> Callable[[], None]:
    """Call attention with other options than were asked for."""
    return planted(f"{ATTENTION}.attention", lambda f: lambda self, *args, **kw: f(self, *args, **{**kw, **changed}))


def gradient(name: str, factor: float) -> Callable[[], None]:
    def wrong(backward: Any) -> Any:
        def changed(self: Any, *args: Any) -> Any:
            found = backward(self, *args)
            return None if found is None else found._replace(**{name: factor * getattr(found, name)})

        return changed

    return planted(LOCAL_BACKWARD, wrong)


def in_transit(change: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    return planted(
        f"{MESH}._exchange",
        lambda send: lambda self, axis, x, *args, **kw: send(self, axis, tuple(map(change, x)), *args, **kw),
    )


def gathered_in_the_wrong_order(gather: Any) -> Any:
    return lambda self, axis, x: gather(self, axis, x).then(lambda t: torch.cat(t.chunk(self.axes[axis])[::-1]))


def sums_of_one_rank_lost(reduce_scatter: Any) -> Any:
    return lambda self, axis, x: reduce_scatter(self, axis, tuple(t * (self.coordinates[axis] != 1) for t in x))


def received_in_the_call_before(exchange: Any) -> Any:
    """Rank 1 attends with the keys and values of its previous call: a GPU buffer that is reused too soon."""
    before = dict[Any, Any]()

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

    return wrong


def states_of_the_call_before(gather: Any) -> Any:
    """The same for the chunk states of linear attention."""
    before = dict[Any, Any]()

    def wrong(self: Any, axis: str, tensors: Any) -> Any:
        found = gather(self, axis, tensors).wait()
        stale = torch.distributed.get_rank() == 1 and self.ledger.current_phase == "forward"
        shapes = tuple(t.shape for t in tensors)
        kept, before[shapes] = before.get(shapes, found), found
        return Pending.done(kept if stale else found)

    return wrong


def saved_for_the_backward_in_one_buffer(attend: Any) -> Any:
    """The output that a call saves for its backward is overwritten by the next call."""
    buffers = dict[Any, Tensor]()

    def wrong(*args: Any) -> Any:
        done = attend(*args)
        kept = buffers.setdefault(done.out.shape, torch.empty_like(done.out))
        kept.detach().copy_(done.out.detach())
        return done._replace(home=done.home.clone(), out=kept.data)

    return wrong


def bounds_of_the_first_pack(bounds: Any) -> Any:
    first = list[Tensor]()

    def wrong(packed: Any, tokens: int) -> Tensor:
        first.append(bounds(packed, tokens))
        return first[0]

    return wrong


class Fault(NamedTuple):
    name: str
    plant: Callable[[], None]
    flags: str
    found: str
    """Pattern of the self-check's message."""
    alike: bool = False
    """Another fault is found in the same place; this one is planted before a merge only."""


exchanged = planted(f"{MESH}._exchange", received_in_the_call_before)
rounded = in_transit(lambda t: t.bfloat16().to(t.dtype))
FAULTS = (
    Fault(
        "stock_batch",
        stock_batch,
        STRIPED,
        r"rank 0: tokens differ; labels .*; loss_mask .*; position_ids .* \| rank 1",
    ),
    Fault(
        "stock_batch_in_the_script",
        stock_batch_in_the_script,
        STRIPED,
        "rank 0: module __main__ holds a get_batch_on_this_cp_rank of its own",
    ),
    Fault(
        "batch_by_rank_number", planted(BATCH, batch_by_rank_number), HEAD_AXIS, r"rank 1: tokens differ; .* \| rank 2"
    ),
    Fault("labels in halves", in_halves("labels"), STRIPED, "failed. rank 0: labels differ", True),
    Fault("loss_mask in halves", in_halves("loss_mask"), STRIPED, "failed. rank 0: loss_mask differ"),
    Fault("position_ids in halves", in_halves("position_ids"), STRIPED, "failed. rank 0: position_ids differ", True),
    Fault(
        "contiguous_rope",
        planted(ROPE, lambda _: lambda emb, dim, group: emb.chunk(group.size(), dim)[group.rank()]),
        STRIPED,
        r"rank 0: rope differs; out is off by .* \| rank 1: rope differs",
    ),
    Fault(
        "rope_by_rank_number",
        planted(ROPE, rope_by_rank_number),
        HEAD_AXIS,
        r"rank 1: rope differs; out is off by .* \| rank 2: rope differs",
    ),
    Fault(
        "rope_begins_at_1",
        planted(ROPE, lambda cut: lambda emb, dim, group: cut(emb.roll(1, dim), dim, group)),
        STRIPED,
        "rank 0: rope differs",
        True,
    ),
    Fault(  # the second document's positions continue those of the first
        "packed_rope_goes_on",
        planted(PACKED_ROPE, lambda rotate: lambda t, bounds, *args, **kw: rotate(t, bounds[[0, -1]], *args, **kw)),
        PACKED,
        "rope of packed documents differs",
    ),
    Fault("zigzag_attention", zigzag_attention, STRIPED, "rank 0: out is off by"),
    Fault("wrong_scale", called_with(scale=1.01 * 16**-0.5), STRIPED, "rank 0: out is off by .*dq is off .*dk is off"),
    Fault(
        "wrong_key_gradient_on_rank_1",
        planted(f"{ATTENTION}.attention", wrong_key_gradient_on_rank_1),
        STRIPED,
        r"failed. rank 1: dk is off by 1.0e-03 \(relative; allowed 1e-05\)",
    ),
    Fault(
        "attention_by_rank_number",
        planted(
            f"{ATTENTION}.segments",
            lambda _: (
                lambda self, seq_length, owners: segments_of(
                    self.layout, tuple(range(self.size)), seq_length, owners(self.index)
                )
            ),
        ),
        HEAD_AXIS,
        r"rank 1: out is off by .*; dq is off by .* \| rank 2: out is off by",
    ),
    Fault("without causal", called_with(causal=False), STRIPED, "rank 0: out is off by", True),
    Fault("without window", called_with(window=None), WINDOW, "rank 0: out is off by"),
    Fault("without sink", called_with(sink=None), SINK, "rank 0: out is off by"),
    Fault("without cu_seqlens", called_with(cu_seqlens=None), PACKED, "packed out is off by"),
    Fault(
        "last_tile_dropped",
        planted("cp_plugin.kernels.blocks:Tiled.tiles", lambda tiles: lambda self, block: tiles(self, block)[:-1]),
        STRIPED,
        "out is off by",
        True,
    ),
    Fault(  # every query sees the token after itself
        "masks_shifted_by_one",
        planted("cp_plugin.core.mask:Mask.of", lambda of: lambda causal, *rest: Mask(of(causal, *rest).left, 1)),
        STRIPED,
        "out is off by",
        True,
    ),
    Fault("value_gradient_doubled", gradient("dv", 2), STRIPED, r"failed. rank 0: dv is off by 1.0e\+00", True),
    Fault("query_gradient_negated", gradient("dq", -1), STRIPED, r"failed. rank 0: dq is off by \d.\de\+00", True),
    Fault(
        "log_sum_exp_ignored_in_merging",
        planted("cp_plugin.kernels.fused:_weight", lambda _: lambda part, _: torch.full_like(part, 0.5).unsqueeze(-1)),
        STRIPED,
        "out is off by",
    ),
    Fault("halves_swapped_in_transit", in_transit(lambda t: t.roll(t.size(0) // 2, 0)), STRIPED, "out is off by", True),
    Fault("rounded_in_transit", rounded, STRIPED, "out is off by .*e-03", True),
    Fault("rounded_in_transit", rounded, BURST, "dq is off by .*e-03"),
    Fault(
        "gathered_in_the_wrong_order",
        planted(f"{MESH}._all_gather", gathered_in_the_wrong_order),
        GRID,
        "out is off by",
        True,
    ),
    Fault("sums_of_one_rank_lost", planted(f"{MESH}._reduce_scatter", sums_of_one_rank_lost), GRID, "dk is off by"),
    Fault(
        "sinks_of_other_heads",
        planted("cp_plugin.attention.sinks:apply", lambda f: lambda out, lse, sink: f(out, lse, sink.roll(1) + 0.5)),
        SINK,
        "out is off by",
        True,
    ),
    Fault("received_in_the_call_before", exchanged, STRIPED, rf"rank 1: out is off by \S+ {SECOND}"),
    Fault("received_in_the_call_before", exchanged, PACKED, rf"rank 1: out .*; packed out is off by \S+ {SECOND}"),
    Fault(
        "states_of_the_call_before",
        planted(f"{MESH}._all_gather", states_of_the_call_before),
        LINEAR,
        rf"rank 1: linear out is off by \S+ {SECOND}",
    ),
    Fault(
        "saved_for_the_backward_in_one_buffer",
        planted("cp_plugin.attention.softmax:attend", saved_for_the_backward_in_one_buffer),
        STRIPED,
        r"failed. rank 0: dq is off by \S+ \(relative",
    ),
    Fault(
        "bounds_of_the_first_pack",
        planted("cp_plugin.megatron.patches.packing:bounds", bounds_of_the_first_pack),
        PACKED,
        rf"failed. rank 0: packed out is off by \S+ {SECOND}",
    ),
)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=slow if fault.alike else ()) for fault in FAULTS],
    ids=lambda fault: f"{fault.name}-{fault.flags.split()[3]}",
)
def test_the_self_check_finds_it(fault: Fault) -> None:
    with pytest.raises(RankError) as raised:
        train(int(fault.flags.split()[1]), fault.flags, prepare=fault.plant)
    assert "ValueError: the self-check of --cp-" in str(raised.value)
    assert re.search(fault.found, str(raised.value)) is not None, str(raised.value)


def test_without_the_self_check_such_a_fault_trains() -> None:
    records = train(2, f"{STRIPED} --cp-selfcheck off", prepare=zigzag_attention)
    assert all(r.losses[0] == r.losses[0] for r in records)
