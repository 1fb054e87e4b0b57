"""Providers, layouts and settings for tests of methods; the bytes of a call counted in three ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.attention.calls import Setup, settled, shapes, without_peers
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.core.block import Block
from cp_plugin.engine.core.values import KeyValues, Queries
from cp_plugin.engine.kernels.blocks import RecordingKernel
from cp_plugin.engine.kernels.cost import Sizes
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.protocol import Formula
from cp_plugin.engine.methods.registry import Resolved
from cp_plugin.testing.traffic import _sent, trace

METHODS = [(name, layout) for name in providers.names() for layout in providers.get(name).layouts]
SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "a row": ("attention2d", 4, {"grid": (1, 4)}),
    "a column": ("attention2d", 4, {"grid": (4, 1)}),
    "2x4": ("attention2d", 8, {"grid": (2, 4)}),
    "4x2 in head groups": ("attention2d", 8, {"grid": (4, 2), "head_groups": 2}),
    "4x2 whole": ("attention2d", 8, {"grid": (4, 2), "head_groups": 1}),
    "6x1": ("attention2d", 6, {"grid": (6, 1)}),
    "1x6": ("attention2d", 6, {"grid": (1, 6)}),
    "2x3": ("attention2d", 6, {"grid": (2, 3)}),
    "3x2": ("attention2d", 6, {"grid": (3, 2)}),
    "4x2 striped": ("attention2d", 8, {"grid": (4, 2), "layout": "striped"}),
    "4x2 striped in head groups": ("attention2d", 8, {"grid": (4, 2), "layout": "striped", "head_groups": 2}),
    "4x4 striped": ("attention2d", 16, {"grid": (4, 4), "layout": "striped"}),
    "4x4": ("attention2d", 16, {"grid": (4, 4)}),
    "8x2": ("attention2d", 16, {"grid": (8, 2)}),
    "head axis of 2, then 2x2": ("attention2d", 8, {"head_parallel": 2, "grid": (2, 2)}),
    "head axis of 2, then 1x2": ("attention2d", 4, {"head_parallel": 2, "grid": (1, 2)}),
    "head axis of 4, then 2x2": ("attention2d", 16, {"head_parallel": 4, "grid": (2, 2)}),
    "head axis of 2, a grid on striped": ("attention2d", 8, {"head_parallel": 2, "layout": "striped", "grid": (2, 2)}),
    "head axis of all": ("attention2d", 4, {"head_parallel": 4}),
    "hosts of 2": ("burst", 8, {"intra_size": 2}),
    "hosts of 4": ("burst", 8, {"intra_size": 4, "layout": "striped"}),
    "hosts of 3": ("burst", 6, {"intra_size": 3, "layout": "contiguous"}),
    "hosts of 2, queries travel": ("burst", 8, {"intra_size": 2, "backward": "q"}),
    "hosts of 4, queries travel": ("burst", 8, {"intra_size": 4, "backward": "q"}),
    "hosts of 2, keys travel": ("burst", 8, {"intra_size": 2, "backward": "kv"}),
    "queries travel": ("burst", 6, {"backward": "q"}),
    "double ring": ("double_ring", 16, {"intra_size": 4}),
    "double ring behind a head axis": ("double_ring", 8, {"intra_size": 2, "head_parallel": 2}),
    "burst behind a head axis": ("burst", 16, {"intra_size": 4, "head_parallel": 2, "backward": "q"}),
    "ring behind a head axis": ("ring", 6, {"head_parallel": 2}),
    "stripes behind a head axis": ("striped", 8, {"head_parallel": 4}),
    "gather behind a head axis": ("all_gather", 8, {"head_parallel": 2, "head_groups": 1}),
    "gather in head groups": ("all_gather", 4, {"head_groups": 2}),
    "usp with few on the head axis": ("usp", 8, {"head_parallel": 2}),
    "usp on stripes": ("usp", 16, {"head_parallel": 4, "layout": "striped"}),
    "needed behind a head axis": ("needed", 8, {"head_parallel": 2}),
    "needed on stripes behind a head axis": ("needed", 6, {"head_parallel": 2, "layout": "striped"}),
    "ulysses on 6": ("ulysses", 6, {}),
}
"""What only a setting reaches: rectangular grids, nested rings, a head axis in front, 6 and 16 ranks."""
EVERY = {f"{name} on {layout}": (name, 4, {"layout": layout}) for name, layout in METHODS} | SETTINGS
"""Name -> provider, number of ranks, options."""


def setup_of(name: str, *, causal: bool = True, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Setup:
    """One of ``EVERY`` with more options, for grouped heads of two sizes and 24 tokens a rank."""
    provider, size, chosen = EVERY[name]
    problem = Problem(
        size=size, heads=24, kv_heads=12, head_dim=2, v_head_dim=3, seq_length=24 * size, dtype=dtype, causal=causal
    )
    return settled(providers.get(provider), problem, Options(**chosen, **options))


def kernel_calls(setup: Resolved, index: int) -> list[tuple[Block, Sizes]]:
    """What rank ``index`` asks its kernel for in a forward."""
    calls, problem = list[tuple[Block, Sizes]](), setup.problem
    kernel = RecordingKernel(lambda q, kv, block: calls.append((block, Sizes.from_tensors(q.q, *kv.tensors))))
    q, k, v, *_ = shapes(problem, problem.seq_length // problem.size)
    without_peers(setup.provider, problem, setup.options, index, kernel).forward(Queries(q), KeyValues(k, v))
    return calls


def traced(setup: Setup) -> list[Formula]:
    """Bytes of each rank by the closed formula, which must equal the trace (AssertionError)."""
    formulas = predict(setup)
    for index in (1, setup.problem.size - 1):  # off the diagonal of a grid and on it
        assert trace(setup, index) == formulas[index], (setup, index)
    return formulas


def count_on_the_wire(setup: Setup) -> list[Formula]:
    """As ``traced``; the ledgers of ranks that are threads must agree as well."""

    def rank(mesh: Mesh) -> Formula:
        return _sent(ContextParallel(setup, mesh=mesh), setup.problem, "cpu")

    formulas = traced(setup)
    assert run_threads(rank, setup.axes) == formulas, setup
    return formulas


def predict(setup: Setup, **options: Any) -> list[Formula]:
    """(phase, axis) -> bytes of each rank by the closed formula; options: override the setup's."""
    chosen = replace(setup.options, **options)
    return [dict(setup.provider.traffic(setup.problem, chosen, index)) for index in range(setup.problem.size)]
