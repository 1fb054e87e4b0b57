"""``cp-plugin traffic``: the bytes that every rank sends, by formula, by trace, and measured.

    formula   ``Provider.traffic``: closed, for any number of ranks
    trace     the method itself on a ``TraceMesh`` and the meta device: no data, no peers
    ledger    the method itself on forked Gloo ranks, forward and backward through autograd

``compare`` requires all three to be equal to the byte, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from cp_plugin.engine.attention import calls
from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.calls import Setup, can_place, settled_or_reason, setups, with_float32_sums
from cp_plugin.engine.comm import Mesh, TraceMesh
from cp_plugin.engine.common.without_data import WithoutData
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem, Transport
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.protocol import Formula, Provider
from cp_plugin.engine.placement.documents import DOCUMENTS
from cp_plugin.testing.launch import run_ranks
from cp_plugin.testing.ranks import refuse_too_large, with_progress

EQUAL = "equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A setup and what each rank sends in one call, forward and backward."""

    setup: Setup
    ranks: tuple[Formula, ...] = ()
    """(phase, axis) -> bytes, for every rank; empty if the setup cannot do the problem."""
    ratio: float | None = None
    """``most`` relative to a ring's; None where a ring sends nothing."""
    measured: str = ""
    """``equal``, or how ledger, trace and formula differ; empty: not measured."""

    @property
    def busiest(self) -> Formula:
        """Bytes of the rank that sends most."""
        return max(self.ranks, key=lambda sent: sum(sent.values()))

    @property
    def most(self) -> int:
        """Total bytes of the busiest rank."""
        return sum(self.busiest.values())

    @property
    def least(self) -> int:
        """Total bytes of the least busy rank."""
        return min(sum(sent.values()) for sent in self.ranks)


def price(chosen: Sequence[str], problem: Problem, options: Options) -> list[Row]:
    """The traffic of the providers chosen, or of all; of packed documents on placed tokens, too, where that changes it.
    ValueError for an unknown provider, or options that do not fit it."""
    every = [one for setup in setups(chosen, problem, options) for one in (setup, *_placed(setup))]
    ring = price_one(settled_or_reason(providers.get("ring"), problem, Options()))
    return [price_one(setup, ring) for setup in every]


def price_one(setup: Setup, ring: Row | None = None) -> Row:
    """One setup's traffic by its formula."""
    if setup.reason is not None:
        return Row(setup=setup)
    traffic = setup.provider.traffic
    row = Row(setup=setup, ranks=tuple(traffic(setup.problem, setup.options, i) for i in range(setup.problem.size)))
    return replace(row, ratio=row.most / ring.most) if ring is not None and ring.ranks and ring.most else row


HEADS = {"MHA": (32, 32), "GQA": (32, 4), "MQA": (32, 1)}
"""Query and key/value heads: one key/value head per query head, per eight, one for all."""
RANKS_PER_HOST = 8


def typical(size: int, kind: str) -> Problem:
    """The problem of the documentation: 131072 tokens, head size 128, bfloat16, causal, eight ranks per host."""
    heads, kv_heads = HEADS[kind]
    hosts = tuple(f"host{rank // RANKS_PER_HOST}" for rank in range(size))
    return Problem(size=size, heads=heads, kv_heads=kv_heads, seq_length=2**17, transport=Transport(hosts=hosts))


def priced(provider: str | Provider, problem: Problem, **options: Any) -> Row:
    """What each rank sends with sums in float32, and its ratio to a ring; of no rank if the provider refuses it."""
    return price_one(with_float32_sums(providers.get(provider), problem, Options(**options)), _ring(problem))


@cache
def _ring(problem: Problem) -> Row:
    return price_one(with_float32_sums(providers.get("ring"), problem, Options()))


def trace(setup: Setup, index: int) -> Formula:
    """Return what one rank sends, by a dry run without peers."""
    cp = ContextParallel(setup, mesh=TraceMesh(setup.axes, index))
    with WithoutData():
        return _sent(cp, setup.problem, "meta")


def compare(rows: Sequence[Row]) -> list[Row]:
    """Run every row on forked Gloo ranks, and note whether ledger, trace and formula are equal. ValueError if the
    problem is too large for this machine; RankError if a rank fails."""
    possible = [row.setup for row in rows if row.setup.reason is None]
    if not possible:
        return list(rows)
    seconds = refuse_too_large(possible[0].problem, len(possible))

    def rank() -> list[Formula]:
        return [
            _sent(ContextParallel(setup, group=dist.group.WORLD), setup.problem, "cpu")
            for setup in with_progress(possible, "measuring")
        ]

    by_rank = run_ranks(rank, possible[0].problem.size, init_process_group=True, timeout=300 + 2 * seconds)
    ledgers = iter(zip(*by_rank, strict=True))
    return [row if row.setup.reason is not None else _measured(row, next(ledgers)) for row in rows]


def _placed(setup: Setup) -> list[Setup]:
    """The setup on tokens placed by document, where that changes what is sent."""
    if setup.reason is not None or not can_place(setup.provider, setup.problem):
        return []
    placed = settled_or_reason(setup.provider, setup.problem, replace(setup.options, layout=DOCUMENTS.name))
    return [placed] if placed.reason is None and price_one(placed).ranks != price_one(setup).ranks else []


def _sent(cp: ContextParallel, problem: Problem, device: str) -> Formula:
    """Forward and backward of zeros on this rank; what its ledger says."""
    shapes = calls.shapes(problem, problem.seq_length // problem.size)
    zeros = (None if y is None else torch.zeros_like(y, device=device).requires_grad_() for y in shapes)
    calls.call_through_autograd(cp, calls.Inputs(*zeros), problem)
    return read_ledger(cp.mesh)


def read_ledger(mesh: Mesh) -> Formula:
    """A ledger in the form of a formula."""
    sent: dict[tuple[str, str], int] = {}
    for line in mesh.ledger.entries():
        sent[line.phase, line.axis] = sent.get((line.phase, line.axis), 0) + line.bytes
    return sent


def _measured(row: Row, ledgers: Sequence[Formula]) -> Row:
    for index, (ledger, formula) in enumerate(zip(ledgers, row.ranks, strict=True)):
        sources = {"ledger": dict(ledger), "trace": dict(trace(row.setup, index)), "formula": dict(formula)}
        for phase, axis in sorted({line for sent in sources.values() for line in sent}):
            sizes = {name: sent.get((phase, axis), 0) for name, sent in sources.items()}
            if len(set(sizes.values())) > 1:
                shown = ", ".join(f"{name} {n:,}" for name, n in sizes.items())
                return replace(row, measured=f"rank {index}, {phase}, axis {axis}: {shown}")
    return replace(row, measured=EQUAL)
