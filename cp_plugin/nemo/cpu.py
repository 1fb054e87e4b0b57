"""CPU mode for Bridge: stand-ins for its CUDA dependencies beyond Megatron's. See ``docs/nemo.md``.

    transformer_engine.pytorch        imported for LoRA layers: stand-in classes while Bridge is imported
    nvidia_resiliency_ext.inprocess   imported for an annotation: the same, where it is not installed
    TEDotProductAttention             tested for by the rebinding of process groups: a stand-in class
    HAVE_TE of peft.utils             False: no layer is Transformer Engine's
    warm-up of fused functions        skipped: it draws random numbers, as many as sizes say, before the weights do
    new_subgroups_by_enumeration      makes Gloo groups

Instantiating a stand-in raises RuntimeError.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch.distributed as dist

from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.cpu.cuda_surface import gloo_only
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.patches.patching import Patch

_MODEL = {
    "use_cpu_initialization": True,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
}
"""Fields of ``config.model`` that otherwise select CUDA kernels."""


def _stand_in(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _NotOnCpu


class _Named(type):
    """A class whose attributes are stand-ins too, for ``te.ops.Linear`` in annotations."""

    def __getattr__(cls, name: str) -> type:
        return _stand_in(name)


class _NotOnCpu(metaclass=_Named):
    """Stand-in for a class that needs CUDA."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "CPU mode: this class belongs to Transformer Engine or the resiliency extension, and needs CUDA"
        )


WARM_UP = Patch(
    "megatron.bridge.training.initialize:_warmup_jit_function",
    cpu.no_warm_up,
    "a warm-up that draws random numbers before the weights",
    package="megatron-bridge",
)
TE_ATTENTION = Patch(
    "megatron.core.extensions.transformer_engine:TEDotProductAttention",
    lambda original: _NotOnCpu,
    "Bridge's rebinding of process groups asks which modules are of this class",
    only_in="megatron.core.extensions.transformer_engine",
)


def activate() -> None:
    """Switch CPU mode on and import Bridge in it.

    Raises:
        RuntimeError: if Bridge was imported before CPU mode.
    """
    if "megatron.bridge" in sys.modules:
        raise RuntimeError(
            "megatron.bridge was imported before CPU mode: call cp_plugin.nemo.activate() before anything imports it"
        )
    cpu.activate()
    with _stand_ins():
        importlib.import_module("megatron.bridge.training.gpt_step")
        importlib.import_module("megatron.bridge.training.pretrain")
    from megatron.core.extensions import transformer_engine

    stand_in = not isinstance(transformer_engine.TEDotProductAttention, type)
    if stand_in:
        importlib.import_module("megatron.bridge.peft.utils").HAVE_TE = False
    patching.install([WARM_UP, *([TE_ATTENTION] if stand_in else [])], "process")
    dist.new_subgroups_by_enumeration = gloo_only(dist.new_subgroups_by_enumeration)


def prepare(config: Any) -> None:
    """Set the fields of a config that otherwise select CUDA kernels; rank 0 prints them.

    Bridge's default layer spec, Transformer Engine's, becomes Megatron's ``local_layer_spec``.
    """
    from megatron.bridge.models.gpt_provider import default_layer_spec, local_layer_spec
    from megatron.bridge.utils.common_utils import get_rank_safe

    changed = {}
    for name, value in _MODEL.items():
        if getattr(config.model, name, value) != value:
            setattr(config.model, name, value)
            changed[f"config.model.{name}"] = repr(value)
    if getattr(config.model, "transformer_layer_spec", None) is default_layer_spec:
        config.model.transformer_layer_spec = local_layer_spec
        changed["config.model.transformer_layer_spec"] = "local_layer_spec"
    if config.dist.distributed_backend != "gloo":
        config.dist.distributed_backend = "gloo"
        changed["config.dist.distributed_backend"] = "'gloo'"
    if changed and get_rank_safe() == 0:
        print(f"cp_plugin: CPU mode: {', '.join(f'{name} = {value}' for name, value in changed.items())}", flush=True)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Stand-ins for the modules that Bridge imports."""
    names = ["transformer_engine", "transformer_engine.pytorch"]
    if sys.modules.get("transformer_engine") is not None:  # not hidden
        names = []
    if find_spec("nvidia_resiliency_ext") is None:
        names += ["nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess"]
    with contextlib.ExitStack() as undo:
        for name in names:
            cpu.set_item(sys.modules, name, _module(name), undo)
        yield


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__path__ = []
    module.__getattr__ = _stand_in
    return module
