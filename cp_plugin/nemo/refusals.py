"""Unsupported features of Bridge, refused before training by the name of their config field.

Features with a Megatron flag are refused by ``cp_plugin.megatron.rules``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from importlib import import_module
from typing import Any

from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.rules.rule import Match, Rule, refuse, when


def _value(config: Any, path: str) -> Any:
    """None where a part of the path is missing."""
    return reduce(lambda owner, name: getattr(owner, name, None), path.split("."), config)


def _field(path: str, *, why: str, fix: str = "leave it out", refused: Callable[[Any], bool] | None = None) -> Rule:
    """A rule against a field; ``refused``: whether it refuses the config; None: if the field is true."""

    def looks_at(config: Any) -> Match:
        value = _value(config, path)
        plain = isinstance(value, bool | int | float | str)
        kind = type(config.model if path == "model.provide" else value).__name__
        return when(value if refused is None else refused(config), value=f" = {value!r}" if plain else f" ({kind})")

    return Rule(name=f"config.{path}", what=f"config.{path}{{value}}", why=why, fix=fix, looks_at=looks_at)


def _bridges(module: str, name: str) -> Any:
    """A class of Bridge, which is imported no earlier than a config is checked."""
    return getattr(import_module(f"megatron.bridge.{module}"), name)


def fine_tunes(config: Any) -> bool:
    """Return True if the data is Bridge's ``GPTSFTDatasetConfig``: pairs of prompt and answer, packed or not."""
    return isinstance(config.dataset, _bridges("training.config", "GPTSFTDatasetConfig"))


def _odd(length: str) -> Callable[[Any], bool]:
    """Return True if the length at a path violates Bridge's rule."""

    def refused(config: Any) -> bool:
        size, tokens = config.model.context_parallel_size, _value(config, length)
        return size > 1 and tokens is not None and tokens % (2 * size) != 0

    return refused


def _odd_padding(config: Any) -> bool:
    """Return True if examples or packs are padded to lengths that the ranks cannot divide."""
    size, options = config.model.context_parallel_size, _value(config, "dataset.dataset_kwargs") or {}
    if not hasattr(config.dataset, "dataset_kwargs") or size < 2 or options.get("pad_to_max_length"):
        return False
    return options.get("pad_seq_length_to_mult", _PADDED_TO) % (2 * size) != 0


_GPT = ("models.gpt_provider", "GPTModelProvider")
MODEL = _field(
    "model",
    why="only GPTModelProvider models were tested",
    fix="use a recipe with such a model, such as those for Llama and Qwen",
    refused=lambda config: not isinstance(config.model, _bridges(*_GPT)),
)
"""If it applies, the others do not: their fields need not exist."""
_GPU = "leave it out, or train on a GPU"
_ADAPTERS = ("LoRA", "CanonicalLoRA", "DoRA")
_PADDED_TO = 16
"""Bridge's default of ``pad_seq_length_to_mult``."""
_MULTIPLE = "a multiple of 2 * config.model.context_parallel_size"

RULES = (
    _field(
        "model.provide",
        why="this provider builds a model of its own, which may shard the sequence itself",
        fix="use a recipe whose model is a plain GPTModelProvider",
        refused=lambda config: type(config.model).provide is not _bridges(*_GPT).provide,
    ),
    _field(
        "model.use_transformer_engine_full_layer_spec",
        why="Transformer Engine's complete layer contains attention that no spec can replace",
    ),
    _field("model.restore_modelopt_state", why="quantised attention was not tested with Bridge"),
    _field(
        "dataset",
        why="its batches were not tested with the plugin",
        fix="use GPTDatasetConfig, MockGPTDatasetConfig or GPTSFTDatasetConfig",
        refused=lambda config: (
            not (fine_tunes(config) or isinstance(config.dataset, _bridges("training.config", "GPTDatasetConfig")))
        ),
    ),
    _field(
        "dataset.inter_document_masking",
        why="Bridge reads document boundaries in another format than this dataset writes",
        fix="use GPTSFTDatasetConfig with enable_offline_packing",
    ),
    _field(
        "dataset.offline_packing_specs.packed_sequence_size",
        why=f"the tokens of a pack are split across the ranks, and Bridge requires {_MULTIPLE}",
        fix="round it to one",
        refused=_odd("dataset.offline_packing_specs.packed_sequence_size"),
    ),
    _field(
        "dataset.dataset_kwargs",
        why=f"sequences are padded to a multiple of pad_seq_length_to_mult ({_PADDED_TO} by default), and Bridge "
        f"requires {_MULTIPLE}",
        fix="add pad_to_max_length=True, or such a pad_seq_length_to_mult",
        refused=_odd_padding,
    ),
    _field(
        "peft",
        why="only LoRA, CanonicalLoRA and DoRA were tested",
        fix="use one of them",
        refused=lambda config: config.peft is not None and type(config.peft).__name__ not in _ADAPTERS,
    ),
    _field("inprocess_restart.enabled", why="it destroys process groups and recreates them during training"),
    _field(
        "dist.use_decentralized_pg",
        why="the plugin creates its process groups from those of megatron.core.parallel_state, which then do not exist",
        fix="set it to False",
    ),
    _field("dist.lazy_mpu_init", why="process groups are then created outside the plugin"),
    _field(
        "model.seq_length",
        why=f"Bridge requires {_MULTIPLE} in every layout",
        fix="round it to one",
        refused=_odd("model.seq_length"),
    ),
)
ON_CPU = (
    _field("model.mtp_num_layers", why="Bridge builds these layers with Transformer Engine, on CUDA", fix=_GPU),
    _field("model.fp8", why="FP8 layers need Transformer Engine, on CUDA", fix=_GPU),
    _field("model.tp_comm_overlap", why="its buffers need Transformer Engine, on CUDA", fix=_GPU),
    _field("dist.use_megatron_fsdp", why="it was not tested with Bridge on the CPU", fix=_GPU),
)
"""Further rules of CPU mode."""


def rules_for(config: Any) -> tuple[Rule, ...]:
    """Return the rules that a config is checked by."""
    return (MODEL,) if MODEL.message(config) else (*RULES, *(ON_CPU if cpu.active() else ()))


def check(config: Any, argument: str, instead: str) -> None:
    """Check a config.

    Args:
        argument: that asked for the plugin.
        instead: how to do without.

    Raises:
        ValueError: naming all unsupported fields, with value, reason and fix.
    """
    refuse(rules_for(config), config, prefix=f"{argument} does not support ", suffix=f" (or {instead})")
