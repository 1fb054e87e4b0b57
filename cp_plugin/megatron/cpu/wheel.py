"""Megatron wheels: skip compiling the dataset helper.

At start-up Megatron runs `make` beside `megatron.core.datasets.helpers_cpp` and exits if that fails. A wheel has the
compiled helper but no Makefile.
"""

from __future__ import annotations

import importlib

from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.patches.patching import Patch

COMPILE = Patch(
    target="megatron.core.datasets.utils:compile_helpers",
    make=lambda original: lambda: None,
    reason="the dataset helper of a wheel, which is compiled",
    required=False,
)


def use_compiled_helper() -> None:
    """Skip Megatron's compilation of its dataset helper if the helper can be imported; imports megatron.core."""
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return
    patching.install([COMPILE], "process")
