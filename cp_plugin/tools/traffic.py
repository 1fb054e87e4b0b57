"""The ``cp-plugin traffic`` command."""

from __future__ import annotations

from typing import Annotated

import typer

from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.testing.traffic import EQUAL, compare, price
from cp_plugin.tools import flags, output
from cp_plugin.tools.output import new_console
from cp_plugin.tools.tables import print_traffic, print_why, traffic_as_json


@flags.provider_options(without=("layout", "backend"))
def traffic(
    provider: flags.Providers = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=65536, help="context-parallel ranks; default: 64, or 4 with --measure")
    ] = None,
    heads: flags.Heads = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="key/value heads per tensor-parallel rank")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="size of a head")] = 128,
    v_head_dim: flags.ValueDim = None,
    seq_length: Annotated[
        int | None, typer.Option(help="tokens of one sequence; default: 131072, or 32 per rank with --measure")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences per batch")] = 1,
    dtype: Annotated[flags.Dtype, typer.Option(help="element type of q, k and v")] = flags.Dtype.bfloat16,
    mask: Annotated[flags.Mask, typer.Option(help="attention mask")] = flags.Mask.causal,
    window: Annotated[
        int | None, typer.Option(min=1, help="sliding window: how many preceding tokens a token sees")
    ] = None,
    documents: flags.Documents = None,
    *,
    options: Options,
    decay: Annotated[flags.Decays, typer.Option(help="granularity of linear attention's decay")] = (flags.Decays.none),
    measure: Annotated[
        bool,
        typer.Option("--measure", help="run it on CPU ranks here and compare the bytes they send with the formula"),
    ] = False,
    as_json: output.AsJson = False,
) -> None:
    """Show how many bytes a rank sends in one attention call, along each mesh axis, forward and backward."""
    with flags.errors_in_one_line():
        size = ranks if ranks is not None else 4 if measure else 64
        full = mask is flags.Mask.full
        tokens = seq_length if seq_length is not None else 32 * size if measure else 131072
        problem = Problem(
            size=size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim or 0,
            seq_length=tokens,
            batch=batch,
            dtype=flags.torch_dtype(dtype),
            causal=not full,
            decay=decay.value,
            window=None if window is None else (window, window if full else 0),
            bounds=() if documents is None else flags.bounds(documents, tokens),
        )
        rows = price(provider or (), problem, options)
        flags.check_decay(decay, {row.setup.provider.kind for row in rows})
        rows = compare(rows) if measure else rows

    def print_tables() -> None:
        print_traffic(new_console(), problem, rows)
        print_why(new_console(), [row.setup for row in rows] if provider else [])

    output.show(as_json, lambda: traffic_as_json(problem, rows), print_tables)
    if measure:
        ran, equal = sum(bool(row.ranks) for row in rows), sum(row.measured == EQUAL for row in rows)
        output.verdict(ran == equal > 0, f"ledger = trace = formula in {equal} of {ran}", as_json)
    if not any(row.ranks for row in rows):
        raise typer.Exit(1)
