"""``cp-plugin draw``: which rank computes which part of a method, in which step, and the time of each step.

    cp-plugin draw --provider attention2d --plot grid.svg --ranks 4 --grid 2x2

It is drawn from a recording (``cp_plugin.tools.draw.calls``), so third-party providers can be drawn, too.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cp_plugin.engine.common.text import show_option
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.methods.protocol import Provider
from cp_plugin.tools import flags, output
from cp_plugin.tools.draw import canvas
from cp_plugin.tools.draw.calls import Recording, record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 256
"""Tokens that are distinguishable in a picture."""


@flags.provider_options(without=("backend", "fp8", "gradient_dtype"))
def draw(
    plot: Annotated[Path, typer.Option(help="picture to write, a .png, .svg or .pdf file")],
    provider: Annotated[str, typer.Option(metavar="NAME", help="method to draw")],
    ranks: Annotated[int, typer.Option(min=1, max=8, help="context-parallel ranks")] = 4,
    documents: Annotated[
        str | None,
        typer.Option(metavar="LENGTHS", help="packed documents, such as 24,14,10,8,5,3; default: one document"),
    ] = None,
    *,
    options: Options,
) -> None:
    """Draw which rank holds and computes what, and for how long."""
    with flags.errors_in_one_line():
        output.check_output(plot, "picture", output.PICTURES, "--plot")
        bounds = () if documents is None else tuple(itertools.accumulate(flags.lengths(documents), initial=0))
        draw_method(plot, provider, ranks, bounds=bounds, layout=options.layout, **options.chosen)
    typer.echo(f"wrote {plot}")


def draw_method(
    path: Path,
    provider: str | Provider,
    size: int = 4,
    *,
    tokens: int = 0,
    bounds: tuple[int, ...] = (),
    **options: Any,
) -> None:
    """Write the picture (PNG, SVG or PDF by the suffix) of one head per rank; the matrix shows head 0. ValueError if
    matplotlib is missing, there are more ranks than colours, or the provider refuses the problem.

    Args:
        size: context-parallel ranks, at most 8.
        tokens: drawn one by one; 0: eight per rank.
        bounds: where the documents of a pack begin, and its length, which replaces ``tokens``; empty: none.
        options: as for ``ContextParallel``.
    """
    if size > (most := len(canvas.RANK_COLOURS)):
        raise ValueError(f"{size} ranks have no distinct colours: use {most} or fewer")
    about = max(1, 8192 // (2 * size)) * 2 * size  # divisible over the ranks on every layout
    # the ragged edge of a short sequence would mislead in the timeline
    lengths = (bounds[-1], bounds[-1]) if bounds else (tokens or 8 * size, about)
    if lengths[0] > MOST:
        raise ValueError(f"{lengths[0]} tokens do not fit in a picture: use {MOST} tokens or fewer")
    shown, timed = (record(provider, size, seq_length=n, bounds=bounds, **options) for n in lengths)
    divided = len(shown.ranks_of(0)) < size
    time = 1.3 + 0.3 * size
    heights = (0.75, 0.75 if divided else 0.01, 4.3, time)
    figure = canvas.new_figure(canvas.WIDTH, sum(heights) + 1)
    rows = figure.add_gridspec(4, 1, height_ratios=heights)
    held = figure.add_subplot(rows[0])
    title = f"{textwrap.fill(_title(shown), 46)}:\nwhich rank holds each token"
    canvas.draw_ranks(held, [[rank] for rank in shown.holders()], title)
    held.set(xticks=range(0, shown.seq_length + 1, shown.seq_length // 4 or 1))
    if divided:
        heads, n = figure.add_subplot(rows[1]), shown.setup.problem.heads
        canvas.draw_ranks(heads, [*map(shown.ranks_of, range(n))], "which ranks compute each query head")
        heads.set_xticks([h + 0.5 for h in range(n)], [f"head {h}" if n <= 4 else str(h) for h in range(n)])
    _draw_matrix(figure.add_subplot(rows[2]), shown, divided)
    _draw_time(figure.add_subplot(rows[3]), timed)
    canvas.save(figure, path)


def _title(recording: Recording) -> str:
    setup, size = recording.setup, len(recording.held)
    shown = {name: value for name, value in setup.options.chosen.items() if name not in ("backward", "head_groups")}
    options = (f"{name.replace('_', ' ')} {show_option(value)}" for name, value in shown.items())
    ranks = f"{size} rank{'s' * (size > 1)}"
    return f"{setup.provider.name}, {ranks} ({', '.join((f'{setup.layout} tokens', *options))})"


def _draw_matrix(axes: Axes, recording: Recording, divided: bool) -> None:
    """The attention matrix of head 0 in the order of the sequence: ranks by colour, later steps paler."""
    n, steps = recording.seq_length, 1 + max(call.step for call in recording.calls)
    for call in (c for c in recording.calls if 0 in c.heads):
        keys = sorted(call.keys.tolist())
        shapes: list[canvas.Box] = []
        for query in call.queries.tolist():
            seen = recording.seen(query)
            visible = [key for key in keys if key in seen]
            shapes += [(run.start, query, len(run), 1) for run in _runs(visible)]
        canvas.fill(axes, shapes, canvas.paler(canvas.RANK_COLOURS[call.rank], 0.75 * call.step / steps))
    axes.set(xlim=(0, n), ylim=(n, 0), aspect="equal", xticks=[], yticks=[])
    axes.set(xlabel="keys, in the order of the sequence", ylabel="queries, in the order of the sequence")
    mask = "Packed" if recording.mask.documents else "Causal"
    title = f"{mask} attention matrix{', head 0' if divided else ''}; paler: later step"
    axes.set_title(title, fontsize=canvas.POINTS, loc="left")
    canvas.plain(axes)


def _draw_time(axes: Axes, timed: Recording) -> None:
    """Working and idle ranks in each step; 1 on the axis is the mean work of a rank."""
    size, mean, longest, start = len(timed.held), timed.mean(), max(timed.critical_path(), 1.0), 0.0
    for step, pairs in enumerate(zip(*timed.work(), strict=True)):
        length = max(pairs) / mean
        for rank, work in enumerate(pairs):
            axes.add_patch(canvas.box(start, rank + 0.1, length, 0.8, canvas.IDLE))
            axes.add_patch(canvas.box(start, rank + 0.1, work / mean, 0.8, canvas.RANK_COLOURS[rank]))
        axes.axvline(start, color=canvas.INK, linewidth=0.5)
        if length > longest / 8:
            axes.text(start + length / 2, -0.1, f"step {step}", ha="center", va="bottom", fontsize=canvas.POINTS)
        start += length
    axes.axvline(1.0, color=canvas.INK, linestyle=":", linewidth=1)
    axes.text(start + 0.02, size / 2, f"{start:.2f}", va="center", fontsize=12, fontweight="bold")
    axes.set(xlim=(0, longest * 1.2), ylim=(size, -0.9), yticks=[r + 0.5 for r in range(size)])
    axes.set_yticklabels([f"rank {r}" for r in range(size)], fontsize=canvas.POINTS)
    canvas.plain(axes)
    title = f"Work in each step; grey: waits for the busiest\nrank. Busiest rank over mean: {timed.balance():.2f}"
    axes.set_title(title, fontsize=canvas.POINTS, loc="left")
    axes.set_xlabel("time of attention, without communication;\n1 (dotted): perfectly divided", fontsize=canvas.POINTS)


def _runs(increasing: Sequence[int]) -> Iterator[range]:
    """Split increasing integers into maximal runs of neighbours."""
    start = 0
    for end in range(1, len(increasing) + 1):
        if end == len(increasing) or increasing[end] != increasing[end - 1] + 1:
            yield range(increasing[start], increasing[end - 1] + 1)
            start = end
