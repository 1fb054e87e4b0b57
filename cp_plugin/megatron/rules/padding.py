"""Rules of padded sequences (``--cp-pad-sequence``): features that would count the padding or ignore its length."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cp_plugin.megatron.compat import masks_expert_bias
from cp_plugin.megatron.rules.experts import balancing
from cp_plugin.megatron.rules.rule import Found, Rule, when

if TYPE_CHECKING:
    from cp_plugin.megatron.rules.run import Run

_UNMASKED = ("quantile_balancing",)  # load balancing without padding masks
_FIX = "leave it out, or use a --seq-length that needs no padding"


def _with_experts(found: Callable[[Run], Found]) -> Callable[[Run], Found]:
    """Apply only to models with experts and padded sequences."""
    return lambda run: found(run) if run.args.num_experts and run.padding else None


@_with_experts
def _balancing(run: Run) -> Found:
    unmasked = [kind for kind in balancing(run.args) if kind in _UNMASKED]
    return when(unmasked, kind=" ".join(unmasked), padding=run.padding)


@_with_experts
def _expert_bias(run: Run) -> Found:
    wrong = run.args.moe_router_enable_expert_bias and not masks_expert_bias(run.version)
    return when(wrong, version=run.version, padding=run.padding)


@_with_experts
def _packed_experts(run: Run) -> Found:
    batch = run.args.micro_batch_size
    return when(run.packed and batch > 1, packed=run.packed, batch=batch, padding=run.padding)


RULES = (
    Rule(
        name="balancing of padding",
        what="--moe-router-load-balancing-type {kind} with {padding} tokens of padding (--cp-pad-sequence)",
        why="it would balance the padding, too",
        fix="use aux_loss, or a --seq-length that needs no padding",
        looks_at=_balancing,
        late=True,
    ),
    Rule(
        name="expert bias and padding",
        what="--moe-router-enable-expert-bias with {padding} tokens of padding (--cp-pad-sequence)",
        why="megatron-core {version} cannot exclude padding from it",
        fix=f"use megatron-core 0.20 or newer, {_FIX}",
        looks_at=_expert_bias,
        late=True,
    ),
    Rule(
        name="experts in padded micro-batches of packs",
        what="{packed} and --num-experts with --micro-batch-size {batch} and {padding} tokens of padding "
        "(--cp-pad-sequence)",
        why="Megatron splits a micro-batch's pack again for experts, and every part would need its own padding",
        fix="use --micro-batch-size 1, or a --seq-length that needs no padding",
        looks_at=_packed_experts,
        late=True,
    ),
    Rule(
        name="overlapped tensor parallelism and padding",
        what="--tp-comm-overlap with {padding} tokens of padding (--cp-pad-sequence)",
        why="its buffers are sized for --seq-length",
        fix=_FIX,
        looks_at=lambda run: when(run.padding and run.args.tp_comm_overlap, padding=run.padding),
        late=True,
    ),
)
