"""Megatron flags that are always refused.

They would train on wrong numbers without an error (a mask, a layout or a group unknown to the plugin), or are not
tested with the plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cp_plugin.megatron.rules.cuda_graphs import CUDA_GRAPH
from cp_plugin.megatron.rules.fields import UNKNOWN
from cp_plugin.megatron.rules.rule import Match, Rule, flag, shown, value_of, when

if TYPE_CHECKING:
    from cp_plugin.megatron.rules.run import Run

_MASK = "attention is causal over the whole sequence, whatever mask the data loader builds"
_CROSS_LAYER = "a provider cannot replace the attention of its layers, or they shard the sequence themselves"
_GRAPH = "it captures whole layers, and context parallelism cannot communicate in a CUDA graph yet"
_PARTS = "use --cuda-graph-impl transformer_engine and name the parts: mlp, moe, or moe_router"
_OFFLOAD = (
    "it moves or frees tensors that attention saves for the backward pass; it needs Transformer Engine and is untested"
)
_OTHER_GROUPS = "it creates its own context-parallel groups"
_INFERENCE = "the providers are for training and have no key/value cache"
_TE_FP8 = "it only controls Transformer Engine's own attention"
_KERNEL = "the kernels compute a plain softmax and do not report its statistics"
_FILES = "its files are keyed by context-parallel rank and do not record which tokens a rank held"


def names_its_exchange(run: Run) -> bool:
    """Return True if Megatron's own attention would exchange tokens and says how: the dev branch without TE's."""
    eager = getattr(run.args, "fallback_to_eager_attn", None)
    return eager is not None and (eager or run.args.transformer_impl == "local")


def _comm_type(run: Run) -> Match:
    value = value_of(run.args, "--cp-comm-type") or "p2p"
    types = [value] if isinstance(value, str) else list(value)  # Bridge's configuration has one word
    ignored = types in (["p2p"], [None]) or (types == ["all_gather"] and names_its_exchange(run))
    return when(not ignored, value=shown(value))


DROPOUT = flag(
    "--attention-dropout",
    example="0.1",
    why="all context-parallel ranks would draw the same mask, so results would depend on the number of ranks",
    fix="set --attention-dropout 0",
)
QK_CLIP = flag("--qk-clip", why=_KERNEL)
MAX_LOGIT = flag("--log-max-attention-logit", why=_KERNEL)
VARIANT = flag(
    "--experimental-attention-variant",
    example="dsa",
    why="such layers assume Megatron's own layout and groups",
    refused=lambda v: True,
)
BATCH_INVARIANT = flag("--batch-invariant-mode", why="Megatron allows it only without context parallelism")
FP8_ATTENTION = flag("--fp8-dot-product-attention", why=_TE_FP8, fix="use --cp-fp8 compute")
PARTITION = flag(
    "--cp-partition-mode",
    example="contiguous",
    why="Megatron would convert tokens from its own layout before attention, but they are in the provider's",
    fix="leave it out, and choose the layout with --cp-layout",
    refused=lambda v: v != "zigzag",
)
FP8_BETWEEN = flag("--fp8-multi-head-attention", why=_TE_FP8, fix="use --cp-fp8 compute")

RULES = (
    DROPOUT,
    # packed sequences and masks
    flag("--rl-use-sequence-packing", why=_INFERENCE),
    flag("--max-seqlen-per-dp-cp-rank", example="4096", why=_OTHER_GROUPS, refused=lambda v: True),
    flag(
        "--sequence-packing-scheduler",
        example="dp_balanced",
        why="it builds and slices packs on each rank, in Megatron's own layout (--use-varlen-dataset implies it)",
        fix="leave both out, and pack documents with --sft",
    ),
    flag(
        "--pad-packed-seq-alignment",
        example="16",
        why="it pads each rank's tokens after slicing, in the middle of the provider's layout",
        fix="use --cp-pad-sequence",
        refused=lambda v: True,
    ),
    PARTITION,
    flag("--reset-attention-mask", why=_MASK, fix="use --dataloader-inter-document-masking"),
    flag(
        "--reset-position-ids",
        why="RoPE counts positions from the start of the sequence",
        fix="use --dataloader-inter-document-masking",
    ),
    # other attention
    flag("--cache-mla-latents", why=_INFERENCE),
    flag("--mla-down-proj-fusion", why="it needs Transformer Engine, and is not yet tested with the plugin"),
    QK_CLIP,
    MAX_LOGIT,
    UNKNOWN,
    VARIANT,
    flag("--use-kitchen-attention", why="it would replace the provider with Kitchen's attention"),
    flag(
        "--attention-backend",
        example="local",
        why="it would replace the provider with Megatron's unfused attention, which has no context parallelism",
        fix="use --cp-backend to choose the kernel",
        refused=lambda v: getattr(v, "name", v) == "local",
    ),
    flag(
        "--position-embedding-type",
        example="relative",
        why="relative position embeddings are an attention bias",
        fix="use rope, yarn, mrope, learned_absolute or none",
        refused=lambda v: v == "relative",
    ),
    BATCH_INVARIANT,
    FP8_ATTENTION,
    FP8_BETWEEN,
    # memory and diagnosis
    flag("--cpu-offloading-num-layers", example="1", why=_OFFLOAD),
    flag("--fine-grained-activation-offloading", why=_OFFLOAD),
    flag(
        "--rerun-mode",
        example="report_stats",
        why="Megatron's parser accepts it, but its rerun engine later fails with an obscure message",
        fix="use validate_results or disabled",
        refused=lambda v: v == "report_stats",
    ),
    # other models
    flag("--is-hybrid-model", why=_CROSS_LAYER, fix="use --hybrid-layer-pattern"),
    flag("--linear-attention-freq", example="2", why=_CROSS_LAYER, refused=lambda v: True),
    flag("--heterogeneous-layers-config-path", example="x.json", why=_CROSS_LAYER),
    flag("--heterogeneous-layers-config-encoded-json", example="{}", why=_CROSS_LAYER),
    flag(
        "--transformer-impl",
        example="inference_optimized",
        why=_INFERENCE,
        fix="use transformer_engine or local",
        refused=lambda v: v not in ("transformer_engine", "local"),
    ),
    # other groups, other schedules
    flag("--hybrid-context-parallel", why=_OTHER_GROUPS),
    flag("--dynamic-context-parallel", why=_OTHER_GROUPS),
    flag("--hierarchical-context-parallel-sizes", example="2 2", why=_OTHER_GROUPS),
    flag("--fake-process-group", why="nothing is communicated, so the self-check and all losses would be wrong"),
    Rule(
        name="--cp-comm-type",
        example="--cp-comm-type a2a",
        what="--cp-comm-type{value}",
        why="it selects one of Transformer Engine's methods, which --cp-provider replaces",
        fix="leave it out",
        looks_at=_comm_type,
    ),
    CUDA_GRAPH,
    flag("--enable-cuda-graph", why=_GRAPH, fix=_PARTS),
    flag("--external-cuda-graph", why=_GRAPH, fix=_PARTS),
    flag("--overlap-moe-expert-parallel-comm", why="two micro-batches would share the provider's streams"),
    flag("--perform-rl-step", why=_INFERENCE),
    flag("--log-straggler", why="it times CUDA devices, and is not yet tested with the plugin"),
    flag("--logits-save-dir", example="x", why=_FILES),
    flag("--logits-load-dir", example="x", why=_FILES),
)
