"""Triton's interpreter works here. If it does not, this is the only failure: see ``conftest.py``."""

from __future__ import annotations

import pytest
import torch
from cp_kernels import interpreter
from triton.runtime.errors import InterpreterError

from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.kernels import backends


def test_the_interpreter_works_with_this_numpy() -> None:
    assert (reason := interpreter.broken()) is None, reason


def test_one_that_does_not_is_a_reason_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(bound: int) -> None:
        raise InterpreterError(repr(TypeError("only 0-dimensional arrays can be converted to Python scalars")))

    monkeypatch.setattr(interpreter, "_count", {(1,): refuse})
    interpreter.broken.cache_clear()
    try:
        reason = backends.get("triton").unsupported(CallInfo(torch.device("cpu"), torch.float32, 16, 16))
        assert "does not work with NumPy" in reason and 'pip install "numpy<2.4"' in reason
    finally:
        interpreter.broken.cache_clear()
