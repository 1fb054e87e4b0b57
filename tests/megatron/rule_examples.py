"""Runs, layers and calls to which no rule applies, and what a rule refuses of them."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from cp_plugin import Options
from cp_plugin.megatron.flags.args import Settings, add_arguments, settings_from
from cp_plugin.megatron.rules.rule import Rule
from cp_plugin.megatron.rules.run import Run

RING = Settings(provider="ring", options=Options(layout="contiguous"))


class Example(NamedTuple):
    """What a rule refuses of a layer, a call or a generation."""

    names: str
    """As the message names it."""
    args: dict[str, Any]
    """Fields that differ from the base."""


def example(names: str, **args: Any) -> Example:
    return Example(names, args)


BASE = {
    "attention_dropout": 0.0,
    "context_parallel_size": 4,
    "seq_length": 64,
    "encoder_seq_length": None,
    "calculate_per_token_loss": False,
    "use_torch_fsdp2": False,
    "num_experts": None,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_router_enable_expert_bias": False,
    "tp_comm_overlap": False,
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
LINEAR = "--cp-linear-attention gla --cp-layer-pattern LL --cp-layout zigzag"


def attribute(flag: str) -> str:
    return flag.removeprefix("linear ").removeprefix("--").replace("-", "_")


@cache
def megatrons_parser() -> argparse.ArgumentParser:
    """Megatron's flags, each with the values of any version."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    for action in parser._actions:
        action.choices = None
    return parser


def run_of(line: str, *, linear: bool = False, version: str = "0.19.0", **args: Any) -> Run:
    """The run of a command line: Megatron's flags as its parser reads them, and those of other versions by their words.

    args: attributes that no flag sets.
    """
    words = shlex.split(f"{LINEAR if linear else '--cp-provider ring'} {line}")
    own, words = add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_known_args(words)
    parser = megatrons_parser()
    given, others = parser.parse_known_args(words)
    found = {a.dest: getattr(given, a.dest) for a in parser._actions if {*a.option_strings} & {*words}}
    for flag, *values in (text.split() for text in re.findall(r"--[^ ]+(?: (?!--)[^ ]+)*", " ".join(others))):
        found[attribute(flag)] = _value(values[0]) if len(values) == 1 else [*map(_value, values)] or True
    device = torch.device("cuda" if own.cp_device == "cuda" else "cpu")
    names = argparse.Namespace(**BASE | found | args)
    settings = settings_from(argparse.Namespace(**vars(own) | vars(names)))
    return Run(args=names, settings=settings, version=version, device=device)


def _value(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (SyntaxError, ValueError):
        return word


def examples_of(rule: Rule) -> list[str]:
    return rule.example.split(" | ")


def run_that(rule: Rule, line: str) -> Run:
    """The run of an example: of the newest Megatron to which the rule applies."""
    runs = [run_of(line, linear=rule.name.startswith("linear "), version=version) for version in ("0.19.0", "0.18.2")]
    return next((run for run in runs if rule.of(run)), runs[0])


def check_run(rule: Rule, line: str) -> None:
    """The message names the flag, its value and the fix; what a rule adjusts is right after it."""
    run = run_that(rule, line)
    said = rule.of(run)
    flag, *values = line.partition(" --")[0].split()
    if rule.kind == "refuse":
        check(rule, said, "")
        assert said and flag in said and all(value in said for value in values), f"{line!r} is not named: {said}"
    elif rule.kind == "adjust":
        assert said and "--" in said and rule.sets
        vars(run.args).update(rule.sets)
        assert rule.of(run) is None, f"{rule.name!r} still applies"


def check(rule: Rule, said: str | None, names: str) -> None:
    """The message names what it is about, and the fix."""
    assert said is not None, f"{rule.name!r} does not apply to its example"
    assert names in said or re.search(names, said), said
    assert "{" not in said.replace("{}", ""), said
    if rule.kind == "refuse":
        assert rule.fix, "it does not say what to do"
        assert re.search(re.sub(r"\\?{\w+\\?}", ".*", re.escape(rule.fix)), said), said


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
