"""Attention on placed packs: every method against the float64 oracle, bytes and balance."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from method_cases import SETTINGS
from nightly import each_value, nightly
from oracle import Case, Result, assert_close
from thread_ranks import run, typical

from cp_plugin import ContextParallel, Options
from cp_plugin.engine.attention.packs import place_documents
from cp_plugin.engine.attention.shift import shift
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.placement.documents import DOCUMENTS

BOUNDS = (0, 3, 50, 51, 64, 113, 192)
CU_SEQLENS = torch.tensor(BOUNDS, dtype=torch.int32)
CASE = Case(seq_length=192, heads=8, kv_heads=2, causal=True, dtype=torch.float64, documents=BOUNDS)
PLACED = [name for name in providers.names() if DOCUMENTS.name in providers.get(name).layouts]
COMPOSED = [name for name, (provider, *_) in SETTINGS.items() if provider in PLACED]
METHODS = {name: (name, 4, {}) for name in PLACED} | SETTINGS


@each_value
@pytest.mark.parametrize(
    "name", [*PLACED, *(pytest.param(name, marks=nightly if SETTINGS[name][1] > 4 else ()) for name in COMPOSED)]
)
@pytest.mark.parametrize("window", [None, (9, 0)])
def test_float64(name: str, window: tuple[int, int] | None) -> None:
    """The same call on tokens of the layout it came from, of the pack, and of the layout again: no plans are shared."""
    provider, size, options = METHODS[name]
    case = replace(CASE, window=window, heads={6: 12, 16: 16}.get(size, 8))
    layout = "zigzag" if "zigzag" in providers.get(provider).layouts else None
    settled = providers.settle(provider, typical(case, size), Options(**{"layout": layout} | options))

    def rank(mesh: Mesh) -> list[Result]:
        cp = ContextParallel(settled, mesh=mesh)
        return [run(where, case) for where in (cp, place_documents(cp, CU_SEQLENS), cp)]

    want = case.reference()
    for index, results in enumerate(run_threads(rank, settled.axes)):
        for got in results:
            assert_close(got, want, 1e-10, (name, index))


def test_each_pack_has_a_layout_of_its_own() -> None:
    def rank(mesh: Mesh) -> None:
        cp = ContextParallel("needed", mesh=mesh, layout="documents")
        first, second = (place_documents(cp, torch.tensor(bounds)) for bounds in (BOUNDS, (0, 100, 192)))
        segments, others = (pack.segments(192, lambda _: (0,)) for pack in (first, second))
        assert first.layout != second.layout and segments != others
        assert place_documents(cp, CU_SEQLENS) is first, "with its plans"
        with pytest.raises(ValueError, match="for 192 tokens on 4 context-parallel ranks, not for 96 on 4"):
            first.shard(torch.zeros(96))

    run_threads(rank, {"cp": 4})


def test_the_next_tokens_of_a_placed_pack() -> None:
    tokens = torch.arange(1.0, 193)

    def rank(mesh: Mesh) -> torch.Tensor:
        cp = place_documents(ContextParallel("needed", mesh=mesh), CU_SEQLENS)
        return cp.unshard(shift(cp, cp.shard(tokens)))

    for got in run_threads(rank, {"cp": 4}):
        assert got.tolist() == [*tokens[1:].tolist(), 0]


def test_what_cannot_be_placed_is_refused() -> None:
    def rank(mesh: Mesh) -> list[str]:
        said = []
        for provider, bounds in (("lasp2", BOUNDS), ("striped", BOUNDS), ("needed", (0, 5, 3)), ("needed", (0, 5, 9))):
            with pytest.raises(ValueError) as refused:
                place_documents(ContextParallel(provider, mesh=mesh), torch.tensor(bounds))
            said.append(str(refused.value))
        return said

    for linear, striped, falling, uneven in run_threads(rank, {"cp": 2}):
        assert "'lasp2' does not run on the layout 'documents', only on contiguous, zigzag" in linear
        assert "'striped' does not run on the layout 'documents', only on striped" in striped
        assert "cu_seqlens must increase from 0" in falling
        assert "a pack of 9 tokens cannot be split evenly across 2" in uneven
