"""Rules of layers: of a layer and its calls, for what a ``--spec`` or a script requests beyond the flags; of linear
attention; and of models that can be decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.rules import flags
from cp_plugin.megatron.rules.cuda_graphs import CUDA_GRAPH
from cp_plugin.megatron.rules.fields import UNKNOWN
from cp_plugin.megatron.rules.rule import Match, Rule, flag, refuse, shown, when

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cp_plugin.megatron.rules.run import Run


CAUSAL = {"causal": True, "padding_causal": True, "no_mask": False, "padding": False}
"""Supported mask types -> whether causal."""
_OF_PACKED = ("padding", "padding_causal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A core attention under construction."""

    args: TransformerConfig  # its fields are named like the parsed flags
    settings: Settings
    attention_type: str = "self"
    dropout: float = 0.0
    scale: float | None = None  # softmax_scale; None: the default


class Call(NamedTuple):
    """The arguments of a core attention's forward."""

    query: Tensor
    key: Tensor
    attention_mask: Tensor | None
    mask_type: AttnMaskType
    attention_bias: Tensor | None
    packed: PackedSeqParams | None
    layout: str = "zigzag"
    capturing: bool = False  # inside a CUDA graph capture
    pads: bool = False  # ``--cp-pad-sequence``


LAYER = (
    Rule(
        name="cross-attention",
        what="{0.attention_type} attention",
        why="only self-attention is sharded over ranks",
        fix="use --cp-provider upstream for this model",
        looks_at=lambda layer: layer.attention_type != "self",
    ),
    Rule(
        name="layer with a fused rotation of MLA",
        what="RoPE fusion in multi-latent attention",
        why="it is not tested with the plugin",
        fix="use --no-rope-fusion",
        looks_at=lambda layer: layer.args.multi_latent_attention and layer.args.apply_rope_fusion,
    ),
    replace(
        flags.DROPOUT,
        name="dropout of a layer",
        looks_at=lambda layer: when(layer.dropout != 0, value=shown(layer.dropout)),
    ),
    flags.QK_CLIP,
    flags.MAX_LOGIT,
    UNKNOWN,
    flags.VARIANT,
    replace(
        flags.FP8_ATTENTION,
        name="FP8 attention of a layer",
        looks_at=lambda layer: when(
            layer.args.fp8_dot_product_attention and layer.settings.options.fp8 != "compute", value=""
        ),
    ),
    flags.FP8_BETWEEN,
    flags.BATCH_INVARIANT,
    flags.PARTITION,
    CUDA_GRAPH,
)
LINEAR_LAYER = (
    Rule(
        name="linear layer with a scale",
        what="a scale of the scores (softmax_scale {0.scale})",
        why="linear attention has a scale of its own",
        fix="leave it out",
        looks_at=lambda layer: layer.scale is not None,
    ),
    Rule(
        name="linear layer with a window",
        what="a sliding window (--window-size)",
        why="all layers of this model are linear",
        fix="leave it out, or keep some softmax layers: --cp-layer-pattern LLLN",
        looks_at=lambda layer: (
            layer.args.window_size is not None and not (layer.settings.linear and layer.settings.linear.hybrid)
        ),
    ),
    Rule(
        name="linear layer with fused q, k and v",
        what="fused_single_qkv_rope",
        why="it leaves no place to compute a gate",
        fix="set it to False in the configuration",
        looks_at=lambda layer: getattr(layer.args, "fused_single_qkv_rope", False),
    ),
)
CALL = (
    Rule(
        name="shape of a call",
        what="queries of shape {shape}, packed documents (THD): {packed}",
        fix="pass [s/cp, b, h, d], or [t/cp, h, d] with packed_seq_params",
        looks_at=lambda call: when(
            call.query.dim() != (4 if call.packed is None else 3),
            shape=tuple(call.query.shape),
            packed=call.packed is not None,
        ),
    ),
    Rule(
        name="dynamic groups of a call",
        what="dynamic context parallelism (--hybrid-context-parallel)",
        why="its groups change from batch to batch",
        fix="leave it out",
        looks_at=lambda call: getattr(call.packed, "local_cp_size", None) is not None,
    ),
    Rule(
        name="partition of a pack",
        what="packed documents with cp_partition_mode {0.packed.cp_partition_mode!r}",
        why="they are in the {0.layout} layout",
        fix="leave it out, and choose the layout with --cp-layout",
        # newer packs name their layout (Megatron-LM #6912); zigzag is the default, and stands for the provider's
        looks_at=lambda call: getattr(call.packed, "cp_partition_mode", "zigzag") not in ("zigzag", call.layout),
    ),
    Rule(
        name="bias of a call",
        what="an attention bias",
        why="the kernels do not add a bias to the scores",
        fix="pass None",
        looks_at=lambda call: call.attention_bias is not None,
    ),
    Rule(
        name="mask type of a call",
        what="the attention mask type {0.mask_type.name}",
        why="only causal and no_mask are supported",
        fix="use one of these",
        looks_at=lambda call: (
            call.mask_type.name not in CAUSAL or (call.mask_type.name in _OF_PACKED and call.packed is None)
        ),
    ),
    Rule(
        name="padding of a call",
        what="the attention mask type {0.mask_type.name} with --cp-pad-sequence",
        why="every token would attend to the padding",
        fix="use a causal mask, or a --seq-length that needs no padding, without --cp-pad-sequence",
        looks_at=lambda call: call.pads and call.packed is None and not CAUSAL.get(call.mask_type.name, True),
    ),
    Rule(
        name="mask of a call",
        what="an attention mask tensor (got one of shape {shape})",
        why="the mask type determines the mask, here {0.mask_type.name}",
        fix="pass None as attention_mask (--no-create-attention-mask-in-dataloader)",
        looks_at=lambda call: call.attention_mask is not None and {"shape": tuple(call.attention_mask.shape)},
    ),
    Rule(
        name="cache of a call",
        what="a key/value cache ({queries} queries and {keys} keys)",
        why="this layer is for training, not for inference",
        fix="generate with decoding() of cp_plugin.megatron.inference",
        looks_at=lambda call: when(len(call.query) != len(call.key), queries=len(call.query), keys=len(call.key)),
    ),
    Rule(
        name="capture of a call",
        what="being captured in a CUDA graph",
        why="its communication cannot be captured",
        fix="use --cuda-graph-impl transformer_engine and name parts without attention: mlp, moe or moe_router",
        looks_at=lambda call: call.capturing,
    ),
)


def check_layer(rules: tuple[Rule, ...], layer: Layer) -> None:
    """ValueError for everything unsupported in a layer."""
    refuse(rules, layer, prefix=f"{layer.settings.flag} does not support ")


def refuse_more(layer_number: int, more: Mapping[str, Any]) -> None:
    """ValueError for arguments of a later Megatron that ask for something."""
    for name, value in more.items():
        if value is not None and value is not False:
            raise ValueError(
                f"layer {layer_number}: this Megatron passes {name}={value!r} to attention, which cp_plugin does not "
                "know: use a Megatron without it, or --cp-provider upstream"
            )


def check_call(layer_number: int, settings: Settings, *call: Any) -> None:
    """ValueError for everything unsupported in a call; ``call``: the first fields of a ``Call``."""
    subject = Call(*call, pads=settings.pad_sequence)
    subject = subject._replace(capturing=subject.query.is_cuda and torch.cuda.is_current_stream_capturing())
    refuse(CALL, subject, prefix=f"layer {layer_number}: {settings.flag} does not support ")


_SHARDED = "sharding linear attention's own weights with FSDP is not tested"
_PATTERN = "its symbols define every layer, and none of them stands for linear attention"


def _layers(run: Run) -> Match:
    assert run.settings.linear is not None
    length = len(run.settings.linear.pattern)
    return when(run.args.num_layers % length, length=length)


def _heads(run: Run) -> Match:
    args = run.args
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return when(groups % args.tensor_model_parallel_size, groups=groups)


MLA = flag("--multi-latent-attention", why="its layers compute no gate, and its head sizes are not tested", linear=True)
LINEAR = (
    flag(
        "--mtp-num-layers",
        example="1",
        why="multi-token prediction (MTP) restarts layer numbers at 1, which would shift the layer pattern",
        linear=True,
    ),
    flag("--hybrid-layer-pattern", example="M*", why=_PATTERN, linear=True),
    flag("--hybrid-override-pattern", example="M*", why=_PATTERN, linear=True),
    MLA,
    flag(
        "--init-model-with-meta-device",
        why="linear attention initializes its weights head by head, not on a meta device",
        linear=True,
    ),
    flag("--use-megatron-fsdp", why=_SHARDED, linear=True),
    flag("--use-torch-fsdp2", why=_SHARDED, linear=True),
    Rule(
        name="linear layers",
        example="--cp-layer-pattern LLL",
        what="--cp-layer-pattern {0.settings.linear.pattern} has {length} letters, which does not divide "
        "--num-layers {0.args.num_layers}",
        why="the pattern is repeated over the layers",
        fix="use a pattern whose length divides the number of layers",
        looks_at=_layers,
        sentence=True,
        late=True,
    ),
    Rule(
        name="linear heads",
        example="--tensor-model-parallel-size 4",
        what="--cp-linear-attention {0.settings.linear.variant} splits the key/value heads across the tensor-parallel "
        "ranks",
        why="{groups} heads (--num-query-groups) is not a multiple of --tensor-model-parallel-size "
        "{0.args.tensor_model_parallel_size}",
        fix="use a smaller --tensor-model-parallel-size, or a larger --num-query-groups",
        looks_at=_heads,
        sentence=True,
        late=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """A model to decode with."""

    stages: int = 1  # pipeline stages
    layers: int = 1  # attention layers with a cache
    sequence_parallel: bool = False
    stateful: str = ""  # layers whose state is not kept between tokens
    converted: bool = False  # attention has another layout than the other layers
    other_attention: str = ""  # an attention class that is neither the plugin's nor Megatron's


CONTINUED = (
    Rule(
        name="pipeline stages of a generation",
        what="generation runs on one pipeline stage, got --pipeline-model-parallel-size {0.stages}",
        fix="use 1; a torch_dist checkpoint can be loaded with any number of stages",
        looks_at=lambda model: model.stages > 1,
    ),
    Rule(
        name="attention of a generation",
        what="generation supports none of this model's attention layers",
        fix="use --transformer-impl local",
        looks_at=lambda model: model.layers == 0,
    ),
    Rule(
        name="sequence parallelism of a generation",
        what="generation runs without --sequence-parallel",
        why="it would split single tokens",
        fix="leave it out",
        looks_at=lambda model: model.sequence_parallel,
    ),
    Rule(
        name="states of a generation",
        what="generation cannot continue {0.stateful}",
        why="the plugin does not keep their state between tokens",
        fix="use a model without them",
        looks_at=lambda model: model.stateful,
    ),
    Rule(
        name="layouts of a generation",
        what="generation runs without --linear-cp-layout contiguous",
        why="it shards a prompt in attention's layout",
        fix="leave it out",
        looks_at=lambda model: model.converted,
    ),
    Rule(
        name="other attention of a generation",
        what="generation cannot continue {0.other_attention}",
        fix="use --transformer-impl local, or two or more context-parallel ranks with --cp-provider",
        looks_at=lambda model: model.other_attention,
    ),
)
