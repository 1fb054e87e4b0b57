"""What of Bridge the plugin does not support: each by the name of its config field, refused before training.

What Megatron itself has a flag for is refused by ``cp_plugin.megatron.rules``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.rules.rule import Found, Rule, refuse, when


def _value(config: Any, path: str) -> Any:
    """None where a part of the path is missing."""
    return reduce(lambda owner, name: getattr(owner, name, None), path.split("."), config)


def _field(path: str, *, why: str, fix: str = "leave it out", refused: Callable[[Any], bool] | None = None) -> Rule:
    """A field of the config that must not be set.

    Args:
        refused: of the config; None: whatever is true.
    """

    def looks_at(config: Any) -> Found:
        value = _value(config, path)
        return when(value if refused is None else refused(config), value=_shown(config, path, value))

    return Rule(name=f"config.{path}", what=f"config.{path}{{value}}", why=why, fix=fix, looks_at=looks_at)


def _shown(config: Any, path: str, value: Any) -> str:
    if isinstance(value, bool | int | float | str):
        return f" = {value!r}"
    return f" ({type(config.model if path.endswith('.provide') else value).__name__})"


def _of_own_model(config: Any) -> bool:
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    return isinstance(config.model, GPTModelProvider) and type(config.model).provide is not GPTModelProvider.provide


def _no_gpt(config: Any) -> bool:
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    return not isinstance(config.model, GPTModelProvider)


def _other_data(config: Any) -> bool:
    from megatron.bridge.training.config import GPTDatasetConfig

    return not isinstance(config.dataset, GPTDatasetConfig)


def _odd_length(config: Any) -> bool:
    size = config.model.context_parallel_size
    return size > 1 and config.model.seq_length % (2 * size) != 0


MODEL = _field(
    "model",
    why="only models of GPTModelProvider were tested",
    fix="use a recipe whose model is one, such as those for Llama and Qwen",
    refused=_no_gpt,
)
"""Where it applies, the fields of the others need not be there."""
_GPU = "leave it out, or train on a GPU"

RULES = (
    _field(
        "model.provide",
        why="this provider builds a model of its own, which may divide the sequence by itself",
        fix="use a recipe whose model is a plain GPTModelProvider",
        refused=_of_own_model,
    ),
    _field(
        "model.use_transformer_engine_full_layer_spec",
        why="Transformer Engine's whole layer has an attention inside that no spec can replace",
    ),
    _field("model.restore_modelopt_state", why="quantised attention was not tested with Bridge"),
    _field(
        "dataset",
        why="packed and padded batches of fine-tuning were not tested with Bridge",
        fix="use GPTDatasetConfig or MockGPTDatasetConfig",
        refused=_other_data,
    ),
    _field("peft", why="adapters around the attention's projections were not tested"),
    _field("inprocess_restart.enabled", why="it destroys process groups and makes them anew inside a training"),
    _field(
        "dist.use_decentralized_pg",
        why="the plugin makes its process groups beside those of megatron.core.parallel_state, which Bridge then lacks",
        fix="set it to False",
    ),
    _field("dist.lazy_mpu_init", why="process groups are made by somebody else then"),
    _field(
        "model.seq_length",
        why="Bridge wants a multiple of 2 * config.model.context_parallel_size in every layout",
        fix="round it to one",
        refused=_odd_length,
    ),
)
ON_CPU = (
    _field(
        "model.mtp_num_layers",
        why="on the CPU: Bridge builds these layers with Transformer Engine, on CUDA",
        fix=_GPU,
    ),
    _field("model.fp8", why="on the CPU: FP8 layers are Transformer Engine's, on CUDA", fix=_GPU),
    _field("model.tp_comm_overlap", why="on the CPU: its buffers are Transformer Engine's, on CUDA", fix=_GPU),
    _field("dist.use_megatron_fsdp", why="on the CPU: it was not tested there with Bridge", fix=_GPU),
)
"""In CPU mode, beside the others."""


def _rules(config: Any) -> tuple[Rule, ...]:
    return (MODEL,) if MODEL.of(config) else (*RULES, *(ON_CPU if cpu.active() else ()))


def refused_by(config: Any) -> list[str]:
    """The names of the rules that refuse a config."""
    return [rule.name for rule in _rules(config) if rule.of(config)]


def check(config: Any, asked: str) -> None:
    """Check a config.

    Args:
        asked: what asked for the plugin, for the message.

    Raises:
        ValueError: for all unsupported fields: value, why, and what to do.
    """
    refuse(_rules(config), config, prefix=f"{asked} does not support ", suffix=' (or use provider="upstream")')
