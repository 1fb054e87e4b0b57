"""Tables of ``verify``, ``traffic`` and ``bench`` fit 100 columns; no name is broken, no reason lost."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console

from cp_plugin.engine.common.text import wrap_for_terminal
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods import registry as providers
from cp_plugin.testing import verify, verify_decode
from cp_plugin.testing.traffic import price
from cp_plugin.tools.tables import print_traffic, print_verified

WIDTH = 100
PROBLEM = Problem(size=8, heads=32, kv_heads=8, seq_length=131072, dtype=torch.bfloat16)


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=WIDTH, color_system=None)


def lines(console: Console) -> list[str]:
    """The printed lines, all of which fit."""
    found = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line.rstrip()) <= WIDTH for line in found) and not any("…" in line for line in found)
    return found


def test_traffic(terminal: Console) -> None:
    """Every provider, without an empty column, and a reason below the table once."""
    problem = replace(PROBLEM, size=64)
    print_traffic(terminal, problem, price((), problem, Options()))
    first = {line.split()[0].rstrip(":") for line in lines(terminal) if line.split()}
    assert {*providers.names(), *providers.names("linear")} <= first
    assert "note" not in lines(terminal)[1], "no row has one"
    text = " ".join("\n".join(lines(terminal)).split())
    assert text.count("ulysses: cannot: --ranks 64: 32 query and 8 key/value heads") == 1


@pytest.mark.parametrize("decode", [False, True])
def test_verify(terminal: Console, decode: bool) -> None:
    planned = (verify_decode if decode else verify).plan((), [PROBLEM], Options())
    errors = {name: 1.23e-3 for name in ("out", "dq", "dk", "dv")}
    result = partial(verify.Result, errors=errors, limits=errors, sent=(123_456,) * 8 if decode else ())
    made = [result(setup=setup) for setup in planned if setup.reason is None]
    print_verified(terminal, "title", planned, made)
    named = [line for line in lines(terminal) if line.split() and line.split()[0] in providers.names()]
    assert len(named) >= len(providers.names())
    assert sum("PASS" in line for line in lines(terminal)) == len(made)


class Stream(io.StringIO):
    """What a message is written to."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def test_a_message_is_wrapped_for_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between words; a flag, a path or a list without spaces stays whole, and files and pipes get one line."""
    monkeypatch.setenv("COLUMNS", "40")
    text = f"error: --documents {'600,' * 20}1: no such file. Give a file, or some lengths\nand a second line"
    assert wrap_for_terminal(text, Stream(terminal=False)) == text
    lines = wrap_for_terminal(text, Stream(terminal=True)).split("\n")
    assert [line for line in lines if len(line) > 40] == [f"{'600,' * 20}1:"]
    assert " ".join(lines).split() == text.split() and lines[-1] == "and a second line"
