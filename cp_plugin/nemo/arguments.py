"""Bridge configs as the namespace of Megatron's parser, so that the plugin's checks apply to both.

    config.model, .train, .dist, ...  --namespace-->  argparse.Namespace  --checks-->  the same, adjusted
                                      <--write_back--

Messages of the checks name Megatron's flags; ``rename_for_config`` replaces them by fields of the config.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

SECTIONS = ("rerun_state_machine", "dataset", "ddp", "dist", "train", "model")
"""Parts of a config whose fields have the names of Megatron's arguments; later ones win."""

_RENAMED = {"num_moe_experts": "num_experts"}
"""Field of ``config.model`` -> Megatron's argument."""

_IN_CONFIG = {
    "--no-rope-fusion": "config.model.apply_rope_fusion=False",
    "--no-create-attention-mask-in-dataloader": "config.dataset.skip_getting_attention_mask_from_dataset=True",
    "--num-experts": "config.model.num_moe_experts",
    "--sft": "config.dataset.enable_offline_packing",
}
_FLAG = re.compile(r"--[a-z][a-z0-9]*(?:-[a-z0-9]+)*")


def namespace(config: Any, ours: Mapping[str, Any]) -> argparse.Namespace:
    """Megatron's arguments for this config.

    Args:
        config: a ``ConfigContainer``, before or after its ``validate()``.
        ours: the plugin's flags, such as ``cp_provider`` -> value.
    """
    from megatron.bridge.utils.common_utils import get_rank_safe, get_world_size_safe

    args = argparse.Namespace(**_defaults())
    for section in SECTIONS:
        for name, value in vars(getattr(config, section)).items():
            name = _RENAMED.get(name, name)
            if name in args:
                setattr(args, name, value)
    model, dataset = config.model, config.dataset
    args.create_attention_mask_in_dataloader = not getattr(dataset, "skip_getting_attention_mask_from_dataset", True)
    args.group_query_attention = model.num_query_groups not in (None, model.num_attention_heads)
    args.num_query_groups = model.num_query_groups or model.num_attention_heads
    args.kv_channels = model.kv_channels or model.hidden_size // model.num_attention_heads
    args.params_dtype = _dtype(config)
    args.untie_embeddings_and_output_weights = not model.share_embeddings_and_output_weights
    args.swiglu = model.gated_linear_unit
    args.ffn_hidden_size = model.ffn_hidden_size or 4 * model.hidden_size
    args.vocab_size = model.vocab_size or config.tokenizer.vocab_size
    args.tokenizer_type, args.max_position_embeddings = config.tokenizer.tokenizer_type, model.seq_length
    args.virtual_pipeline_model_parallel_size = model.virtual_pipeline_model_parallel_size
    args.rank, args.world_size = get_rank_safe(), get_world_size_safe()
    args.spec = None
    args.sft = getattr(dataset, "enable_offline_packing", False)
    vars(args).update(ours)
    return args


def write_back(args: argparse.Namespace, config: Any) -> None:
    """Put the checks' adjustments into the config."""
    model, dataset = config.model, config.dataset
    model.apply_rope_fusion = args.apply_rope_fusion
    if args.calculate_per_token_loss:
        model.calculate_per_token_loss = True
        config.ddp.average_in_collective = False  # Megatron's rule for losses that are summed
    if not args.create_attention_mask_in_dataloader and hasattr(dataset, "skip_getting_attention_mask_from_dataset"):
        dataset.skip_getting_attention_mask_from_dataset = True
        if hasattr(dataset, "create_attention_mask"):
            dataset.create_attention_mask = False


def rename_for_config(text: str, config: Any) -> str:
    """A message with flags replaced by fields of the config and arguments of ``apply``."""

    def rename(match: re.Match[str]) -> str:
        flag = match[0]
        name = flag.removeprefix("--").replace("-", "_")
        if flag in _IN_CONFIG:
            return _IN_CONFIG[flag]
        if name.startswith("cp_") and name in own():
            return name.removeprefix("cp_")
        section = next((s for s in reversed(SECTIONS) if name in vars(getattr(config, s))), None)
        return flag if section is None else f"config.{section}.{name}"

    return _FLAG.sub(rename, text)


@cache
def own() -> frozenset[str]:
    """Attribute names of the plugin's flags."""
    from cp_plugin.megatron.flags import args

    return frozenset(vars(args.add_arguments(argparse.ArgumentParser(add_help=False)).parse_args([])))


@cache
def _defaults() -> dict[str, Any]:
    """Defaults of all arguments of Megatron and the plugin."""
    from cp_plugin.megatron.flags import args
    from cp_plugin.megatron.patches import patching

    parser = argparse.ArgumentParser(allow_abbrev=False)
    patching.original("megatron.training.arguments:add_megatron_arguments")(parser)
    return vars(args.add_arguments(parser).parse_args([]))


def _dtype(config: Any) -> torch.dtype:
    """The dtype of parameters, also before Bridge applies ``config.mixed_precision``."""
    mixed = config.mixed_precision
    if isinstance(mixed, str):
        from megatron.bridge.training.mixed_precision import get_mixed_precision_config

        mixed = get_mixed_precision_config(mixed)
    source = config.model if mixed is None else mixed
    return torch.bfloat16 if source.bf16 else torch.float16 if source.fp16 else torch.float32
