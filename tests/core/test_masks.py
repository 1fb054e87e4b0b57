"""Sliding windows, packed documents and sinks: every provider on every layout, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nightly import each_pair
from oracle import Case, Result, assert_close, errors
from thread_ranks import on_threads, run

from cp_plugin import ContextParallel
from cp_plugin.core.mask import document_bounds
from cp_plugin.methods import registry as providers

METHODS = [(name, layout) for name in providers.names() for layout in providers.get(name).layouts]
DOCUMENTS = (0, 3, 50, 51, 64, 113, 128)
MASKS: dict[str, dict[str, Any]] = {
    "window": {"window": (10, 0)},
    "one before": {"window": (1, 0)},
    "window on both sides": {"window": (7, 3), "causal": False},
    "window ahead": {"window": (-1, 5), "causal": False},
    "documents": {"documents": DOCUMENTS},
    "whole documents": {"documents": DOCUMENTS, "causal": False},
    "documents in a window": {"documents": DOCUMENTS, "window": (9, 4)},  # causal: the second has no meaning
    "sink": {"sink": True},
    "all of it": {"documents": DOCUMENTS, "window": (20, 4), "causal": False, "sink": True},
}
CASE = Case(seq_length=128, heads=8, kv_heads=2, causal=True)

methods = pytest.mark.parametrize(("provider", "layout"), METHODS, ids=["-".join(m) for m in METHODS])


def summed(ranks: list[Result]) -> Result:
    """What all ranks have in common, and the sinks' gradients added up."""
    grads = [r.dsink for r in ranks if r.dsink is not None]
    return ranks[0]._replace(dsink=sum(grads)) if grads else ranks[0]


@each_pair
@methods
@pytest.mark.parametrize("mask", MASKS)
def test_float64(provider: str, layout: str, mask: str) -> None:
    problem = replace(CASE, **MASKS[mask])
    for size in (1, 2, 4):
        got = summed(on_threads(provider, size, problem, layout=layout))
        assert_close(got, problem.reference(), 1e-10, (provider, layout, mask, size))


SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "2x4": ("attention2d", 8, {"grid": (2, 4)}),
    "4x2 striped in head groups": ("attention2d", 8, {"grid": (4, 2), "layout": "striped", "head_groups": 2}),
    "head axis of 2, then 2x2": ("attention2d", 8, {"head_parallel": 2, "grid": (2, 2)}),
    "hosts of 4, queries travel": ("burst", 8, {"intra_size": 4, "backward": "q"}),
    "usp on stripes": ("usp", 8, {"head_parallel": 4, "layout": "striped"}),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_settings(name: str, backend: str) -> None:
    provider, size, options = SETTINGS[name]
    problem = replace(CASE, **MASKS["all of it"])
    got = summed(on_threads(provider, size, problem, backend=backend, **options))
    assert_close(got, problem.reference(), 1e-10, name)


def test_a_grid_half_of_whose_blocks_nobody_sees() -> None:
    """Documents that end where shards do: a rank's gathered queries see none of its gathered keys."""
    problem = replace(CASE, documents=(0, 32, 64, 96, 128))
    got = summed(on_threads("attention2d", 4, problem, layout="contiguous", grid=(2, 2)))
    assert_close(got, problem.reference(), 1e-10, "2x2")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("dtype", "times"), [(torch.float32, 0.0), (torch.bfloat16, 2.0)], ids=str)
def test_lower_precision(mask: str, dtype: torch.dtype, times: float) -> None:
    """float32: 1e-5; bfloat16: at most twice what the same kernel is off by on one device."""
    problem = replace(CASE, dtype=dtype, **MASKS[mask])
    want = problem.reference()
    single = errors(run(ContextParallel("ring"), problem), want)
    for provider in ("striped", "attention2d", "usp"):
        got = summed(on_threads(provider, 4, problem))
        assert_close(got, want, Result(*(max(1e-5, times * e) for e in single)), (provider, mask))


@pytest.mark.parametrize("bounds", [[1, 128], [0, 127], [0, 70, 60, 128], []])
def test_wrong_document_bounds_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must increase from 0 to the 128 tokens"):
        document_bounds(torch.tensor(bounds, dtype=torch.int32), 128)


def test_empty_documents_change_nothing() -> None:
    assert document_bounds(torch.tensor([0, 0, 5, 5, 9]), 9) == (0, 5, 9)


def test_wrong_sinks_and_windows_are_refused() -> None:
    cp, q = ContextParallel("ring"), torch.zeros(8, 1, 4, 16)
    with pytest.raises(ValueError, match=r"sink must be \[4\], a number for each query head"):
        cp.attention(q, q, q, sink=torch.zeros(3))
    with pytest.raises(ValueError, match=r"window \(-2, 0\): numbers of tokens before and after"):
        cp.attention(q, q, q, window=(-2, 0))
