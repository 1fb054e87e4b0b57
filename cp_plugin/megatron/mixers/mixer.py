"""A layer of Megatron that mixes tokens, as its file declares it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cp_plugin.engine.methods.protocol import Kind
from cp_plugin.megatron import compat
from cp_plugin.megatron.patches.patching import Patch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixer:
    """What the plugin does in one kind of layer, and how it knows one."""

    name: str
    """As messages name it."""
    kind: Kind | None = None
    """What a provider computes in it; None: Megatron mixes all of its tokens."""
    computes: Callable[[Any], bool] = lambda module: False
    """Return True for a module in which a provider computes that."""
    patches: tuple[Patch, ...] = ()
    """Of its class and functions, in order of installation."""
    letter: str = ""
    """In ``--hybrid-layer-pattern``, of a layer with a state instead of attention."""
    layer: str = ""
    """Its class: ``"package.module:name"`` in the oldest supported version."""
    kernels: str = ""
    """What the modules of its class call the existence of its kernels, which are for CUDA only."""

    def has_state(self, module: Any) -> bool:
        """Return True for a module of this class, of any version, whose state is not kept between tokens."""
        kind = type(module)
        return kind.__name__ == self.layer.rpartition(":")[2] and kind.__module__.startswith(compat.STATE_SPACES)
