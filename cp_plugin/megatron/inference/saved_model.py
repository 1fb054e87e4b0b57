"""Model flags from the arguments that Megatron saved in a checkpoint.

Megatron's ``--use-checkpoint-args`` omits flags that change what the model computes (``--window-size``,
``--softmax-type``, all of multi-latent attention); here every flag that describes the model is taken. Checkpoints are
unpickled as Megatron does: load trusted ones only.
"""

from __future__ import annotations

import argparse
import enum
import warnings
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from cp_plugin.megatron.startup import failures

_GROUPS = ("network size", "mla", "moe", "tokenizer", "heterogeneous architecture", "experimental_attention_variant")
_MORE = (
    "apply_layernorm_1p",
    "bf16",
    "ckpt_format",
    "cp_layer_pattern",
    "cp_linear_attention",
    "fp16",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "multi_latent_attention",
    "norm_epsilon",
    "rope_type",
    "seq_length",
)
_OF_A_RUN = (
    "attention_backend", "attention_dropout", "batch_invariant", "cache_mla_latents", "calculate_per_token_loss",
    "clone_scatter", "cp_comm_type", "cuda_graph", "decoder_num_layers", "deterministic_mode", "disable_parameter",
    "distribute_saved", "encoder_num_layers", "fallback_to_eager", "flash_decode", "fp4", "fp8", "fusion",
    "hidden_dropout", "inference", "init_method", "log_", "memory_efficient", "moe_aux_loss", "moe_enable_deepep",
    "moe_expert_capacity", "moe_paged", "moe_per_layer_logging", "moe_router_load_balancing",
    "moe_shared_expert_overlap", "moe_token_dispatcher", "moe_use_upcycling", "moe_upcycling", "moe_z_loss",
    "mtp_loss", "offload", "persist_layer_norm", "qk_clip", "recompute", "softmax_in_fp32", "symmetric_ar",
    "test_mode", "transformer_impl", "use_cpu_initialization", "use_te",
)  # fmt: skip
"""Parts of names of flags that say how a model is run or trained, not what it is."""


def flags(folder: Path, step: int | None, parser: argparse.ArgumentParser) -> list[str]:
    """The command line of the model in a checkpoint.

    Args:
        folder: as given to ``--load``.
        step: as given to ``--ckpt-step``; None: the tracker file's.
        parser: Megatron's, with the plugin's flags.

    Raises:
        ValueError: for a folder without such a checkpoint, or with arguments that cannot be read or put in flags.
    """
    saved = vars(arguments(folder, step))
    actions = [a for a in _model_actions(parser) if saved.get(a.dest) is not None and saved[a.dest] != a.default]
    words = [word for action in {a.dest: a for a in actions}.values() for word in _words(action, saved[action.dest])]
    if saved.get("padded_vocab_size") and "--padded-vocab-size" not in words:
        words += ["--padded-vocab-size", str(saved["padded_vocab_size"])]
    back = vars(parser.parse_args(words))
    lost = sorted(a.dest for a in actions if back[a.dest] != saved[a.dest] and str(back[a.dest]) != str(saved[a.dest]))
    if lost:
        raise ValueError(
            f"--load {folder}: {', '.join(lost)} of its model cannot be expressed as flags: give them by hand"
        )
    return words


def arguments(folder: Path, step: int | None) -> argparse.Namespace:
    """Megatron's arguments saved in a checkpoint; ValueError as in ``flags``."""
    if not folder.is_dir():
        raise ValueError(f"--load {folder}: there is no such folder")
    tracker = folder / "latest_checkpointed_iteration.txt"
    if step is None and tracker.is_file() and (latest := tracker.read_text(errors="replace").strip()).isdecimal():
        step = int(latest)
    if step is None:
        raise ValueError(f"--load {folder}: {tracker.name} names no checkpoint in it: choose one with --ckpt-step")
    directory = folder / f"iter_{step:07d}"
    if not directory.is_dir():
        raise ValueError(f"--ckpt-step {step}: --load {folder} has no checkpoint of this iteration")
    try:
        args = _common(directory).get("args")
    except failures.ENDS as error:
        raise ValueError(f"{directory}: the checkpoint cannot be read ({failures.summary(error)})") from error
    if not isinstance(args, argparse.Namespace):
        raise ValueError(f"{directory}: the arguments of its training were not saved: give the model's flags by hand")
    return args


def _common(directory: Path) -> dict[str, Any]:
    files = sorted(directory.glob("mp_rank_*/model_optim_rng.pt"))
    if files:
        return torch.load(files[0], map_location="cpu", weights_only=True, mmap=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dist_checkpointing.load_common_state_dict(str(directory))


def _model_actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    of_models = {f.name for f in fields(MLATransformerConfig)} - {f.name for f in fields(ModelParallelConfig)}
    for group in parser._action_groups:
        for action in group._group_actions:
            wanted = group.title in _GROUPS or action.dest in of_models or action.dest in _MORE
            if wanted and action.option_strings and not any(part in action.dest for part in _OF_A_RUN):
                yield action


def _words(action: argparse.Action, value: Any) -> list[str]:
    """The command-line words that give this value."""
    name = next((o for o in action.option_strings if o.startswith("--")), action.option_strings[0])
    if action.nargs == 0:
        return [name] if action.const == value else []
    if isinstance(value, enum.Enum):
        return [name, value.name]
    if isinstance(value, list | tuple):
        items = [str(item) for item in value]
        return [name, ",".join(items)] if action.nargs in (None, "?") else [name, *items]
    return [f"{name}={value}"] if str(value).startswith("-") else [name, str(value)]
