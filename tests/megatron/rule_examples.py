"""Runs, layers, calls and generations to which no rule applies, and what a rule refuses of them."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from cp_plugin import Options
from cp_plugin.megatron.flags.args import Settings, settings_from
from cp_plugin.megatron.rules.layers import Call, Continued, Layer
from cp_plugin.megatron.rules.rule import Rule
from cp_plugin.megatron.rules.run import Run

RING = Settings(provider="ring", options=Options(layout="contiguous"))
PLAIN = (
    "--context-parallel-size 4 --seq-length 64 --micro-batch-size 2 --num-layers 4 --num-attention-heads 4 "
    "--group-query-attention --num-query-groups 2 --moe-router-topk 2 --attention-dropout 0 --no-rope-fusion "
    "--position-embedding-type rope --no-create-attention-mask-in-dataloader"
)
"""Flags of a run to which no rule applies."""
LINEAR = "--cp-linear-attention gla --cp-layer-pattern LL --cp-layout zigzag"
Q = torch.empty(8, 2, 4, 16)
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "cross-attention": ("cross attention", {"attention_type": "cross"}),
    "layer with a fused rotation of MLA": (
        "RoPE fusion",
        {"args": {"multi_latent_attention": True, "apply_rope_fusion": True}},
    ),
    "dropout of a layer": ("--attention-dropout 0.1", {"dropout": 0.1}),
    "FP8 attention of a layer": ("--fp8-dot-product-attention", {"args": {"fp8_dot_product_attention": True}}),
    "linear layer with a scale": ("softmax_scale 0.5", {"scale": 0.5}),
    "linear layer with a window": ("--window-size", {"args": {"window_size": (8, 0)}}),
    "linear layer with fused q, k and v": ("fused_single_qkv_rope", {"args": {"fused_single_qkv_rope": True}}),
}
"""Rule -> what it names, and the fields that it refuses."""
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "shape of a call": ("queries of shape (8, 4, 16)", {"query": Q[:, 0]}),
    "dynamic groups of a call": ("--hybrid-context-parallel", {"packed": SimpleNamespace(local_cp_size=2)}),
    "partition of a pack": (
        "cp_partition_mode 'contiguous'",
        {"packed": SimpleNamespace(cp_partition_mode="contiguous")},
    ),
    "bias of a call": ("an attention bias", {"attention_bias": torch.zeros(1)}),
    "mask type of a call": ("the attention mask type padding", {"mask_type": "padding"}),
    "padding of a call": ("the attention mask type no_mask", {"mask_type": "no_mask", "pads": True}),
    "mask of a call": ("shape (1, 8)", {"attention_mask": torch.zeros(1, 8)}),
    "cache of a call": ("1 queries and 8 keys", {"query": Q[:1]}),
    "capture of a call": ("being captured in a CUDA graph", {"capturing": True}),
}
GENERATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "pipeline stages of a generation": ("--pipeline-model-parallel-size 2", {"stages": 2}),
    "attention of a generation": ("none of this model's attention layers", {"layers": 0}),
    "sequence parallelism of a generation": ("--sequence-parallel", {"sequence_parallel": True}),
    "states of a generation": ("Mamba layers (M)", {"stateful": "Mamba layers (M)"}),
    "layouts of a generation": ("--linear-cp-layout contiguous", {"converted": True}),
    "other attention of a generation": ("TEDotProductAttention", {"other_attention": "TEDotProductAttention"}),
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


def layer(args: dict[str, Any] | None = None, **fields: Any) -> Layer:
    plain = vars(run_of("").args) | {"fp8_dot_product_attention": False}
    return Layer(args=SimpleNamespace(**plain | (args or {})), settings=RING, **fields)


def call(mask_type: str = "causal", **fields: Any) -> Call:
    from megatron.core.transformer.enums import AttnMaskType

    plain = {"query": Q, "key": Q, "attention_mask": None, "attention_bias": None, "packed": None}
    return Call(**plain | fields, mask_type=AttnMaskType[mask_type])


SUBJECTS = {
    "a layer": (layer, LAYERS),
    "a linear layer": (layer, LAYERS),
    "a call of a layer": (call, CALLS),
    "generation": (Continued, GENERATIONS),
}
"""Group of ``checks.RULES`` that no flags describe -> how its subjects are made, and the examples of its rules."""


def attribute(flag: str) -> str:
    return flag.removeprefix("linear ").removeprefix("--").replace("-", "_")


@cache
def flags_parser() -> argparse.ArgumentParser:
    """Megatron's flags and the plugin's (where it is activated), each with the values of any version."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    for action in parser._actions:
        action.choices = None
    return parser


def run_of(line: str, *, linear: bool = False, version: str = "0.19.0") -> Run:
    """The run of a command line: flags as the parser reads them, those of other versions by their words."""
    words = shlex.split(f"{PLAIN} {LINEAR if linear else '--cp-provider ring'} {line}")
    args, others = flags_parser().parse_known_args(words)
    for flag, *values in (text.split() for text in re.findall(r"--[^ ]+(?: (?!--)[^ ]+)*", " ".join(others))):
        setattr(args, attribute(flag), _value(values[0]) if len(values) == 1 else [*map(_value, values)] or True)
    args.rank, device = 0, torch.device(args.cp_device or "cpu")
    return Run(args=args, settings=settings_from(args), version=version, device=device)


def _value(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (SyntaxError, ValueError):
        return word


def run_that(rule: Rule, line: str) -> Run:
    """The run of an example: of the newest Megatron to which the rule applies."""
    runs = [run_of(line, linear=rule.name.startswith("linear "), version=version) for version in ("0.19.0", "0.18.2")]
    return next((run for run in runs if rule.message(run)), runs[0])


def check_run(rule: Rule, line: str) -> None:
    """The message names the flag, its value and the fix; what a rule adjusts is right after it."""
    run = run_that(rule, line)
    said = rule.message(run)
    flag, *values = line.partition(" --")[0].split()
    if rule.kind == "adjust":
        assert said and "--" in said and rule.sets
        vars(run.args).update(rule.sets)
        assert rule.message(run) is None, f"{rule.name!r} still applies"
    else:
        check(rule, said, "")
        named = [flag, *(values if rule.kind == "refuse" else ())]
        assert said and all(word in said for word in named), f"{line!r} is not named: {said}"


def check(rule: Rule, said: str | None, names: str) -> None:
    """The message names what it is about, and the fix."""
    assert said is not None, f"{rule.name!r} does not apply to its example"
    assert names in said or re.search(names, said), said
    assert "{" not in said.replace("{}", ""), said
    if rule.kind == "refuse":
        assert rule.fix, "it does not say what to do"
        assert re.search(re.sub(r"\\?{[\w.\\]+}", ".*", re.escape(rule.fix)), said), said
