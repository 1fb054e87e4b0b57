"""Ledger = trace = closed formula, to the byte: every method and setting, with FP8 payloads and narrow sums."""

from __future__ import annotations

import pytest
import torch
from method_cases import EVERY, SETTINGS, count_on_the_wire, predict, setup_of, traced
from nightly import NIGHT, nightly

from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.attention2d import grid_bytes
from cp_plugin.engine.methods.protocol import Formula

FIRST = {f"{name} on {providers.get(name).layouts[0]}" for name in providers.names()} | {
    name for name, (_, size, _) in SETTINGS.items() if size == 4
}
"""What every change runs with smaller messages: each provider on its first layout, and settings of 4 ranks."""
FP8, NARROW = {"fp8": "comm"}, {"gradient_dtype": "model"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=nightly if EVERY[n][1] > 4 else ()) for n in EVERY])
def test_ledger_trace_and_formula_agree(name: str) -> None:
    count_on_the_wire(setup_of(name, dtype=torch.float64))
    traced(setup_of(name, causal=False))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FIRST else nightly) for n in EVERY])
def test_smaller_payloads_and_sums(name: str) -> None:
    """FP8 payloads, gradient sums in the model's dtype where there are any, and both."""
    dtype = torch.float16 if len(name) % 2 else torch.bfloat16
    packed = setup_of(name, dtype=dtype, **FP8)
    exact = predict(packed, fp8=None)
    if "gradient_dtype" not in packed.provider.options:
        assert all(total(sent) < total(wide) for sent, wide in zip(count_on_the_wire(packed), exact, strict=True))
        return
    some = any if packed.provider.name == "needed" else all  # the ends of a contiguous sequence only send, or only sum
    alone = traced if NIGHT else predict  # by day its trace is that with narrow sums, which is the longest of all
    assert some(total(sent) < total(wide) for sent, wide in zip(alone(packed), exact, strict=True))
    count_on_the_wire(setup_of(name, dtype=dtype, **FP8, **NARROW))
    narrow = setup_of(name, dtype=dtype, **NARROW)
    less = []
    for sent, wide in zip(traced(narrow), predict(narrow, gradient_dtype=None), strict=True):
        assert total(sent, "forward") == total(wide, "forward") and total(sent) <= total(wide)
        less.append(total(sent) < total(wide))
    assert some(less) or narrow.axes.get("head") == narrow.problem.size


@pytest.mark.parametrize("name", [n for n in EVERY if EVERY[n][0] == "attention2d" and "head" not in n])
def test_a_grid_is_chosen_by_its_busiest_rank(name: str) -> None:
    """On uneven tokens the ranks of the diagonal, of which rank 0 is one, keep their shard."""
    setup = setup_of(name)
    most = grid_bytes(setup.problem, setup.options, setup.options.grid)
    assert most == max(total(sent) for sent in predict(setup))


def total(sent: Formula, phase: str = "") -> int:
    return sum(n for line, n in sent.items() if line[0].startswith(phase))
