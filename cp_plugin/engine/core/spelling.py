"""How a message writes an option: as the flag of a command line, or as the argument of a call in Python.

    --cp-grid 3x5 does not hold 8 context-parallel ranks        grid=(3, 5) does not hold 8 context-parallel ranks

A rule is the same for both, and so is its text: it writes options by ``spelled``, and the caller decides the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate

from cp_plugin.engine.common.text import either, show_option

if TYPE_CHECKING:
    import torch

_python: ContextVar[bool] = ContextVar("python", default=False)


@contextmanager
def spell_as_arguments(wanted: bool = True) -> Iterator[None]:
    """Inside the ``with`` block messages write options as arguments; unless ``wanted``, as flags."""
    before = _python.set(wanted)
    try:
        yield
    finally:
        _python.reset(before)


def as_called[S: Any, **P, R](method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method whose messages are in Python if its object's ``from_python`` is set."""

    @wraps(method)
    def called(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with spell_as_arguments(self.from_python):
            return method(self, *args, **kwargs)

    return called


def spelled(option: str, *values: object) -> str:
    """``--cp-grid`` or ``grid``; with a value ``--cp-grid 8x4`` or ``grid=(8, 4)``; several: a choice."""
    if _python.get():
        return "=".join(filter(None, (option, either([*map(repr, values)]))))
    return " ".join(filter(None, (flag_of(option), either([*map(show_option, values)]))))


def flag_of(option: str) -> str:
    """The flag of a training command line."""
    return f"--cp-{option.replace('_', '-')}"


def spelled_ranks(size: int) -> str:
    """The number of context-parallel ranks."""
    return f"a group of {size} ranks" if _python.get() else f"--context-parallel-size {size}"


def spelled_dtypes(*dtypes: torch.dtype) -> str:
    """Dtypes of a model, to choose from: ``--bf16 or --fp16``, or ``torch.bfloat16 or torch.float16``."""
    flags = {"torch.bfloat16": "--bf16", "torch.float16": "--fp16"}
    return " or ".join(str(dtype) if _python.get() else flags[str(dtype)] for dtype in dtypes)
