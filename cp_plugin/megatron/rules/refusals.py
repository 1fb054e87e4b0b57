"""What the Megatron adapter does not support: each by the name of its flag, refused before training.

Nothing unsupported trains. A feature is on this list either because it would train on wrong numbers without an error (a
mask, a layout or a group the plugin does not know of), or because it is not tested together with the plugin yet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cp_plugin.megatron.flags.args import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One flag and the values it must not have."""

    flag: str
    why: str
    fix: str = "leave it out"
    refused: Callable[[Any], bool] = bool
    name: str | None = None
    """The attribute of the parsed namespace, where it is not the flag's own name."""

    @property
    def attribute(self) -> str:
        """The attribute of the parsed namespace. A Megatron version without it cannot have it switched on."""
        return self.name or self.flag.removeprefix("--").replace("-", "_")


_MASK = "attention is causal over the whole sequence, whatever mask the data loader makes"
_CROSS_LAYER = "its layers are not attention that a provider can replace, or slice the sequence on their own"
_GRAPH = "its communication cannot be captured in a CUDA graph yet"
_OFFLOAD = "it moves or frees what attention keeps for the backward, and needs Transformer Engine, which is not tested"
_OTHER_GROUPS = "it makes context-parallel groups of its own"
_INFERENCE = "the providers are for training; they have no key/value cache"
_TE_FP8 = "it is a switch of Transformer Engine's own attention"
_KERNEL = "the kernels compute the plain softmax and do not report its statistics"
_SHARDED = "the sharding of linear attention's own weights by FSDP is not tested"
_PATTERN = "its symbols say what each layer is, and linear attention is none of them"
_FILES = "its files are keyed by context-parallel rank and do not say which tokens a rank held"

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        flag="--attention-dropout",
        why="every context-parallel rank would draw the same mask, so that the result depends on their number",
        fix="set --attention-dropout 0",
    ),
    # packed sequences and masks
    Refusal(flag="--rl-use-sequence-packing", why=_INFERENCE),
    Refusal(flag="--max-seqlen-per-dp-cp-rank", why=_OTHER_GROUPS, refused=lambda v: v is not None),
    Refusal(flag="--reset-attention-mask", why=_MASK, fix="use --dataloader-inter-document-masking"),
    Refusal(
        flag="--reset-position-ids",
        why="RoPE counts positions from the start of the sequence",
        fix="use --dataloader-inter-document-masking",
    ),
    # other attention
    Refusal(flag="--cache-mla-latents", why=_INFERENCE),
    Refusal(flag="--mla-down-proj-fusion", why="it is Transformer Engine's, and not tested with the plugin yet"),
    Refusal(flag="--qk-clip", why=_KERNEL),
    Refusal(flag="--log-max-attention-logit", why=_KERNEL),
    Refusal(
        flag="--experimental-attention-variant",
        why="such layers assume Megatron's own layout and groups",
        refused=lambda v: v is not None,
    ),
    Refusal(flag="--use-kitchen-attention", why="Kitchen's attention would take the provider's place"),
    Refusal(
        flag="--attention-backend",
        why="it puts Megatron's unfused attention, which knows no context parallelism, in the provider's place",
        fix="use --cp-backend to choose the kernel",
        refused=lambda v: getattr(v, "name", v) == "local",
    ),
    Refusal(
        flag="--position-embedding-type",
        why="relative position embeddings are an attention bias",
        fix="use rope, yarn, mrope, learned_absolute or none",
        refused=lambda v: v == "relative",
    ),
    Refusal(flag="--batch-invariant-mode", why="Megatron allows it without context parallelism only"),
    Refusal(flag="--fp8-dot-product-attention", why=_TE_FP8, fix="use --cp-fp8 compute"),
    Refusal(flag="--fp8-multi-head-attention", why=_TE_FP8, fix="use --cp-fp8 compute"),
    # memory and diagnosis
    Refusal(flag="--cpu-offloading-num-layers", why=_OFFLOAD),
    Refusal(flag="--fine-grained-activation-offloading", why=_OFFLOAD),
    Refusal(
        flag="--rerun-mode",
        why="Megatron has another name for this mode than its own flag, and would stop with a worse message",
        fix="use validate_results or disabled",
        refused=lambda v: v == "report_stats",
    ),
    # other models
    Refusal(flag="--is-hybrid-model", why=_CROSS_LAYER, fix="use --hybrid-layer-pattern"),
    Refusal(flag="--linear-attention-freq", why=_CROSS_LAYER, refused=lambda v: v is not None),
    Refusal(flag="--heterogeneous-layers-config-path", why=_CROSS_LAYER),
    Refusal(flag="--heterogeneous-layers-config-encoded-json", why=_CROSS_LAYER),
    Refusal(flag="--use-legacy-models", why="the legacy models have no context parallelism"),
    Refusal(
        flag="--transformer-impl",
        why=_INFERENCE,
        fix="use transformer_engine or local",
        refused=lambda v: v not in ("transformer_engine", "local"),
    ),
    # other groups, other schedules
    Refusal(flag="--hybrid-context-parallel", why=_OTHER_GROUPS),
    Refusal(flag="--hierarchical-context-parallel-sizes", why=_OTHER_GROUPS),
    Refusal(flag="--fake-process-group", why="nothing is sent, so the self-check and every loss would be wrong"),
    Refusal(
        flag="--cp-comm-type",
        why="it chooses among Transformer Engine's methods, and --cp-provider takes their place",
        refused=lambda v: list(v or ["p2p"]) != ["p2p"],
    ),
    Refusal(flag="--cuda-graph-impl", why=_GRAPH, refused=lambda v: v not in (None, "none")),
    Refusal(flag="--enable-cuda-graph", why=_GRAPH),
    Refusal(flag="--external-cuda-graph", why=_GRAPH),
    Refusal(flag="--overlap-moe-expert-parallel-comm", why="two micro-batches would share the provider's streams"),
    Refusal(flag="--perform-rl-step", why=_INFERENCE),
    Refusal(flag="--log-straggler", why="it takes its times on CUDA devices, and was not run with the plugin yet"),
    Refusal(flag="--logits-save-dir", why=_FILES),
    Refusal(flag="--logits-load-dir", why=_FILES),
)


LINEAR_REFUSALS: tuple[Refusal, ...] = (
    Refusal(flag="--mtp-num-layers", why="multi-token prediction (MTP) numbers its layers from 1 again"),
    Refusal(flag="--hybrid-layer-pattern", why=_PATTERN),
    Refusal(flag="--hybrid-override-pattern", why=_PATTERN),
    Refusal(flag="--multi-latent-attention", why="its layers make no gate, and its head sizes are not tested"),
    Refusal(flag="--init-model-with-meta-device", why="the weights of linear attention are drawn head by head"),
    Refusal(flag="--use-megatron-fsdp", why=_SHARDED),
    Refusal(flag="--use-torch-fsdp2", why=_SHARDED),
)
"""Of linear attention, beside those of ``REFUSALS``."""


def refuse(args: argparse.Namespace, settings: Settings) -> None:
    """Check a parsed namespace.

    Raises:
        ValueError: for every unsupported flag at once: the flag, its value, why, and what to do.
    """
    problems = []
    for refusal in (*REFUSALS, *(LINEAR_REFUSALS if settings.linear is not None else ())):
        value = getattr(args, refusal.attribute, None)
        if value is not None and refusal.refused(value):
            shown = "" if value is True else f" {getattr(value, 'name', value)}"
            problems.append(f"{refusal.flag}{shown}: {refusal.why}; {refusal.fix}")
    if problems:
        raise ValueError(f"{settings.asked} does not support {' | '.join(problems)} (or {settings.instead})")
