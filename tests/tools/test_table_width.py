"""Tables fit 100 columns; no name is broken, no reason lost."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
from rich.console import Console

from cp_plugin.engine.common.text import wrap_for_terminal
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods import registry as providers
from cp_plugin.testing import verify, verify_decode
from cp_plugin.tools.tables import print_verified


@pytest.mark.parametrize("decode", [False, True])
def test_verify(decode: bool) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    problem = Problem(size=8, heads=32, kv_heads=8, seq_length=131072, dtype=torch.bfloat16)
    planned = (verify_decode if decode else verify).plan((), [problem], Options())
    errors = {name: 1.23e-3 for name in ("out", "dq", "dk", "dv")}
    result = partial(verify.Result, errors=errors, limits=errors, sent=(123_456,) * 8 if decode else ())
    made = [result(setup=setup) for setup in planned if setup.reason is None]
    print_verified(terminal, "title", planned, made)
    lines = terminal.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line.rstrip()) <= 100 for line in lines) and not any("…" in line for line in lines)
    assert sum(line.partition(" ")[0] in providers.names() for line in lines) >= len(providers.names())
    assert sum("PASS" in line for line in lines) == len(made)


def test_a_message_is_wrapped_for_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between words; a flag, a path or a list without spaces stays whole, and files and pipes get one line."""
    monkeypatch.setenv("COLUMNS", "40")
    text = f"error: --documents {'600,' * 20}1: no such file. Give a file, or some lengths\nand a second line"
    stream = io.StringIO()
    assert wrap_for_terminal(text, stream) == text
    stream.isatty = lambda: True  # type: ignore[method-assign]
    lines = wrap_for_terminal(text, stream).split("\n")
    assert [line for line in lines if len(line) > 40] == [f"{'600,' * 20}1:"]
    assert " ".join(lines).split() == text.split() and lines[-1] == "and a second line"
