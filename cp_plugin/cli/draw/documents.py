"""The picture of a pack of documents: the visible keys of every query, and the keys that ranks fetch.

    cp-plugin draw --provider needed --plot pack.svg --documents 24,14,10,8,5,3

Zigzag layout and document placement side by side. Fetches are the plan of the provider ``needed``
(``cp_plugin.core.needs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from cp_plugin.attention.setups import settled
from cp_plugin.cli.draw import canvas
from cp_plugin.core.needs import needs, rows_of
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.methods import registry as providers
from cp_plugin.placement.documents import DOCUMENTS, get_layout
from cp_plugin.planner.packs import balance

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 256
"""Tokens that are distinguishable in a picture."""
_PALE = 0.55


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The keys that the queries of each rank see, on one layout."""

    layout: str
    bounds: tuple[int, ...]
    """Where the documents begin, and the length of the pack."""
    holders: Sequence[int]
    """Position -> the rank that holds the token."""
    fetched: Sequence[frozenset[int]]
    """Rank -> positions of the keys that are sent to it."""

    balance: float
    """The work of the busiest rank over the mean."""

    def first(self, query: int) -> int:
        """The first key that a query sees: where its document begins."""
        return max(start for start in self.bounds if start <= query)


def fetched(lengths: Sequence[int], size: int, layout: str) -> Fetched:
    """The keys that each rank is sent by ``needed``; ValueError for a pack that the layout cannot divide."""
    bounds = tuple(accumulate(lengths, initial=0))
    problem = Problem(size=size, seq_length=bounds[-1], bounds=bounds)
    setup = settled(providers.get("needed"), problem, Options(layout=layout))
    if setup.reason is not None:
        raise ValueError(setup.reason)
    made = setup.problem.placed or get_layout(layout)
    held = [made.segments(bounds[-1], size, rank) for rank in range(size)]
    plan = needs(held, held, problem.mask())
    holders = {p: rank for rank, segments in enumerate(held) for s in segments for p in s}
    sent = [
        [p for owner in range(size) if owner != rank for s in rows_of(held[owner], plan.rows(rank, owner)) for p in s]
        for rank in range(size)
    ]
    return Fetched(
        layout=layout,
        bounds=bounds,
        holders=[holders[p] for p in range(bounds[-1])],
        fetched=[frozenset(positions) for positions in sent],
        balance=balance(setup),
    )


def draw_documents(path: Path, lengths: Sequence[int], size: int = 4) -> None:
    """Write the picture to ``path`` (PNG, SVG or PDF by its suffix); ValueError if matplotlib is missing, and for more
    ranks or tokens than can be drawn, or that do not divide.

    Args:
        lengths: tokens of each document, in the order of the pack.
        size: context-parallel ranks, at most 8.
    """
    canvas.check_ranks(size)
    if sum(lengths) > MOST:
        raise ValueError(f"--documents of {sum(lengths)} tokens do not fit in a picture: use {MOST} tokens or fewer")
    heights = (0.7, 3.6, 0.9 + 0.25 * size)
    figure = canvas.new_figure(canvas.WIDTH, 2 * (sum(heights) + 0.6))
    grid = figure.add_gridspec(6, 1, height_ratios=heights * 2)
    for number, layout in enumerate(("zigzag", DOCUMENTS.name)):
        found = fetched(lengths, size, layout)
        most = max(map(len, found.fetched))
        title = (
            f"{layout}: busiest rank {found.balance:.2f} of the mean;\n{sum(map(len, found.fetched))} keys sent, "
            f"{most} to one rank"
        )
        canvas.draw_holders(figure.add_subplot(grid[3 * number]), found.holders, title)
        _draw_pairs(figure.add_subplot(grid[3 * number + 1]), found)
        _draw_keys(figure.add_subplot(grid[3 * number + 2]), found)
    canvas.save(figure, path)


def _draw_pairs(axes: Axes, found: Fetched) -> None:
    """The attention matrix in the order of the pack, coloured by the query's rank; fetched keys are paler."""
    tokens = len(found.holders)
    axes.add_patch(canvas.box(0, 0, tokens, tokens, canvas.IDLE))
    for rank, colour in enumerate(canvas.RANK_COLOURS[: len(found.fetched)]):
        boxes: dict[bool, list[canvas.Box]] = {True: [], False: []}
        for query in (q for q, holder in enumerate(found.holders) if holder == rank):
            keys = range(found.first(query), query + 1)
            for held, run in groupby(keys, key=lambda k, rank=rank: found.holders[k] == rank):
                of_run = list(run)
                boxes[held].append((of_run[0], query, len(of_run), 1))
        canvas.fill(axes, boxes[True], colour)
        canvas.fill(axes, boxes[False], canvas.paler(colour, _PALE))
    axes.set(xlim=(0, tokens), ylim=(tokens, 0), aspect="equal", xticks=[], yticks=[], ylabel="queries", xlabel="keys")
    axes.set_title("Visible keys of each query; pale: of other ranks", fontsize=canvas.POINTS, loc="left")
    canvas.plain(axes)


def _draw_keys(axes: Axes, found: Fetched) -> None:
    """A row per rank: the keys that it holds, and paler those that it fetches, in the colours of their owners."""
    tokens, size = len(found.holders), len(found.fetched)
    axes.add_patch(canvas.box(0, 0, tokens, size, canvas.IDLE))
    for owner, colour in enumerate(canvas.RANK_COLOURS[:size]):
        own = [p for p, holder in enumerate(found.holders) if holder == owner]
        canvas.fill(axes, [(p, owner + 0.05, 1, 0.9) for p in own], colour)
        away = [(p, rank + 0.05, 1, 0.9) for rank in range(size) for p in own if p in found.fetched[rank]]
        canvas.fill(axes, away, canvas.paler(colour, _PALE))
    axes.set(xlim=(0, tokens), ylim=(size, 0), xticks=_apart(found.bounds), yticks=[rank + 0.5 for rank in range(size)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(size)], fontsize=canvas.POINTS)
    axes.set_title("Keys held and, paler, fetched; owner's colour", fontsize=canvas.POINTS, loc="left")
    axes.set_xlabel("keys; ticks: where documents begin", fontsize=canvas.POINTS)
    canvas.plain(axes)


def _apart(bounds: Sequence[int]) -> list[int]:
    """The bounds whose numbers do not touch those of the last, or of the one before."""
    kept: list[int] = []
    for bound in bounds[:-1]:
        if bounds[-1] - bound > bounds[-1] / 12 and (not kept or bound - kept[-1] > bounds[-1] / 12):
            kept.append(bound)
    return [*kept, bounds[-1]]
