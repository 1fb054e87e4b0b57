"""What a Megatron wheel lacks to train: the Makefile of its dataset helper.

At start-up Megatron runs `make` beside `megatron.core.datasets.helpers_cpp` and exits when that fails. A wheel contains
the compiled helper but no Makefile. Where the helper imports, there is nothing to compile.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def use_compiled_helper() -> Callable[[], None]:
    """Skip Megatron's compilation of its dataset helper if, and only if, the helper already imports.

    Returns a function that undoes it. Imports megatron.core.
    """
    from megatron.core.datasets import utils

    original: Callable[[], Any] = utils.compile_helpers

    def undo() -> None:
        utils.compile_helpers = original

    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        return undo
    utils.compile_helpers = lambda: None
    return undo
