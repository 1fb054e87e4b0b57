"""Head axis: Ulysses in front of any method, so that U ranks share the heads of U times as many tokens.

    8 ranks, U = 2:   0 1 | 2 3 | 4 5 | 6 7      each pair exchanges heads (Ulysses), then
                      heads 0: 0 2 4 6           the method runs among the ranks with the same heads,
                      heads 1: 1 3 5 7           on 4 shards that are twice as long

Exchanging heads is the cheapest traffic there is, until the heads run out. ``--cp-head-parallel U`` puts the axis in
front of any provider; ``usp`` (arXiv 2405.07719) is the ring behind the largest head axis that pays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from cp_plugin.engine.comm import Mesh
from cp_plugin.engine.common.text import divisors, show_bytes
from cp_plugin.engine.core.layout import Layout, Segments
from cp_plugin.engine.core.options import Option, Options, not_a_divisor, whole_number
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.spelling import spelled
from cp_plugin.engine.methods.moves import Moved
from cp_plugin.engine.methods.protocol import Attend, Choice, Formula, Provider
from cp_plugin.engine.methods.ring import RING
from cp_plugin.engine.methods.ulysses import HEAD, Ulysses, exchange_bytes, heads_do_not_divide

HEAD_PARALLEL = Option(
    "head_parallel",
    metavar="U",
    meaning="ranks in a head axis (Ulysses) in front of the method",
    default="no head axis; usp chooses its size",
    read=whole_number,
    write="a number of ranks, such as 2",
    misfit=not_a_divisor,
)


def with_head_axis(inner: Provider, name: str = "") -> Provider:
    """The provider behind a head axis of ``Options.head_parallel`` ranks: the fastest axis, of neighbouring ranks."""

    def axes(size: int, options: Options) -> dict[str, int]:
        ranks = options.head_parallel or 1
        return {**inner.axes(size // ranks, options), HEAD: ranks}

    def build(mesh: Mesh, local: Attend, problem: Problem, options: Options) -> Attend:
        method = inner.build(mesh, local, _inner_problem(problem, options), options)
        return Moved((Ulysses(mesh, HEAD, problem.kv_heads),), method, kept=True)

    def traffic(problem: Problem, options: Options, index: int) -> Formula:
        ranks = options.head_parallel or 1
        behind = inner.traffic(_inner_problem(problem, options), options, index // ranks)
        return {**exchange_bytes(problem, ranks), **behind}

    def choose(problem: Problem, options: Options) -> Choice:
        ranks = 1 if options.head_parallel is None else options.head_parallel
        if HEAD in inner.axes(problem.size, options):
            raise ValueError(
                f"{spelled(HEAD_PARALLEL, ranks)}: {spelled('provider', inner.name)} already splits the heads across "
                "all ranks"
            )
        HEAD_PARALLEL.check_ranks(ranks, problem.size)
        try:
            return inner.choose(_inner_problem(problem, options), options)
        except ValueError as error:
            if ranks == 1:
                raise
            raise ValueError(f"{error} ({spelled(HEAD_PARALLEL, ranks)} leaves that many)") from None

    def unsupported(problem: Problem, options: Options) -> str | None:
        ranks = options.head_parallel or 1
        refused = heads_do_not_divide(problem, ranks, spelled(HEAD_PARALLEL, ranks))
        return refused or inner.unsupported(_inner_problem(problem, options), options)

    return replace(
        inner,
        name=name or inner.name,
        options=(*inner.options, HEAD_PARALLEL),
        axes=axes,
        build=build,
        traffic=traffic,
        choose=choose,
        unsupported=unsupported,
        beside=(HEAD, *inner.beside),
    )


def _inner_problem(problem: Problem, options: Options) -> Problem:
    """The problem as the inner method sees it."""
    ranks = options.head_parallel or 1
    heads, kv_heads = problem.heads // ranks, lcm(problem.kv_heads, ranks) // ranks
    if heads_do_not_divide(problem, ranks):  # refused before it is built
        heads = kv_heads = 1
    inside = replace(problem, size=problem.size // ranks, heads=heads, kv_heads=kv_heads)
    made = problem.placed
    placed = made and Layout(made.name, made.chunks, _Together(made, ranks))
    return replace(inside, placed=placed).with_transport(hosts=problem.transport.hosts[::ranks], block=problem.shared)


@dataclass(frozen=True, slots=True)
class _Together:
    """A layout each of whose shards merges those of ``ranks`` neighbouring ranks."""

    layout: Layout
    ranks: int

    def __call__(self, seq_length: int, size: int, index: int) -> Segments:
        ranks = range(index * self.ranks, (index + 1) * self.ranks)
        return tuple(s for rank in ranks for s in self.layout.segments(seq_length, size * self.ranks, rank))


def _choose_usp(problem: Problem, options: Options) -> Choice:
    """The head axis that sends the fewest bytes."""
    if options.head_parallel is not None or problem.size == 1:
        return _USP.choose(problem, options)
    sent = {
        ranks: sum(_USP.traffic(problem, replace(options, head_parallel=ranks), 0).values())
        for ranks in divisors(problem.size)[1:]
        if heads_do_not_divide(problem, ranks) is None
    }
    if not sent:
        raise ValueError(
            f"{spelled('provider', 'usp')} cannot split {problem.heads} query and {problem.kv_heads} key/value heads "
            f"across any subset of {problem.size} context-parallel ranks: use ring, or another provider that keeps "
            "heads whole"
        )
    best = min(sent, key=lambda ranks: sent[ranks])
    reason = (
        f"head axis of {best} ranks, the fewest bytes ({show_bytes(sent[best])} from each rank) with {problem.heads} "
        f"query and {problem.kv_heads} key/value heads"
    )
    behind = _USP.choose(problem, replace(options, head_parallel=best))
    return Choice(behind.options, (reason, *behind.why))


_USP = with_head_axis(RING, "usp")

PROVIDERS = (
    replace(
        _USP,
        summary="USP (arXiv 2405.07719): heads exchanged as far as they can be split, then a ring",
        layouts=("zigzag", "striped", "contiguous", "documents"),
        choose=_choose_usp,
        asks_heads=lambda options: options.head_parallel is None,
    ),
)
