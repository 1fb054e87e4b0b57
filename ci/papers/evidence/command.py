"""``cp-plugin plan --reproduce NAME``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from evidence.plot import draw
from evidence.report import show
from evidence.reproduce import names, reproduce


def reproduce_and_show(asked: Sequence[str], console: Console, plots: Path | None = None) -> bool:
    """Print tables and, as the last line, the summary; return whether all aims are reached.

    Args:
        asked: names of papers, or ``all``.
        plots: a folder for a picture of each paper.

    Raises:
        ValueError: for an unknown name, or pictures without matplotlib.
    """
    chosen = tuple(dict.fromkeys(name for one in asked for name in names(one)))
    with Console(stderr=True).status("reading") as status:
        found = reproduce(chosen, lambda text: status.update(f"predicting {text}"))
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        for name in chosen:
            draw(found, name, plots / f"{name}.svg")
            console.print(f"drew {plots / f'{name}.svg'}", highlight=False, soft_wrap=True)
    show(found, console)
    return found.ok
