"""Rules of the token layout: divisible lengths, and ranks that hold different numbers of loss tokens."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from cp_plugin.engine.core.layout import Layout
from cp_plugin.engine.placement.documents import DOCUMENTS
from cp_plugin.megatron.compat import weakens_expert_losses
from cp_plugin.megatron.rules.rule import Match, Rule, nonzero, spelled, when

if TYPE_CHECKING:
    from cp_plugin.megatron.rules.run import Run

_COUNTED = "with --calculate-per-token-loss, which the {0.layout_name} layout needs or the command line sets"

_conflict = partial(Rule, sentence=True)


def contiguous_between_layers(args: argparse.Namespace) -> bool:
    """Return True if Megatron keeps tokens contiguous in all layers but attention."""
    return getattr(args, "linear_cp_layout", "zigzag") == "contiguous"


def needs_counting(run: Run, layout: Layout) -> bool:
    """Return True if ranks may hold different numbers of loss tokens while losses are not yet summed per token."""
    even = layout.name == "zigzag" and not run.settings.pad_sequence and not contiguous_between_layers(run.args)
    return run.args.context_parallel_size > 1 and not run.args.calculate_per_token_loss and not even


def _length(run: Run) -> Match:
    size = run.args.context_parallel_size
    divisor = run.layout.divisor(size)
    for flag, length in (("--seq-length", run.args.seq_length), ("--encoder-seq-length", run.args.encoder_seq_length)):
        if length is not None and (length <= 0 or (length % divisor and not run.settings.pad_sequence)):
            below = length // divisor * divisor
            nearest = " or ".join(str(n) for n in (below, below + divisor) if n > 0)
            about = {"flag": flag, "length": length, "nearest": nearest}
            return about | {"size": size, "layout": run.layout.name, "divisor": divisor}
    return None


def _experts(run: Run) -> Match:
    """Megatron-Core before 0.19 weakens router losses when losses are summed per token.

    It multiplies them by this rank's tokens and later divides by those of all ranks: too small by the context-parallel
    (times the tensor-parallel) size.
    """
    args = run.args
    flags = spelled(args, ("--moe-aux-loss-coeff", "--moe-z-loss-coeff"), nonzero)
    weakened = args.num_experts and args.calculate_per_token_loss and weakens_expert_losses(run.version)
    return when(weakened and flags, flags=flags)


def _contiguous_attention(run: Run) -> bool:
    return getattr(run.args, "attention_cp_layout", "zigzag") == "contiguous"


def _not_converted(run: Run) -> bool:
    """Megatron's layout manager converts between zigzag and contiguous tokens only.

    It supports neither the plugin's packs, nor multi-token prediction, nor an odd number of tensor-parallel ranks.
    """
    args = run.args
    pattern = args.hybrid_layer_pattern or ""
    predicted = args.mtp_num_layers or "/" in pattern
    odd = args.tensor_model_parallel_size > 1 and args.tensor_model_parallel_size % 2
    possible = run.layout.name == "zigzag" and pattern and not (run.packed or predicted or odd)
    contiguous = contiguous_between_layers(args) or _contiguous_attention(run)
    return args.context_parallel_size > 1 and contiguous and not possible


def _placed(run: Run) -> bool:
    return run.args.context_parallel_size > 1 and run.layout.name == DOCUMENTS.name


RULES = (
    _conflict(
        name="sequence length",
        example="--seq-length 62",
        what="{flag} {length} cannot be split evenly across --context-parallel-size {size} in the {layout} layout",
        why="it must be a multiple of {divisor}",
        fix="use {nearest}, or --cp-pad-sequence",
        looks_at=_length,
    ),
    _conflict(
        name="losses of experts",
        example="--moe-aux-loss-coeff 0.01 --num-experts 4 --calculate-per-token-loss | "
        "--moe-z-loss-coeff 0.1 --num-experts 4 --calculate-per-token-loss | "
        "--moe-aux-loss-coeff 0.0 0.1 --num-experts 4 --calculate-per-token-loss",
        what=f"{{flags}} {_COUNTED}",
        why="megatron-core {0.version} makes these losses too small under context parallelism",
        fix="use megatron-core 0.19 or newer, or --cp-provider ring --cp-layout zigzag without that flag and without "
        "padding",
        looks_at=_experts,
        late=True,
    ),
    _conflict(
        name="gradients of torch's FSDP",
        example="--use-torch-fsdp2 --calculate-per-token-loss",
        what=f"--use-torch-fsdp2 {_COUNTED}",
        why="Megatron does not divide torch FSDP's gradients by the number of tokens",  # with or without CP
        fix="use --cp-layout zigzag without that flag and without padding, or --use-megatron-fsdp",
        looks_at=lambda run: run.args.use_torch_fsdp2 and run.args.calculate_per_token_loss,
        late=True,
    ),
    _conflict(
        name="gradients averaged in the collective",
        example="--ddp-average-in-collective --calculate-per-token-loss",
        what=f"--ddp-average-in-collective {_COUNTED}",
        why="gradients divided by the number of tokens must be summed over the ranks, not averaged",
        fix="leave --ddp-average-in-collective out, or use --cp-layout zigzag without that flag and without padding",
        looks_at=lambda run: run.args.ddp_average_in_collective and run.args.calculate_per_token_loss,
        late=True,
    ),
    _conflict(
        name="layout of attention",
        example="--attention-cp-layout contiguous",
        what="--attention-cp-layout contiguous conflicts with tokens in the {0.layout.name} layout",
        why="--cp-layout sets the layout of attention",
        fix="use --cp-layout contiguous, or leave --attention-cp-layout out",
        looks_at=lambda run: (
            run.args.context_parallel_size > 1 and _contiguous_attention(run) and run.layout.name != "contiguous"
        ),
    ),
    _conflict(
        name="documents to be placed",
        example="--cp-layout documents --cp-provider needed",
        what=f"--cp-layout {DOCUMENTS.name} without packed documents",
        why="the layout is computed for each pack from its document lengths",
        fix="pack them with --dataloader-inter-document-masking or --sft, or use another --cp-layout",
        looks_at=lambda run: _placed(run) and not run.packed,
    ),
    _conflict(
        name="padding that is placed with documents",
        example="--cp-layout documents --num-experts 4 --cp-provider needed --cp-pad-sequence --seq-length 61 --sft",
        what=f"--cp-layout {DOCUMENTS.name} and --num-experts with {{0.padding}} tokens of padding (--cp-pad-sequence)",
        why="routers know neither the document boundaries nor which tokens are padding",
        fix="use another --cp-layout, or a --seq-length that is a multiple of --context-parallel-size",
        looks_at=lambda run: _placed(run) and run.args.num_experts and run.padding,
        late=True,
    ),
    Rule(
        name="layout of hybrid layers",
        example="--linear-cp-layout contiguous",
        kind="adjust",
        what="setting --linear-cp-layout and --attention-cp-layout to zigzag, so that Megatron converts nothing",
        why="all layers compute in the {0.layout.name} layout",
        looks_at=_not_converted,
        sets={"linear_cp_layout": "zigzag", "attention_cp_layout": "zigzag"},
    ),
    Rule(
        name="losses per token",
        example="--cp-layout contiguous",
        kind="adjust",
        what="setting --calculate-per-token-loss",
        why="in the {0.layout_name} layout, ranks may hold different numbers of loss tokens, and averaging their means "
        "would weight tokens unequally",
        looks_at=lambda run: not run.settings.undecided and needs_counting(run, run.layout),
        sets={"calculate_per_token_loss": True},
    ),
)
