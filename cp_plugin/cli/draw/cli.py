"""``cp-plugin draw``."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Annotated

import typer

from cp_plugin.cli import flags, output, packs
from cp_plugin.core.options import Options


@flags.provider_options(without=("backend", "fp8", "gradient_dtype"))
def draw(
    plot: Annotated[Path, typer.Option(help="picture to write, a .png, .svg or .pdf file")],
    provider: Annotated[str, typer.Option(metavar="NAME", help="method to draw")],
    ranks: Annotated[int, typer.Option(min=1, max=8, help="context-parallel ranks")] = 4,
    mask: Annotated[flags.Mask, typer.Option(help="attention mask")] = flags.Mask.causal,
    documents: Annotated[
        str | None,
        typer.Option(metavar="LENGTHS", help="packed documents, such as 24,14,10,8,5,3; default: one document"),
    ] = None,
    *,
    options: Options,
) -> None:
    """Draw which rank holds and computes what, and for how long."""
    from cp_plugin.cli.draw.method import draw_method

    with flags.errors_in_one_line():
        output.check_output(plot, "picture", output.PICTURES, "--plot")
        bounds = () if documents is None else tuple(accumulate(packs.lengths(documents), initial=0))
        causal = mask is flags.Mask.causal
        draw_method(plot, provider, ranks, causal=causal, bounds=bounds, layout=options.layout, **options.chosen)
    typer.echo(f"wrote {plot}")
