"""The planner's ``Model`` and ``Parallel`` from Megatron's validated arguments."""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cp_plugin.engine.core.dtypes import dtype_name
from cp_plugin.engine.core.options import Options
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.flags.option_flags import AUTO
from cp_plugin.megatron.rules import checks
from cp_plugin.megatron.rules.run import head_sizes
from cp_plugin.planner.candidates import Allowed, upstream_names
from cp_plugin.planner.query import join_documents
from cp_plugin.planner.training.model import DENSE, EXPERTS, LINEAR, SOFTMAX, WINDOW, Model
from cp_plugin.planner.training.parallel import Parallel, check

UNKNOWN = (
    ("hybrid_layer_pattern", "--hybrid-layer-pattern"),
    ("experimental_attention_variant", "--experimental-attention-variant"),
    ("heterogeneous_layers_config_path", "--heterogeneous-layers-config-path"),
    ("moe_latent_size", "--moe-latent-size"),
    ("fp4", "--fp4-format"),
)
"""Attribute and flag of features that a ``Model`` cannot express."""


class Question(NamedTuple):
    """What the planner is asked about a training run."""

    model: Model
    parallel: Parallel
    allowed: Allowed
    packed: Packed | None


class Packed(NamedTuple):
    """A representative pack."""

    lengths: tuple[int, ...]  # tokens of its documents
    prefix: str  # the dataset they are drawn from


def question(args: argparse.Namespace, settings: Settings) -> Question:
    """The one question, whether ``plan`` or ``--cp-provider auto`` asks it, whichever provider the flags name.

    The options of a named provider are part of that choice; those beside ``auto`` restrict the planner's. What the
    rules of a training run refuse is not recommended: of stock's flags, ``Allowed.refused`` is the reason.

    Raises:
        ValueError: as for ``from_args``, and if no provider or token layout can run these flags of the plugin's.
    """
    stock = not settings.active
    if not settings.undecided and (settings.softmax or not settings.active):
        settings = replace(settings, provider=AUTO, options=Options())
    model, parallel = from_args(args, settings)
    packing = copy.copy(args)
    if settings.options.layout is None:
        packing.dataloader_inter_document_masking = True  # the planner looks at layouts of documents where it has any
    real = checks.run_of(args, settings).problem
    allowed = Allowed(options=settings.options, real=real, stock=settings.linear is None)
    try:
        checks.refuse_all(args, settings)
        allowed = replace(allowed, layouts=checks.allowed_layouts(packing, settings))
    except ValueError as error:
        if not stock or not upstream_names(real):
            raise
        allowed = replace(allowed, refused=str(error))
    packed = pack_of(args, parallel.seq_length * parallel.micro_batch)
    if packed is not None:
        parallel = join_documents(parallel, packed.lengths)
    return Question(model, parallel, allowed, packed)


def pack_of(args: argparse.Namespace, tokens: int) -> Packed | None:
    """Draw a pack as ``--dataloader-inter-document-masking`` does: in random order, the last document cut.

    Lengths come from the dataset's ``.idx``; of a blend, from the dataset with the greatest weight. Every rank draws
    the same pack.

    Returns:
        None for other data, or without an ``.idx``: mock data, conversations (``--sft``), missing files.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.training.utils import get_blend_and_blend_per_split

    if not getattr(args, "dataloader_inter_document_masking", False) or args.mock_data:
        return None
    together, of_splits = get_blend_and_blend_per_split(args)
    blend = together or (of_splits and of_splits[0])
    if not blend:
        return None
    prefixes, weights = blend
    prefix = prefixes[int(np.argmax(weights)) if weights else 0]
    if not IndexedDataset.exists(prefix):
        return None
    dataset = IndexedDataset(prefix)  # keeps its lengths mapped
    rng, left, lengths = np.random.default_rng(0), tokens, []
    while left:
        lengths.append(min(left, max(1, int(dataset.sequence_lengths[rng.integers(len(dataset))]))))
        left -= lengths[-1]
    return Packed(tuple(lengths), prefix)


def from_args(args: argparse.Namespace, settings: Settings) -> tuple[Model, Parallel]:
    """Model and parallel sizes; ValueError for a model that the planner does not know, or without a size."""
    for attribute, flag in UNKNOWN:
        value = getattr(args, attribute, None)
        if value:
            raise ValueError(f"{flag} {value}: the planner cannot price this")
    model, parallel = _model(args, settings), _parallel(args, settings)
    check(model, parallel)
    return model, parallel


def _model(args: argparse.Namespace, settings: Settings) -> Model:
    latent = args.multi_latent_attention
    head_dim, v_head_dim = head_sizes(args)
    grouped = args.group_query_attention and not latent
    experts = args.num_experts or 1
    vocab = args.vocab_size or args.padded_vocab_size
    if not vocab:
        raise ValueError(
            f"--tokenizer-type {args.tokenizer_type}: the flags do not give the vocabulary size: add --vocab-size"
        )
    return Model(
        name="the model",
        layers=args.num_layers,
        hidden=args.hidden_size,
        heads=args.num_attention_heads,
        kv_heads=args.num_query_groups if grouped else args.num_attention_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        ffn_hidden=args.ffn_hidden_size,
        gated=bool(args.swiglu or getattr(args, "quick_geglu", False)),
        vocab=vocab,
        tied=not args.untie_embeddings_and_output_weights,
        positions=args.max_position_embeddings if args.position_embedding_type == "learned_absolute" else 0,
        norm="rms" if args.normalization == "RMSNorm" else "layer",
        bias=args.add_bias_linear,
        qkv_bias=args.add_qkv_bias,
        qk_norm=args.qk_layernorm and not latent,
        **_attention(args, settings),
        ffn_pattern=_ffn_pattern(args),
        experts=experts,
        top_k=min(args.moe_router_topk, experts),
        expert_hidden=(args.moe_ffn_hidden_size or 0) if experts > 1 else 0,
        shared_hidden=args.moe_shared_expert_intermediate_size or 0,
        q_rank=(args.q_lora_rank or 0) if latent else 0,
        kv_rank=args.kv_lora_rank if latent else 0,
        rope_dim=args.qk_pos_emb_head_dim if latent else 0,
        predicted=args.mtp_num_layers or 0,
    )


def _attention(args: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """The layers with linear attention or a window."""
    linear, window = settings.linear, None if args.window_size is None else tuple(args.window_size)
    skip = getattr(args, "window_attn_skip_freq", None)

    def letter(number: int) -> str:
        if linear is not None and linear.has(number):
            return LINEAR
        within = skip is None or (number % skip if isinstance(skip, int) else skip[number - 1])
        return WINDOW if window is not None and within else SOFTMAX

    return {
        "attention_pattern": _shortest("".join(letter(number) for number in range(1, args.num_layers + 1))),
        "window": window,
        "linear": "" if linear is None else linear.variant,
    }


def _ffn_pattern(args: argparse.Namespace) -> str:
    if not args.num_experts:
        return DENSE
    freq = args.moe_layer_freq
    if isinstance(freq, int):
        return EXPERTS + DENSE * (freq - 1)
    return _shortest("".join(EXPERTS if experts else DENSE for experts in freq))


def _shortest(letters: str) -> str:
    """The shortest pattern that yields these letters when repeated."""
    return next(
        letters[:n] for n in range(1, len(letters) + 1) if (letters[:n] * len(letters))[: len(letters)] == letters
    )


def _parallel(args: argparse.Namespace, settings: Settings) -> Parallel:
    full = args.recompute_granularity == "full"
    group = args.recompute_num_layers if full and args.recompute_method == "uniform" else 1
    return Parallel(
        devices=args.world_size,
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size if args.num_experts else 0,
        virtual=args.virtual_pipeline_model_parallel_size or 1,
        sequence_parallel=args.sequence_parallel,
        zero=_zero(args),
        overlap_gradients=args.overlap_grad_reduce or _zero(args) == 3,
        overlap_parameters=args.overlap_param_gather or _zero(args) == 3,
        recompute=args.recompute_granularity or "none",
        recompute_modules=tuple(args.recompute_modules or ("core_attn",)),
        recompute_layers=args.recompute_num_layers if full and args.recompute_method == "block" else 0,
        recompute_group=group or 1,
        recompute_attention=settings.recompute_attention,
        micro_batch=args.micro_batch_size,
        global_batch=args.global_batch_size,
        seq_length=checks.run_of(args, settings).padded(args.seq_length),
        dtype=dtype_name(args.params_dtype),
        gemm_dtype="float8" if args.fp8 else "",
        vocab_multiple=args.make_vocab_size_divisible_by if args.vocab_size else 1,
    )


def _zero(args: argparse.Namespace) -> int:
    if args.use_torch_fsdp2:
        return 3
    if getattr(args, "use_megatron_fsdp", False):
        strategies = ("no_shard", "optim", "optim_grads", "optim_grads_params")
        return strategies.index(args.data_parallel_sharding_strategy)
    return int(args.use_distributed_optimizer)
