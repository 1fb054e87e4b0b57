"""What a rank does when it answers: one layer's attention in a part of a prompt, and for a token that is decoded.

Nothing is modelled here either: ``cp_plugin.inference.Session`` itself runs, on tensors without data, as ``program``
runs a method.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.setups import Setup, settled
from cp_plugin.comm import TraceMesh
from cp_plugin.core.mask import Window
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.inference import Session, slots_for, tree
from cp_plugin.inference.store import Latent
from cp_plugin.methods import registry as providers
from cp_plugin.methods.protocol import Formula
from cp_plugin.planner.events import Event
from cp_plugin.planner.memory import Peaks
from cp_plugin.planner.program import Program, traced
from cp_plugin.testing.traffic import by_phase_and_axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer of softmax attention and what is kept for it, on one tensor-parallel rank."""

    size: int
    """Context-parallel ranks."""
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    window: Window | None = None
    kv_rank: int = 0
    """Of multi-latent attention: elements of the compressed vector that is kept; 0: keys and values are kept."""
    rope_dim: int = 0
    """And of the rotated part of keys behind it."""
    fp8: bool = False
    """What is kept is in one byte an element."""

    @classmethod
    def of(cls, problem: Problem, kv_rank: int, rope_dim: int, fp8: bool) -> Layer:
        """The layer of an attention call."""
        p = problem
        return cls(
            size=p.size, heads=p.heads, kv_heads=p.kv_heads, head_dim=p.head_dim, v_head_dim=p.v_head_dim,
            batch=p.batch, dtype=p.dtype, window=p.window, kv_rank=kv_rank, rope_dim=rope_dim, fp8=fp8,
        )  # fmt: skip

    def slot(self) -> int:
        """Bytes that a token of all sequences takes on the rank that keeps it."""
        rows = [(1, self.kv_rank + self.rope_dim)] if self.kv_rank else [
            (self.kv_heads, self.head_dim), (self.kv_heads, self.v_head_dim)
        ]  # fmt: skip
        element, exponent = (1, 1) if self.fp8 else (self.dtype.itemsize, 0)
        return self.batch * sum(n * (d * element + exponent) for n, d in rows)

    def inputs(self, tokens: int) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], Latent | None]:
        """q, k and v of so many tokens, without data, and what k and v are made of."""

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=self.dtype, device="meta")

        t, b, h, g, d, e = tokens, self.batch, self.heads, self.kv_heads, self.head_dim, self.v_head_dim
        made = empty(t, b, h, d), empty(t, b, g, d), empty(t, b, g, e)
        if not self.kv_rank:
            return made, None
        r, p = self.kv_rank, self.rope_dim
        return made, Latent(empty(t, b, 1, r + p), empty(h, d - p, r), empty(h, e, r))


def capacity(tokens: int, cp: ContextParallel) -> int:
    """Slots of a rank for a context of so many tokens, a whole part of the layout."""
    return slots_for(tokens, cp.size, max(1, cp.layout.divisor(cp.size) // cp.size))


def chunk_program(setup: Setup, layer: Layer, index: int, before: int, *, tiled: bool = False) -> Program:
    """What one layer's attention does for a part of a prompt; its backward is empty.

    Args:
        setup: of a problem with as many tokens as the part.
        before: parts like it that have been taken in already.

    Raises:
        ValueError: for a setup that cannot be run: its reason.
    """
    tokens = setup.problem.seq_length
    with traced(setup, index, tiled=tiled) as seen:
        cp, slots = seen.cp, capacity((before + 1) * tokens, seen.cp)
        beside = TraceMesh({tree.AXIS: cp.size}, index)
        session = Session(
            cp, batch=layer.batch, capacity=slots, mesh=beside, fp8=layer.fp8, device=torch.device("meta")
        )
        qkv, latent = layer.inputs(tokens // cp.size)
        session.reserve(0, qkv[1], qkv[2], latent)
        for _ in range(before):
            with session.prefill(tokens):
                pass
        with session.prefill(tokens):
            seen.events.clear()
            seen.meter.peak = seen.meter.live
            there = seen.meter.live
            session.attend(0, *qkv, window=layer.window, latent=latent)
        return Program(
            index=index,
            forward=tuple(seen.events),
            backward=(),
            sent=by_phase_and_axis(cp.mesh),
            peaks=Peaks(seen.meter.peak - there, 0),
        )


class Token(NamedTuple):
    """What the rank that has most to do does for one token of each sequence."""

    step: tuple[Event, ...]
    """Once: where the token is kept."""
    layer: tuple[Event, ...]
    """In each layer of softmax attention."""
    sent: Formula
    """Of one layer."""
    kept: int
    """Bytes that it keeps of one layer."""


def token(layer: Layer, context: int, *, tiled: bool = False) -> Token:
    """For the next token behind so many, of one layer; decode is the same for all providers.

    Args:
        context: a multiple of what a cyclic layout can divide.
        tiled: as for ``program``: the cache is read in blocks, in plain torch.
    """
    problem = Problem(
        size=layer.size, heads=layer.heads, kv_heads=layer.kv_heads, head_dim=layer.head_dim,
        v_head_dim=layer.v_head_dim, seq_length=context, batch=layer.batch, dtype=layer.dtype, window=layer.window,
    )  # fmt: skip
    setup = replace(settled(providers.get("striped"), problem, Options()), reason=None)  # where nothing is prefilled
    with traced(setup, 0, tiled=tiled, reads=True) as seen:
        slots = slots_for(context + layer.size + 1, layer.size)
        session = Session(
            seen.cp, batch=layer.batch, capacity=slots, mesh=seen.cp.mesh, fp8=layer.fp8, device=torch.device("meta")
        )
        qkv, latent = layer.inputs(1)
        with session.prefill(context):
            pass
        session.close([context] * layer.batch)
        session.reserve(0, qkv[1], qkv[2], latent)
        seen.events.clear()
        with session.decode(1):
            step = tuple(seen.events)
            seen.events.clear()
            seen.cp.mesh.ledger.reset()
            session.attend(0, *qkv, window=layer.window, latent=latent)
        return Token(step, tuple(seen.events), by_phase_and_axis(seen.cp.mesh), session.nbytes)
