"""Rules of experts whose router decides from the tokens of one rank: statistics and limits over a sequence.

Auxiliary losses, their logged values, the expert bias and quantile balancing are reduced over all ranks of a sequence
by Megatron. What is below is not: with context parallelism each rank would decide from its own part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cp_plugin.megatron.rules.rule import Found, Rule, nonzero, spelled, when

if TYPE_CHECKING:
    from cp_plugin.megatron.rules.run import Run


def _capacity(run: Run) -> Found:
    """Tokens are dropped where one expert is the choice of more than its share of a rank's tokens."""
    args = run.args
    if not args.num_experts or args.context_parallel_size == 1:
        return None
    never = args.num_experts / args.moe_router_topk  # every token may choose the same expert
    given = [spelled(args, ("--moe-expert-capacity-factor",), lambda factor: factor < never)]
    given.append(spelled(args, ("--moe-expert-rank-capacity-factor",), lambda factor: True))
    found = ", ".join(filter(None, given))
    return when(found, given=found, never=f"{never:g}")


RANDOM = ("moe_input_jitter_eps", "moe_router_force_load_balancing", "moe_router_force_biased")
"""Settings by which a router draws, in evaluations, too."""


def balancing(settings: Any) -> list[str]:
    """Kinds of load balancing; ``settings``: Megatron's arguments, or a model's configuration."""
    kinds = settings.moe_router_load_balancing_type
    return [kinds] if isinstance(kinds, str) else list(kinds or ())


def _sinkhorn(run: Run) -> Found:
    return when(run.args.num_experts and run.args.context_parallel_size > 1 and "sinkhorn" in balancing(run.args))


def _sequences_of_packs(run: Run) -> Found:
    """A pack of several samples is divided as one sequence, so no rank's part is a number of whole samples."""
    args = run.args
    asked = args.num_experts and run.packed and args.micro_batch_size > 1 and "seq_aux_loss" in balancing(args)
    lossy = asked and args.context_parallel_size > 1 and spelled(args, ("--moe-aux-loss-coeff",), nonzero)
    return when(lossy, packed=run.packed, batch=args.micro_batch_size)


RULES = (
    Rule(
        name="capacity of experts",
        what="{given}",
        why="each rank would choose which tokens to drop from its own part of the sequence, not as a single rank does",
        fix="leave it out, or use --moe-expert-capacity-factor {never}, with which no token is dropped",
        looks_at=_capacity,
        late=True,
    ),
    Rule(
        name="sinkhorn",
        what="--moe-router-load-balancing-type sinkhorn",
        why="it would balance each rank's part of the sequence separately",
        fix="use aux_loss, seq_aux_loss, global_aux_loss, or quantile_balancing if this Megatron has it",
        looks_at=_sinkhorn,
        late=True,
    ),
    Rule(
        name="balance of each sequence in packs",
        what="{packed} and --moe-router-load-balancing-type seq_aux_loss with --micro-batch-size {batch}",
        why="all samples of a micro-batch form one pack, which is split across the ranks as a whole",
        fix="use --micro-batch-size 1, or aux_loss or global_aux_loss",
        looks_at=_sequences_of_packs,
        late=True,
    ),
)
