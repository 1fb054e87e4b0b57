"""nvidia-modelopt: post-training quantisation (PTQ) and quantisation-aware training (QAT) of queries, keys and values.

``mtq.quantize`` adds quantisers to modules of registered classes. ``hooks.start`` registers ``CoreAttention`` in every
run with a provider where nvidia-modelopt is installed. The quantised class is in ``quantized``.
"""

from __future__ import annotations

from importlib import import_module, metadata, util
from typing import Any

import torch

from cp_plugin.engine.common.versions import MODELOPT_MINIMUM, version_tuple
from cp_plugin.megatron import runtime
from cp_plugin.megatron.mixers.core_attention import CoreAttention
from cp_plugin.megatron.mixers.spec import with_core_attention
from cp_plugin.megatron.patches.patching import Call, wraps

SPEC = "megatron.core.post_training.modelopt.gpt.model_specs:get_gpt_modelopt_spec"


def is_installed() -> bool:
    """Return True if nvidia-modelopt is installed."""
    return util.find_spec("modelopt") is not None


def register() -> None:
    """Register the plugin's attention with nvidia-modelopt; with a release that cannot convert it, as refused."""
    if not is_installed():
        return
    try:
        registry = import_module("modelopt.torch.quantization.nn").QuantModuleRegistry
    except ImportError:  # a dependency of its own is missing, so it cannot quantise anything
        return
    if CoreAttention in registry:
        return
    if version_tuple(version()) < version_tuple(MODELOPT_MINIMUM):
        quantised = _refusing("too old")
    else:
        try:
            quantised = import_module("cp_plugin.megatron.mixers.quantized").QuantCoreAttention
        except ImportError as error:
            quantised = _refusing(str(error))
    registry.register({CoreAttention: "cp_plugin_CoreAttention"})(quantised)


def version() -> str:
    return metadata.version("nvidia-modelopt")


def quantizes(module: torch.nn.Module) -> bool:
    """Return True if the module has an enabled quantiser."""
    leaves = (part for part in module.modules() if not list(part.children()))
    return any(type(leaf).__name__.endswith("TensorQuantizer") and leaf.is_enabled for leaf in leaves)


@wraps(
    SPEC,
    "attention of the spec for nvidia-modelopt",
    otherwise="a quantised model would keep Megatron's own attention",
    when=lambda run: run.settings.active and is_installed(),
)
def replace_gpt_spec(call: Call) -> Any:
    """Put the plugin's core attention into the spec of ``get_gpt_modelopt_spec``."""
    return with_core_attention(call.original())


def _refusing(reason: str) -> type:
    """A quantised class that raises when a module is converted to it."""

    class Refusing:
        def _setup(self) -> None:
            raise ValueError(
                f"nvidia-modelopt {version()} cannot quantise attention with {runtime.settings().flag} ({reason}): "
                f"use {MODELOPT_MINIMUM} or newer"
            )

    return Refusing
