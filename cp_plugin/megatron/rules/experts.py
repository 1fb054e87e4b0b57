"""Rules of experts whose router decides from the tokens of one rank: statistics and limits over a sequence.

Auxiliary losses, their logged values, the expert bias and quantile balancing are reduced over all ranks of a sequence
by Megatron. What these rules refuse is not: with context parallelism each rank would decide from its own part, or count
padding (``--cp-pad-sequence``), or ignore the padded length.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cp_plugin.megatron.compat import masks_expert_bias
from cp_plugin.megatron.rules.rule import Match, Rule, nonzero, spelled, when

if TYPE_CHECKING:
    from cp_plugin.megatron.rules.run import Run


def _capacity(run: Run) -> Match:
    """Tokens are dropped where one expert is the choice of more than its share of a rank's tokens."""
    args = run.args
    if not args.num_experts or args.context_parallel_size == 1:
        return None
    never = args.num_experts / args.moe_router_topk  # every token may choose the same expert
    limits = [spelled(args, ("--moe-expert-capacity-factor",), lambda factor: factor < never)]
    limits.append(spelled(args, ("--moe-expert-rank-capacity-factor",), lambda factor: True))
    flags = ", ".join(filter(None, limits))
    return when(flags, flags=flags, never=f"{never:g}")


RANDOM = ("moe_input_jitter_eps", "moe_router_force_load_balancing", "moe_router_force_biased")
"""Settings by which a router draws, in evaluations, too."""


def balancing(settings: Any) -> list[str]:
    """Kinds of load balancing; ``settings``: Megatron's arguments, or a model's configuration."""
    kinds = settings.moe_router_load_balancing_type
    return [kinds] if isinstance(kinds, str) else list(kinds or ())


def _sequences_of_packs(run: Run) -> bool:
    """A pack of several samples is divided as one sequence, so no rank's part is a number of whole samples."""
    args = run.args
    balances = args.num_experts and run.packed and args.micro_batch_size > 1 and "seq_aux_loss" in balancing(args)
    return bool(balances and args.context_parallel_size > 1 and spelled(args, ("--moe-aux-loss-coeff",), nonzero))


_PADDED = "{0.padding} tokens of padding (--cp-pad-sequence)"
_rule = partial(Rule, late=True)
_FIX = "leave it out, or use a --seq-length that needs no padding"


def _padded_experts(run: Run) -> bool:
    return bool(run.args.num_experts and run.padding)


RULES = (
    _rule(
        name="capacity of experts",
        example="--moe-expert-capacity-factor 1.5 --num-experts 4 | "
        "--moe-expert-rank-capacity-factor 2 --num-experts 4",
        what="{flags}",
        why="each rank would choose which tokens to drop from its own part of the sequence, not as a single rank does",
        fix="leave it out, or use --moe-expert-capacity-factor {never}, with which no token is dropped",
        looks_at=_capacity,
    ),
    _rule(
        name="sinkhorn",
        example="--moe-router-load-balancing-type sinkhorn --num-experts 4",
        what="--moe-router-load-balancing-type sinkhorn",
        why="it would balance each rank's part of the sequence separately",
        fix="use aux_loss, seq_aux_loss, global_aux_loss, or quantile_balancing if this Megatron has it",
        looks_at=lambda run: (
            run.args.num_experts and run.args.context_parallel_size > 1 and "sinkhorn" in balancing(run.args)
        ),
    ),
    _rule(
        name="balance of each sequence in packs",
        example="--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --num-experts 4 "
        "--sft --micro-batch-size 2",
        what="{0.packed} and --moe-router-load-balancing-type seq_aux_loss with "
        "--micro-batch-size {0.args.micro_batch_size}",
        why="all samples of a micro-batch form one pack, which is split across the ranks as a whole",
        fix="use --micro-batch-size 1, or aux_loss or global_aux_loss",
        looks_at=_sequences_of_packs,
    ),
    _rule(
        name="balancing of padding",
        example="--moe-router-load-balancing-type quantile_balancing --num-experts 4 --seq-length 62 --cp-pad-sequence",
        what=f"--moe-router-load-balancing-type quantile_balancing with {_PADDED}",
        why="it would balance the padding, too",
        fix="use aux_loss, or a --seq-length that needs no padding",
        looks_at=lambda run: _padded_experts(run) and "quantile_balancing" in balancing(run.args),
    ),
    _rule(
        name="expert bias and padding",
        example="--moe-router-enable-expert-bias --num-experts 4 --seq-length 62 --cp-pad-sequence",
        what=f"--moe-router-enable-expert-bias with {_PADDED}",
        why="megatron-core {0.version} cannot exclude padding from it",
        fix=f"use megatron-core 0.20 or newer, {_FIX}",
        looks_at=lambda run: (
            _padded_experts(run) and run.args.moe_router_enable_expert_bias and not masks_expert_bias(run.version)
        ),
    ),
    _rule(
        name="experts in padded micro-batches of packs",
        example="--micro-batch-size 3 --num-experts 4 --sft --seq-length 62 --cp-pad-sequence",
        what=f"{{0.packed}} and --num-experts with --micro-batch-size {{0.args.micro_batch_size}} and {_PADDED}",
        why="Megatron splits a micro-batch's pack again for experts, and every part would need its own padding",
        fix="use --micro-batch-size 1, or a --seq-length that needs no padding",
        looks_at=lambda run: _padded_experts(run) and run.packed and run.args.micro_batch_size > 1,
    ),
    _rule(
        name="overlapped tensor parallelism and padding",
        example="--tp-comm-overlap --num-experts 4 --seq-length 62 --cp-pad-sequence",
        what=f"--tp-comm-overlap with {_PADDED}",
        why="its buffers are sized for --seq-length",
        fix=_FIX,
        looks_at=lambda run: run.padding and run.args.tp_comm_overlap,
    ),
)
