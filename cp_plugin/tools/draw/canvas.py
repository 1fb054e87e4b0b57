"""Figures, colours and shapes shared by all pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

RANK_COLOURS = ("#3572c6", "#e0606a", "#86cf95", "#f7e08c", "#7a3b73", "#8ecae6", "#8a5a2b", "#a0a0a0")
"""The first four, which most pictures use, differ in grey, too."""
WIDTH = 4.6
"""Inches of a picture that is read on a phone, where it is 358 px wide."""
POINTS = 10.5
"""The smallest words: 11 px where ``WIDTH`` is 358 px."""
MOST_NUMBERED = 40
"""Tokens that have room for the number of a rank."""
IDLE = "#8888882e"
"""Translucent: pale on a white page and on a dark one."""
INK = "#000000"
"""Words and lines; on a dark page an SVG file shows them in ``_PALE_INK``."""
_PALE_INK = "#dddddd"
_THEMES = f"""  <style type="text/css">
@media (prefers-color-scheme: dark) {{
  text, [style*="fill: {INK}"] {{ fill: {_PALE_INK}; }}
  [style*="stroke: {INK}"] {{ stroke: {_PALE_INK} !important; }}
}}
  </style>"""

type Colour = tuple[float, float, float]
type Box = tuple[float, float, float, float]
"""x, y, width, height."""


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches; ValueError if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install 'cp-plugin[plot]'") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write PNG, SVG or PDF by the suffix. SVG is reproducible, keeps words as text, and suits light and dark pages.

    Words smaller than ``POINTS`` are enlarged.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

    fonts = ["DejaVu Sans", "Verdana", "Arial"]
    svg = path.suffix == ".svg"
    with rc_context({"svg.hashsalt": "cp-plugin", "svg.fonttype": "none", "font.sans-serif": fonts}):
        for text in figure.findobj(Text):
            text.set_fontsize(max(POINTS, text.get_fontsize()))
        figure.draw_without_rendering()
        for axes in figure.axes:  # the layout solver's last digits differ from run to run
            axes.set_position([round(edge, 4) for edge in axes.get_position(original=True).bounds])
            axes.patch.set_visible(not svg)
        figure.set_layout_engine("none")
        figure.savefig(path, dpi=110, transparent=svg, metadata={"Date": None} if svg else None)
    if svg:
        path.write_text(path.read_text().replace("<defs>", f"<defs>\n{_THEMES}", 1))


def paler(colour: str, share: float) -> tuple[float, float, float]:
    """The colour mixed with a share of white: 0 is the colour itself."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return (red + (1 - red) * share, green + (1 - green) * share, blue + (1 - blue) * share)


def ink_on(colour: tuple[float, float, float]) -> str:
    """Nearly black or white, whichever is readable on the colour, in a light and in a dark page."""
    red, green, blue = colour
    return "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "#111111"


def box(x: float, y: float, width: float, height: float, colour: str | Colour, line: str = "none") -> Rectangle:
    """Make a filled rectangle."""
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, edgecolor=line, linewidth=0.5)


def fill(axes: Axes, boxes: Sequence[Box], colour: str | tuple[float, float, float]) -> None:
    """Many rectangles of one colour as a single shape, without gaps between neighbours."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    if boxes:
        corners = ([(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)] for x, y, w, h in boxes)
        outline = Outline.make_compound_path(*(Outline(corner, closed=True) for corner in corners))
        axes.add_patch(PathPatch(outline, facecolor=colour, edgecolor=colour, linewidth=0.2))


def plain(axes: Axes) -> None:
    """Remove the frame and the tick marks."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def draw_ranks(axes: Axes, cells: Sequence[Sequence[int]], title: str) -> None:
    """A strip of tokens or heads, each in the colours of its ranks, and with their numbers where there is room."""
    for start, ranks in enumerate(cells):
        for i, rank in enumerate(ranks):
            colour, width = RANK_COLOURS[rank], 1 / len(ranks)
            axes.add_patch(box(start + i / len(ranks), 0, width, 1, colour))
            if len(cells) <= MOST_NUMBERED:
                middle, ink = start + (i + 0.5) / len(ranks), ink_on(paler(colour, 0))
                axes.text(middle, 0.5, str(rank), ha="center", va="center", color=ink, fontsize=POINTS)
    axes.set(xlim=(0, len(cells)), ylim=(0, 1), yticks=[])
    axes.set_title(title, fontsize=POINTS, loc="left")
    plain(axes)
