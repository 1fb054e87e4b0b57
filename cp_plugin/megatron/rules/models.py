"""Rules of models and batches: MLA, multi-token prediction, hybrid models, packed documents, specs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from cp_plugin.megatron import compat
from cp_plugin.megatron.rules.flags import names_its_exchange
from cp_plugin.megatron.rules.rule import Match, Rule, spelled, when

if TYPE_CHECKING:
    from cp_plugin.megatron.rules.run import Run


_SIZES = ("--num-layers", "--hidden-size", "--num-attention-heads", "--ffn-hidden-size", "--micro-batch-size")


def _divides_delta_net(run: Run) -> bool:
    """Return True if gated delta net layers run on several context-parallel ranks."""
    return run.args.context_parallel_size > 1 and "G" in run.pattern


def _spec(run: Run) -> Match:
    """Megatron only logs a ``--spec`` that cannot be imported, and trains with its default spec."""
    words, problem = run.args.spec, ""
    if words is not None and len(words) != 2:
        problem = "two words are needed"
    elif words:
        try:
            if not hasattr(importlib.import_module(words[0]), words[1]):
                problem = f"module {words[0]} has no {words[1]!r}"
        except ImportError as error:
            silently = "and Megatron would silently train with its default spec"
            problem = f"module {words[0]} cannot be imported ({error}), {silently}"
    return when(problem, spec=" ".join(words or ()), problem=problem)


RULES = (
    Rule(
        name="sizes of the model",
        example="--num-layers -1 --hidden-size 0",
        what="{flags}",
        why="Megatron would fail later with an obscure error",
        fix="use 1 or more",
        looks_at=lambda run: when(flags := spelled(run.args, _SIZES, lambda size: size < 1), flags=flags),
        sentence=True,
    ),
    Rule(
        name="position embeddings of MLA",
        example="--position-embedding-type yarn --multi-latent-attention | "
        "--position-embedding-type mrope --multi-latent-attention",
        what="--position-embedding-type {0.args.position_embedding_type} conflicts with --multi-latent-attention",
        why="multi-latent attention has rotary embeddings of its own",
        fix="select them with --rope-type rope or yarn, and use --position-embedding-type rope",
        looks_at=lambda run: run.args.multi_latent_attention and run.args.position_embedding_type in ("yarn", "mrope"),
        sentence=True,
    ),
    Rule(
        name="multimodal positions of packs",
        example="--position-embedding-type mrope --sft",
        what="--position-embedding-type mrope with packed documents ({0.packed})",
        why="Megatron slices the angles before document boundaries are known",
        fix="use --position-embedding-type rope, or unpacked batches",
        looks_at=lambda run: (
            run.packed and run.args.context_parallel_size > 1 and run.args.position_embedding_type == "mrope"
        ),
    ),
    Rule(
        name="hybrid D",
        example="--hybrid-layer-pattern D*",
        what="D in --hybrid-layer-pattern {0.pattern}",
        why="DeepSeek's sparse attention chooses its keys in Megatron's own layout",
        fix="use *",
        looks_at=lambda run: "D" in run.pattern,
    ),
    Rule(
        name="hybrid without attention",
        example="--hybrid-layer-pattern M-",
        what="--hybrid-layer-pattern {0.pattern} without * or +",
        why="no layer of this model would use the provider",
        fix="add an attention layer (*)",
        looks_at=lambda run: run.pattern and not set("*+") & set(run.pattern),
    ),
    Rule(
        name="packed micro-batches in a pipeline",
        example="--sft --pipeline-model-parallel-size 2 --micro-batch-size 2",
        what="{0.packed} with --pipeline-model-parallel-size {0.args.pipeline_model_parallel_size} and "
        "--micro-batch-size {0.args.micro_batch_size}",
        why="Megatron packs a micro-batch into one sequence, but communicates between stages in the unpacked shape",
        fix="use --micro-batch-size 1",
        looks_at=lambda run: run.packed and run.args.pipeline_model_parallel_size > 1 and run.args.micro_batch_size > 1,
        sentence=True,
        late=True,
    ),
    Rule(
        name="words of --spec",
        example="--spec local | --spec a b c | --spec no.such layer | --spec json no_layer",
        what="--spec {spec}",
        why="{problem}",
        fix="give a module and a name in it, such as --spec my_package.my_spec layer, or leave it out",
        looks_at=_spec,
        sentence=True,
    ),
    Rule(
        name="mask of the data loader",
        example="--create-attention-mask-in-dataloader",
        kind="adjust",
        what="setting --no-create-attention-mask-in-dataloader",
        why="the providers apply the causal mask themselves",
        looks_at=lambda run: run.args.create_attention_mask_in_dataloader,
        sets={"create_attention_mask_in_dataloader": False},
    ),
    Rule(
        name="local attention of the dev branch",
        example="--cp-comm-type p2p --transformer-impl local --fallback-to-eager-attn False",
        kind="adjust",
        what="setting --cp-comm-type to all_gather",
        why="this Megatron demands it for its own local attention, which the provider replaces",
        looks_at=lambda run: (
            run.args.context_parallel_size > 1 and names_its_exchange(run) and run.args.cp_comm_type != ["all_gather"]
        ),
        sets={"cp_comm_type": ["all_gather"]},
    ),
    Rule(
        name="exchange of gated delta net",
        example="--cp-comm-type p2p --hybrid-layer-pattern G*",
        kind="adjust",
        what="--cp-comm-type is unset",
        why="this Megatron would pass it to gated delta net, which has no such parameter",
        looks_at=lambda run: (
            _divides_delta_net(run) and run.args.cp_comm_type == ["p2p"] and not compat.delta_net_takes_exchange()
        ),
        sets={"cp_comm_type": [None]},
    ),
    Rule(
        name="chunks of gated delta net",
        example="--linear-cp-mode chunkwise --hybrid-layer-pattern G*",
        kind="adjust",
        what="setting --linear-cp-mode to headwise",
        why="chunkwise moves tokens between ranks from Megatron's own layout, but they are in the provider's",
        looks_at=lambda run: (
            _divides_delta_net(run)
            and run.settings.delta_net is None
            and getattr(run.args, "linear_cp_mode", None) == "chunkwise"
        ),
        sets={"linear_cp_mode": "headwise"},
    ),
    Rule(
        name="fused rotation",
        example="--apply-rope-fusion --multi-latent-attention | --apply-rope-fusion --sft",
        kind="adjust",
        what="setting --no-rope-fusion",
        why="the fused rotation shards every document separately, and that of MLA is not tested with the plugin",
        looks_at=lambda run: run.args.apply_rope_fusion and (run.args.multi_latent_attention or run.packed),
        sets={"apply_rope_fusion": False},
    ),
)
