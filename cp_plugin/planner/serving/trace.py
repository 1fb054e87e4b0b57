"""Tracing of serving: one layer's attention for a prefill chunk, and for a decoded token.

Nothing is modelled: ``cp_plugin.inference.Session`` itself runs, on tensors without data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.calls import shapes
from cp_plugin.attention.setups import Setup, settled
from cp_plugin.comm import Mesh, TraceMesh
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.inference import Session, slots_for, tree
from cp_plugin.inference.store import Latent
from cp_plugin.methods import registry as providers
from cp_plugin.methods.protocol import Formula
from cp_plugin.planner.machine.events import Event
from cp_plugin.planner.trace.memory import Peaks
from cp_plugin.planner.trace.program import Program, traced
from cp_plugin.testing.traffic import by_phase_and_axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A softmax layer and its cache on one tensor-parallel rank."""

    problem: Problem
    """Its attention call."""
    kv_rank: int = 0
    """MLA: elements of the cached latent vector; 0: keys and values are cached."""
    rope_dim: int = 0
    """MLA: elements of the rotated key part, cached with it."""
    fp8: bool = False
    """The cache holds one byte per element."""

    def slot(self) -> int:
        """Cache bytes per token of all sequences, on the rank that holds it."""
        p = self.problem
        rows = [(p.kv_heads, p.head_dim), (p.kv_heads, p.v_head_dim)]
        if self.kv_rank:
            rows = [(1, self.kv_rank + self.rope_dim)]
        element, exponent = (1, 1) if self.fp8 else (p.dtype.itemsize, 0)
        return p.batch * sum(n * (d * element + exponent) for n, d in rows)

    def session(self, cp: ContextParallel, capacity: int, mesh: Mesh) -> Session:
        """A session without data, ready to attend in this layer."""
        batch, device = self.problem.batch, torch.device("meta")
        session = Session(cp, batch=batch, capacity=capacity, mesh=mesh, fp8=self.fp8, device=device)
        (_, k, v), latent = self.inputs(1)
        session.reserve(0, k, v, latent)
        return session

    def inputs(self, tokens: int) -> tuple[tuple[Tensor, Tensor, Tensor], Latent | None]:
        """q, k, v without data, and for MLA their latent."""
        q, k, v, *_ = shapes(self.problem, tokens)
        if not self.kv_rank:
            return (q, k, v), None
        p, r, rotated = self.problem, self.kv_rank, self.rope_dim
        rows = q.new_empty(tokens, p.batch, 1, r + rotated)
        up_k, up_v = q.new_empty(p.heads, p.head_dim - rotated, r), q.new_empty(p.heads, p.v_head_dim, r)
        return (q, k, v), Latent(rows, up_k, up_v)


def chunk_program(setup: Setup, layer: Layer, index: int, before: int, *, tiled: bool = False) -> Program:
    """Program of one layer's attention for a prefill chunk; its backward is empty.

    Args:
        setup: of a problem with the chunk's tokens.
        before: number of chunks already in the cache.

    Raises:
        ValueError: for a setup that cannot run, with its reason.
    """
    tokens = setup.problem.seq_length
    with traced(setup, index, tiled=tiled) as seen:
        cp = seen.cp
        whole = max(1, cp.layout.divisor(cp.size) // cp.size)  # smallest chunk that the layout can divide
        slots = slots_for((before + 1) * tokens, cp.size, whole)
        session = layer.session(cp, slots, TraceMesh({tree.AXIS: cp.size}, index))
        qkv, latent = layer.inputs(tokens // cp.size)
        for _ in range(before):
            with session.prefill(tokens):
                pass
        with session.prefill(tokens):
            seen.events.clear()
            seen.meter.peak = seen.meter.live
            there = seen.meter.live
            session.attend(0, *qkv, window=layer.problem.window, latent=latent)
        return Program(
            forward=tuple(seen.events),
            backward=(),
            sent=by_phase_and_axis(cp.mesh),
            peaks=Peaks(seen.meter.peak - there, 0),
        )


class Token(NamedTuple):
    """Events of the busiest rank for one token of each sequence."""

    step: tuple[Event, ...]
    """Once per token."""
    layer: tuple[Event, ...]
    """In each softmax layer."""
    sent: Formula
    """Per layer."""
    kept: int
    """Cache bytes per layer."""


def token(layer: Layer, context: int, *, tiled: bool = False) -> Token:
    """Trace the token after ``context`` others in one layer; decode is the same for all providers.

    Args:
        context: a multiple of what a cyclic layout can divide.
        tiled: the cache is read in blocks, in plain torch.
    """
    problem = replace(layer.problem, seq_length=context)
    setup = replace(settled(providers.get("striped"), problem, Options()), reason=None)  # where nothing is prefilled
    with traced(setup, 0, tiled=tiled, reads=True) as seen:
        session = layer.session(seen.cp, slots_for(context + problem.size + 1, problem.size), seen.cp.mesh)
        qkv, latent = layer.inputs(1)
        with session.prefill(context):
            pass
        session.close([context] * problem.batch)
        seen.events.clear()
        with session.decode(1):
            step = tuple(seen.events)
            seen.events.clear()
            seen.cp.mesh.ledger.reset()
            session.attend(0, *qkv, window=layer.problem.window, latent=latent)
        return Token(step, tuple(seen.events), by_phase_and_axis(seen.cp.mesh), session.nbytes)
