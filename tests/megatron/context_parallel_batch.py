"""``megatron.core.context_parallel.utils`` as Megatron-Core's documentation of 0.20 has it, for batches in one layout.

Nothing of it is in a release that the tests install. Views in several layouts, and packs that are divided per document,
are those of Megatron, which no plugin may ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class ContextParallelBatch:
    boundary_layout: str
    batches_by_layout: dict[str, dict[str, Any]]
    packed_seq_params_by_layout: dict[str, Any]
    thd_plan: Any = None

    def get_batch(self, layout: str | None = None) -> dict[str, Any]:
        return self.batches_by_layout[layout or self.boundary_layout]

    def get_packed_seq_params(self, layout: str | None = None) -> Any:
        return self.packed_seq_params_by_layout[layout or self.boundary_layout]


def get_batches_on_this_cp_rank(
    batch: dict[str, Any],
    boundary_layout: str,
    is_hybrid_cp: bool,
    cp_group: Any,
    additional_layouts: Iterable[str] = (),
    hybrid_cp_group_func: Callable[[int], Any] | None = None,
    use_per_sequence_balancing: bool = False,
    sequence_parallel: bool = False,
    tp_group: Any = None,
    tp_cp_group: Any = None,
    tokens_per_sample: int | None = None,
) -> ContextParallelBatch:
    from megatron.core import utils
    from megatron.core.packed_seq_params import PackedSeqParams

    assert not use_per_sequence_balancing and not list(additional_layouts), "left to Megatron"
    sliced, packed = dict(batch), None
    if any(batch.get(name) is not None for name in ("tokens", "labels", "loss_mask", "position_ids")):
        sliced = utils.get_batch_on_this_cp_rank(
            sliced,
            is_hybrid_cp=is_hybrid_cp,
            cp_group=cp_group,
            hybrid_cp_group_func=hybrid_cp_group_func,
            use_per_sequence_balancing=False,
            use_contiguous_cp=boundary_layout == "contiguous",
        )
    if sliced.get("cu_seqlens") is not None:
        bounds, longest = sliced["cu_seqlens"].squeeze(0), int(sliced["max_seqlen"])
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    return ContextParallelBatch(boundary_layout, {boundary_layout: sliced}, {boundary_layout: packed})
