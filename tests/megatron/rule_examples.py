"""Examples of rules: for each, what it refuses, and the base of which that is a change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from cp_plugin import Options
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.rules.rule import Rule

RING = Settings(provider="ring", options=Options(layout="contiguous"))


@dataclass(frozen=True, kw_only=True)
class Example:
    """A subject that a rule refuses."""

    names: str
    """Flag and value, as the message names them."""
    args: Mapping[str, Any]
    """Arguments of the run, or fields of the layer or the call, that differ from the base."""
    settings: Settings
    version: str
    device: str | None


def example(
    names: str, *, settings: Settings = RING, version: str = "0.19.0", device: str | None = "cpu", **args: Any
) -> Example:
    return Example(names=names, args=args, settings=settings, version=version, device=device)


def check(rule: Rule, said: str | None, names: str) -> None:
    """The message names the flag, its value and the fix."""
    assert said is not None, f"{rule.name!r} does not apply to its example"
    assert names in said or re.search(names, said), said
    assert "{" not in said.replace("{}", ""), said
    if rule.kind == "refuse":
        assert rule.fix, "it does not say what to do"
        assert re.search(re.sub(r"\\?{\w+\\?}", ".*", re.escape(rule.fix)), said), said


PADDED = replace(RING, pad_sequence=True)
PLACED = Settings(provider="needed", options=Options(layout="documents"))
FP8 = Settings(provider="ring", options=Options(fp8="compute"))
BASE = {
    "attention_dropout": 0.0,
    "context_parallel_size": 4,
    "seq_length": 64,
    "encoder_seq_length": None,
    "calculate_per_token_loss": True,
    "use_torch_fsdp2": False,
    "num_experts": None,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "mtp_num_layers": None,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "multi_latent_attention": False,
    "position_embedding_type": "rope",
    "apply_rope_fusion": False,
    "create_attention_mask_in_dataloader": False,
    "pipeline_model_parallel_size": 1,
    "micro_batch_size": 2,
    "spec": None,
    "deterministic_mode": False,
    "num_layers": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "num_attention_heads": 4,
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "window_size": None,
    "fp8_dot_product_attention": False,
}
"""Arguments of a run to which no rule applies."""


def attribute(flag: str) -> str:
    return flag.removeprefix("linear ").removeprefix("--").replace("-", "_")


SWITCHES = """
--rl-use-sequence-packing --reset-attention-mask --reset-position-ids --cache-mla-latents --mla-down-proj-fusion
--qk-clip --log-max-attention-logit --use-kitchen-attention --batch-invariant-mode --fp8-dot-product-attention
--fp8-multi-head-attention --fine-grained-activation-offloading --is-hybrid-model
--hybrid-context-parallel --dynamic-context-parallel --fake-process-group --enable-cuda-graph --external-cuda-graph
--overlap-moe-expert-parallel-comm --perform-rl-step --log-straggler
"""
FLAGS = dict.fromkeys(SWITCHES.split(), True) | {
    "--attention-dropout": 0.1,
    "--max-seqlen-per-dp-cp-rank": 4096,
    "--sequence-packing-scheduler": "dp_balanced",
    "--pad-packed-seq-alignment": 16,
    "--cp-partition-mode": "contiguous",
    "--experimental-attention-variant": "dsa",
    "--attention-backend": "local",
    "--position-embedding-type": "relative",
    "--cpu-offloading-num-layers": 1,
    "--rerun-mode": "report_stats",
    "--linear-attention-freq": 2,
    "--heterogeneous-layers-config-path": "x.json",
    "--heterogeneous-layers-config-encoded-json": "{}",
    "--transformer-impl": "inference_optimized",
    "--hierarchical-context-parallel-sizes": [2, 2],
    "--cp-comm-type": ["a2a"],
    "--cuda-graph-impl": "local",
    "--logits-save-dir": "x",
    "--logits-load-dir": "x",
    "linear --mtp-num-layers": 1,
    "linear --hybrid-layer-pattern": "M*",
    "linear --hybrid-override-pattern": "M*",
    "linear --multi-latent-attention": True,
    "linear --init-model-with-meta-device": True,
    "linear --use-megatron-fsdp": True,
    "linear --use-torch-fsdp2": True,
}
ROUTED = {
    "seq_length": 62,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_enable_expert_bias": False,
    "tp_comm_overlap": False,
}


def padded(names: str, **args: Any) -> Example:
    return example(names, settings=PADDED, **ROUTED | args)


RUNS = {
    "fields that the plugin does not know": example("--add-qkv-bias: Megatron's own", add_qkv_bias=True),
    "position embeddings of MLA": example(
        "--position-embedding-type yarn", multi_latent_attention=True, position_embedding_type="yarn"
    ),
    "hybrid D": example("D in --hybrid-layer-pattern D*", hybrid_layer_pattern="D*"),
    "local attention of the dev branch": example(
        "setting --cp-comm-type to all_gather",
        fallback_to_eager_attn=False,
        transformer_impl="local",
        cp_comm_type=["p2p"],
    ),
    "exchange of gated delta net": example("--cp-comm-type is unset", hybrid_layer_pattern="G*", cp_comm_type=["p2p"]),
    "chunks of gated delta net": example(
        "setting --linear-cp-mode to headwise", hybrid_layer_pattern="G*", linear_cp_mode="chunkwise"
    ),
    "hybrid without attention": example("--hybrid-layer-pattern M-", hybrid_layer_pattern="M-"),
    "packed micro-batches in a pipeline": example(
        "--sft with --pipeline-model-parallel-size 2 and --micro-batch-size 2",
        sft=True,
        pipeline_model_parallel_size=2,
    ),
    "words of --spec": example("--spec local", spec=["local"]),
    "module of --spec": example("--spec no.such layer", spec=["no.such", "layer"]),
    "name of --spec": example("--spec json no_layer", spec=["json", "no_layer"]),
    "mask of the data loader": example(
        "--no-create-attention-mask-in-dataloader", create_attention_mask_in_dataloader=True
    ),
    "fused rotation of MLA": example("--no-rope-fusion", multi_latent_attention=True, apply_rope_fusion=True),
    "fused rotation of packed documents": example("--no-rope-fusion", sft=True, apply_rope_fusion=True),
    "blockwise FP8": example("--fp8-recipe blockwise", settings=FP8, fp8="e4m3", fp8_recipe="blockwise"),
    "custom FP8": example("--fp8-recipe custom", settings=FP8, fp8="e4m3", fp8_recipe="custom"),
    "first and last layers in bfloat16": example("--first-last-layers-bf16", settings=FP8, first_last_layers_bf16=True),
    "recipes of linear layers": example("--fp8-recipe mxfp8", settings=FP8, fp8="e4m3", fp8_recipe="mxfp8"),
    "determinism on CUDA": example("--deterministic-mode", device="cuda", deterministic_mode=True),
    "sequence length": example("--seq-length 62", seq_length=62),
    "losses of experts": example("--moe-aux-loss-coeff 0.01", version="0.18.2", num_experts=4, moe_aux_loss_coeff=0.01),
    "capacity of experts": example(
        "--moe-expert-capacity-factor 1.5: .*, or use --moe-expert-capacity-factor 2",
        **ROUTED | {"seq_length": 64, "moe_expert_capacity_factor": 1.5},
    ),
    "sinkhorn": example(
        "--moe-router-load-balancing-type sinkhorn",
        **ROUTED | {"seq_length": 64, "moe_router_load_balancing_type": ["sinkhorn"]},
    ),
    "balance of each sequence in packs": example(
        "--sft and --moe-router-load-balancing-type seq_aux_loss with --micro-batch-size 2",
        **ROUTED | {"seq_length": 64, "moe_router_load_balancing_type": "seq_aux_loss", "micro_batch_size": 2},
        moe_aux_loss_coeff=0.01,
        sft=True,
    ),
    "balancing of padding": padded(
        "--moe-router-load-balancing-type quantile_balancing with 2 tokens",
        moe_router_load_balancing_type=["quantile_balancing"],
    ),
    "expert bias and padding": padded("--moe-router-enable-expert-bias", moe_router_enable_expert_bias=True),
    "experts in padded micro-batches of packs": padded(
        "--sft and --num-experts with --micro-batch-size 3 and 2 tokens", sft=True, micro_batch_size=3
    ),
    "overlapped tensor parallelism and padding": padded("--tp-comm-overlap with 2 tokens", tp_comm_overlap=True),
    "gradients of torch's FSDP": example("--use-torch-fsdp2", use_torch_fsdp2=True),
    "gradients averaged in the collective": example("--ddp-average-in-collective", ddp_average_in_collective=True),
    "layout of attention": example(
        "--attention-cp-layout contiguous conflicts with tokens in the striped layout",
        settings=Settings(provider="striped"),
        attention_cp_layout="contiguous",
    ),
    "sizes of the model": example("--num-layers -1, --hidden-size 0", num_layers=-1, hidden_size=0),
    "documents to be placed": example("--cp-layout documents without packed documents", settings=PLACED),
    "padding that is placed with documents": example(
        "--cp-layout documents and --num-experts with 2 tokens of padding",
        settings=replace(PLACED, pad_sequence=True),
        num_experts=4,
        seq_length=61,
        sft=True,
    ),
    "multimodal positions of packs": example(
        r"--position-embedding-type mrope with packed documents \(--sft\)", sft=True, position_embedding_type="mrope"
    ),
    "layout of hybrid layers": example("--linear-cp-layout", linear_cp_layout="contiguous"),
    "losses per token": example("--calculate-per-token-loss", calculate_per_token_loss=False),
    "upstream on the CPU": example("--context-parallel-size 4", settings=Settings()),
    "linear layers": example("--cp-layer-pattern LLL has 3 letters, which does not divide --num-layers 4"),
    "linear heads": example(
        "--cp-linear-attention gla splits the key/value heads .* --tensor-model-parallel-size 4",
        tensor_model_parallel_size=4,
    ),
}
ALSO = {
    "recipes of linear layers": [example("--fp4-format", settings=FP8, fp4="e2m1")],
    "determinism on CUDA": [example("--deterministic-mode", device=None, deterministic_mode=True)],
    "capacity of experts": [
        example("--moe-expert-rank-capacity-factor 2", **ROUTED | {"seq_length": 64}, moe_expert_rank_capacity_factor=2)
    ],
    "words of --spec": [example("--spec a b c", spec=["a", "b", "c"])],
    "position embeddings of MLA": [
        example("--position-embedding-type mrope", multi_latent_attention=True, position_embedding_type="mrope")
    ],
    "losses of experts": [
        example("--moe-z-loss-coeff 0.1", version="0.18.2", num_experts=4, moe_z_loss_coeff=0.1),
        example("--moe-aux-loss-coeff", version="0.18.2", num_experts=4, moe_aux_loss_coeff=[0.0, 0.1]),
    ],
}
"""Further examples: one for each alternative of a rule."""
LAYERS = {
    "cross-attention": example("cross attention", attention_type="cross"),
    "layer with a fused rotation of MLA": example(
        "RoPE fusion", args={"multi_latent_attention": True, "apply_rope_fusion": True}
    ),
    "dropout of a layer": example("--attention-dropout 0.1", dropout=0.1),
    "FP8 attention of a layer": example("--fp8-dot-product-attention", args={"fp8_dot_product_attention": True}),
    "linear layer with a scale": example("softmax_scale 0.5", scale=0.5),
    "linear layer with a window": example("--window-size", args={"window_size": (8, 0)}),
    "linear layer with fused q, k and v": example("fused_single_qkv_rope", args={"fused_single_qkv_rope": True}),
}
Q = torch.empty(8, 2, 4, 16)
CALLS = {
    "shape of a call": example("queries of shape (8, 4, 16)", query=Q[:, 0]),
    "dynamic groups of a call": example("--hybrid-context-parallel", packed=SimpleNamespace(local_cp_size=2)),
    "partition of a pack": example(
        "cp_partition_mode 'contiguous'", packed=SimpleNamespace(cp_partition_mode="contiguous")
    ),
    "bias of a call": example("an attention bias", attention_bias=torch.zeros(1)),
    "mask type of a call": example("the attention mask type padding", mask_type="padding"),
    "padding of a call": example("the attention mask type no_mask", mask_type="no_mask", pads=True),
    "mask of a call": example("shape (1, 8)", attention_mask=torch.zeros(1, 8)),
    "cache of a call": example("1 queries and 8 keys", query=Q[:1]),
    "capture of a call": example("being captured in a CUDA graph", capturing=True),
}


CONFIGS: dict[str, tuple[str, Any]] = {
    "config.model": ("(object)", object()),
    "config.model.provide": ("(Own)", None),
    "config.model.use_transformer_engine_full_layer_spec": ("= True", True),
    "config.model.restore_modelopt_state": ("= True", True),
    "config.dataset": ("(object)", object()),
    "config.dataset.inter_document_masking": ("= True", True),
    "config.dataset.offline_packing_specs.packed_sequence_size": ("= 66", 66),
    "config.dataset.dataset_kwargs": ("(dict)", {"pad_seq_length_to_mult": 6}),
    "config.peft": ("(object)", object()),
    "config.inprocess_restart.enabled": ("= True", True),
    "config.dist.use_decentralized_pg": ("= True", True),
    "config.dist.lazy_mpu_init": ("= True", True),
    "config.model.seq_length": ("= 66", 66),
    "config.model.mtp_num_layers": ("= 1", 1),
    "config.model.fp8": ("= 'hybrid'", "hybrid"),
    "config.model.tp_comm_overlap": ("= True", True),
    "config.dist.use_megatron_fsdp": ("= True", True),
}
