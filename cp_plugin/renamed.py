"""Old names of public modules, which stay importable: they give the module under its new name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_PLANNER = {
    "calibration": ("calibrate", "fitting", "kernel_rates", "link_rates"),
    "machine": ("collectives", "events", "hardware", "inferred", "kernel_time", "links", "profile_files", "protocols"),
    "trace": ("memory", "passes", "program", "sharing", "simulation", "timeline"),
    "training": ("activations", "footprint", "iteration", "layer_time", "model", "operations", "parallel", "weights"),
}
"""Subpackage -> modules that used to be beside it."""
_COMMON = ("eager", "names", "plugins", "recent", "text", "versions", "without_data", "yaml_files")
"""Modules that used to be in ``core``."""
MODULES = {
    "cp_plugin.dataset": "cp_plugin.megatron.dataset",
    "cp_plugin.examples": "cp_plugin.cli.examples",
    "cp_plugin.kernels.backends.stand_in": "cp_plugin.kernels.fused",
    "cp_plugin.launch": "cp_plugin.testing.launch",
    "cp_plugin.megatron.decoding": "cp_plugin.megatron.inference.decoding",
    "cp_plugin.megatron.digest": "cp_plugin.megatron.patches.digest",
    "cp_plugin.megatron.engine": "cp_plugin.megatron.inference.engine",
    "cp_plugin.megatron.flags.auto": "cp_plugin.megatron.planned.auto",
    "cp_plugin.megatron.flags.planned": "cp_plugin.megatron.planned.command",
    "cp_plugin.megatron.flags.planned_groups": "cp_plugin.megatron.planned_groups",
    "cp_plugin.megatron.flags.planned_sizes": "cp_plugin.megatron.planned.sizes",
    "cp_plugin.megatron.tokenizers": "cp_plugin.megatron.models.tokenizers",
    "cp_plugin.mesh": "cp_plugin.comm",
    "cp_plugin.moves": "cp_plugin.methods.moves",
    "cp_plugin.planner.names": "cp_plugin.common.names",
    "cp_plugin.planner.traced_blocks": "cp_plugin.attention.traced_blocks",
    "cp_plugin.protocol": "cp_plugin.methods.protocol",
    "cp_plugin.providers": "cp_plugin.methods.registry",
    "cp_plugin.ranks": "cp_plugin.testing.ranks",
    "cp_plugin.testing.recording": "cp_plugin.kernels.recording",
    **{f"cp_plugin.core.{name}": f"cp_plugin.common.{name}" for name in _COMMON},
    **{
        f"cp_plugin.planner.{name}": f"cp_plugin.planner.{room}.{name}"
        for room, names in _PLANNER.items()
        for name in names
    },
}


class Finder:
    """Finds a module, or one inside of it, under its old name and returns the one with the new name."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("cp_plugin."):
            return None
        now = next((new + name[len(old) :] for old, new in MODULES.items() if f"{name}.".startswith(f"{old}.")), None)
        return None if now is None else ModuleSpec(name, cls, loader_state=now)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        found = importlib.import_module(spec.loader_state)
        spec.loader_state = found.__spec__
        return found

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # restore what the import system has just replaced


def install() -> None:
    """Goes before the other finders, which would load the contents of a renamed package a second time."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
