"""What of Bridge the plugin does not support: each by the name of its config field, refused before training.

What Megatron itself has a flag for is refused by ``cp_plugin.megatron.rules.refusals``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cp_plugin.megatron.cpu import mode as cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One field of the config."""

    field: str
    why: str
    fix: str
    refused: Callable[[Any], bool]
    """Of the config."""


def _field(path: str) -> Callable[[Any], bool]:
    def switched_on(config: Any) -> bool:
        for name in path.split("."):
            config = getattr(config, name, None)
        return bool(config)

    return switched_on


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


MODEL = Refusal(
    field="config.model",
    why="only models of GPTModelProvider were tested",
    fix="use a recipe whose model is one, such as those for Llama and Qwen",
    refused=_no_gpt,
)
"""Where it holds, the fields of the others need not be there."""

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        field="config.model.provide",
        why="this provider builds a model of its own, which may divide the sequence by itself",
        fix="use a recipe whose model is a plain GPTModelProvider",
        refused=_of_own_model,
    ),
    Refusal(
        field="config.model.use_transformer_engine_full_layer_spec",
        why="Transformer Engine's whole layer has an attention inside that no spec can replace",
        fix="leave it out",
        refused=_field("model.use_transformer_engine_full_layer_spec"),
    ),
    Refusal(
        field="config.model.restore_modelopt_state",
        why="quantised attention was not tested with Bridge",
        fix="leave it out",
        refused=_field("model.restore_modelopt_state"),
    ),
    Refusal(
        field="config.dataset",
        why="packed and padded batches of fine-tuning were not tested with Bridge",
        fix="use GPTDatasetConfig or MockGPTDatasetConfig",
        refused=_other_data,
    ),
    Refusal(
        field="config.peft",
        why="adapters around the attention's projections were not tested",
        fix="leave it out",
        refused=_field("peft"),
    ),
    Refusal(
        field="config.inprocess_restart.enabled",
        why="it destroys process groups and makes them anew inside a training",
        fix="leave it out",
        refused=_field("inprocess_restart.enabled"),
    ),
    Refusal(
        field="config.dist.use_decentralized_pg",
        why="the plugin makes its process groups beside those of megatron.core.parallel_state, which Bridge then lacks",
        fix="set it to False",
        refused=_field("dist.use_decentralized_pg"),
    ),
    Refusal(
        field="config.dist.lazy_mpu_init",
        why="process groups are made by somebody else then",
        fix="leave it out",
        refused=_field("dist.lazy_mpu_init"),
    ),
    Refusal(
        field="config.model.seq_length",
        why="Bridge wants a multiple of 2 * config.model.context_parallel_size in every layout",
        fix="round it to one",
        refused=_odd_length,
    ),
)

CPU_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        field="config.model.mtp_num_layers",
        why="on the CPU: Bridge builds these layers with Transformer Engine, on CUDA",
        fix="leave it out, or train on a GPU",
        refused=_field("model.mtp_num_layers"),
    ),
    Refusal(
        field="config.model.fp8",
        why="on the CPU: FP8 layers are Transformer Engine's, on CUDA",
        fix="leave it out, or train on a GPU",
        refused=_field("model.fp8"),
    ),
    Refusal(
        field="config.model.tp_comm_overlap",
        why="on the CPU: its buffers are Transformer Engine's, on CUDA",
        fix="leave it out, or train on a GPU",
        refused=_field("model.tp_comm_overlap"),
    ),
    Refusal(
        field="config.dist.use_megatron_fsdp",
        why="on the CPU: it was not tested there with Bridge",
        fix="leave it out, or train on a GPU",
        refused=_field("dist.use_megatron_fsdp"),
    ),
)
"""In CPU mode, beside the others."""


def refuse(config: Any, asked: str) -> None:
    """Check a config.

    Args:
        asked: what asked for the plugin, for the message.

    Raises:
        ValueError: for every unsupported field at once: its value, why, and what to do.
    """
    every = (*REFUSALS, *(CPU_REFUSALS if cpu.active() else ()))
    problems = []
    for refusal in (MODEL,) if MODEL.refused(config) else every:
        if refusal.refused(config):
            shown = _shown(config, refusal.field)
            problems.append(f"{refusal.field}{shown}: {refusal.why}; {refusal.fix}")
    if problems:
        raise ValueError(f'{asked} does not support {" | ".join(problems)} (or use provider="upstream")')


def _shown(config: Any, field: str) -> str:
    value: Any = config
    for name in field.split(".")[1:]:
        value = getattr(value, name, None)
    if isinstance(value, bool | int | float | str):
        return f" = {value!r}"
    owner = config.model if field.endswith(".provide") else value
    return f" ({type(owner).__name__})"
