"""nvidia-modelopt: post-training quantisation (PTQ) and quantisation-aware training (QAT) of queries, keys and values.

``mtq.quantize`` gives quantisers to the modules whose classes it knows. ``hooks.start`` makes it know ``CoreAttention``
in every run with a provider where nvidia-modelopt is installed; Megatron's training has imported it by then. The
quantisers are in ``quantized``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata, util
from typing import Any

import torch

from cp_plugin.core.versions import MODELOPT_MINIMUM, version_tuple
from cp_plugin.megatron import runtime
from cp_plugin.megatron.layers import spec
from cp_plugin.megatron.layers.core_attention import CoreAttention
from cp_plugin.megatron.patches.patching import Call, around

SPEC = "megatron.core.post_training.modelopt.gpt.model_specs:get_gpt_modelopt_spec"


def register() -> None:
    """Make nvidia-modelopt convert the plugin's attention, or refuse to where it is a release that cannot."""
    if util.find_spec("modelopt") is None:
        return
    try:
        registry = import_module("modelopt.torch.quantization.nn").QuantModuleRegistry
    except ImportError:  # something that it needs is missing: nobody can quantise with it
        return
    if CoreAttention in registry:
        return
    reason = None
    if version_tuple(version()) >= version_tuple(MODELOPT_MINIMUM):
        try:
            quantised = import_module("cp_plugin.megatron.layers.quantized").QuantCoreAttention
        except ImportError as error:
            reason = str(error)
    else:
        reason = "too old"
    registry.register({CoreAttention: "cp_plugin_CoreAttention"})(_refusing(reason) if reason else quantised)


def version() -> str:
    """The release of the nvidia-modelopt that is installed."""
    return metadata.version("nvidia-modelopt")


def quantizes(module: torch.nn.Module) -> bool:
    """Whether quantisers of the module change what it is given."""
    return any(_is_quantizer(part) and part.is_enabled for part in module.modules())


@contextmanager
def unquantized(module: torch.nn.Module) -> Iterator[None]:
    """While the block runs, the module's quantisers hand on what they are given, and calibrate nothing."""
    enabled = [part for part in module.modules() if _is_quantizer(part) and part.is_enabled]
    for quantizer in enabled:
        quantizer.disable()
    try:
        yield
    finally:
        for quantizer in enabled:
            quantizer.enable()


@around
def replace_gpt_spec(call: Call) -> Any:
    """The replacement for ``get_gpt_modelopt_spec``, whose layers name Megatron's own core attentions."""
    return spec.with_core_attention(call.original())


def _refusing(reason: str) -> type:
    """What modelopt would make of ``CoreAttention``, if it could."""

    class Refusing:
        def _setup(self) -> None:
            raise ValueError(
                f"nvidia-modelopt {version()} cannot quantise the attention of {runtime.settings().asked} ({reason}): "
                f"use {MODELOPT_MINIMUM} or newer"
            )

    return Refusing


def _is_quantizer(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("TensorQuantizer") and not list(module.children())
