"""``cp-plugin verify --decode``: its coverage, refusals, and the faults it catches."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import cp_plugin

from cp_plugin import Options, Problem
from cp_plugin.engine.core.values import Partial
from cp_plugin.engine.inference import slots, store, tree
from cp_plugin.engine.kernels import merge
from cp_plugin.engine.kernels.backends import reference
from cp_plugin.engine.linear import decayed
from cp_plugin.testing import verify, verify_decode

SMALL = ("--heads", "4", "--head-dim", "8", "--seq-length", "32")
command = partial(cp_plugin, "verify", "--decode", "--device", "cpu", *SMALL)


def run_on_threads(*chosen: str, dtype: torch.dtype = torch.float32, fp8: Any = None) -> list[verify.Result]:
    """On 3 ranks, the last of which is beyond the tree's power of two."""
    problem = Problem(size=3, heads=6, kv_heads=3, head_dim=16, v_head_dim=8, seq_length=48, batch=2, dtype=dtype)
    planned = verify_decode.plan(chosen, [problem], Options(fp8=fp8))
    return verify.verify(planned, "cpu", threads=True, check=verify_decode.GENERATION)


def test_every_provider_passes_on_three_ranks() -> None:
    results = run_on_threads()
    assert {r.setup.provider.kind for r in results} == {"softmax", "linear"} and len(results) > 25
    for result in results:
        assert result.ok, (result, str(result.setup))
        softmax = result.setup.provider.kind == "softmax"
        assert result.sent == ((432, 216, 216) if softmax else (0, 0, 0)), "the first rank also tells the last one"


@pytest.mark.parametrize("fp8", [None, "comm"])
def test_half_precision_and_an_fp8_cache_are_within_their_limits(fp8: Any) -> None:
    for result in run_on_threads("striped", *(["lasp2"] if fp8 is None else []), dtype=torch.bfloat16, fp8=fp8):
        assert result.ok, result
        assert result.errors["decode"] > (0.01 if fp8 else 1e-4), "it is measured in that precision"
        assert max(result.limits.values()) < (0.1 if fp8 else 0.01), "a limit is that of the precision"


def test_the_command_passes_in_lines_and_in_json() -> None:
    result = command(
        "--ranks", "2", "--provider", "ring", "--provider", "lasp2", "--dtype", "float32", "--kv-heads", "2"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "PASS: 19 of 19 within limits"
    result = command("--ranks", "2", "--provider", "striped", "--dtype", "float32", "--kv-heads", "2", "--json")
    (setup,) = json.loads(result.stdout)["results"]
    assert result.exit_code == 0 and setup["ok"] and setup["sent_per_token"] == [4 * 9 * 4] * 2
    assert list(setup["errors"]) == ["prefill", "decode", "chunked_prefill", "chunked_decode"]


def test_a_prompt_too_short_for_two_chunks_is_a_reason() -> None:
    result = command("--ranks", "2", "--provider", "ring", "--seq-length", "4", "--dtype", "float32", "--kv-heads", "2")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "a prompt in two parts needs 8 tokens or more on 2 ranks in the zigzag layout" in shown


def _rounded_anew(lower: Partial, upper: Partial) -> Partial:
    """Well within the limit, but not equal on all ranks."""
    merged = merge.merge_all((lower, upper))
    assert merged is not None
    return Partial(merged.out * (1 + 1e-7 * torch.randn(merged.out.shape)), merged.lse)


def _none_hidden(held: torch.Tensor, positions: torch.Tensor, window: Any) -> torch.Tensor:
    return torch.zeros(held.size(1), 1, 1, positions.size(0), held.size(0), dtype=torch.bool)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "unmasked": (store, "_hidden", _none_hidden),
    "bits": (tree, "_merge", _rounded_anew),
    "lost": (tree, "_merge", lambda lower, upper: lower),
    "below": (slots, "steps_to", lambda segment, position, steps_to=slots.steps_to: steps_to(segment, position + 1)),
    "bytes": (tree, "messages", lambda size, index: 1),
    "scale": (store, "reference", SimpleNamespace(attend=lambda q, *rest: reference.attend(1.01 * q, *rest))),
    "state": (decayed, "advance", lambda incoming, left, through=None: left),
}


@pytest.mark.parametrize(
    ("fault", "dtype"), [*((fault, torch.float32) for fault in FAULTS), ("state", torch.bfloat16)], ids=str
)
def test_a_fault_is_caught(fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    result = run_on_threads("lasp2" if fault == "state" else "ulysses", dtype=dtype)[0]
    assert not result.ok and (result.failure == "") == (fault in ("unmasked", "lost", "scale", "state")), result
