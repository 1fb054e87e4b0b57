"""The ``cp-plugin`` command."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cp_plugin.cli import flags, packs
from cp_plugin.cli.bench.cli import bench
from cp_plugin.cli.calibrate import calibrate
from cp_plugin.cli.dataset import dataset
from cp_plugin.cli.examples.cli import example
from cp_plugin.cli.explain import explain
from cp_plugin.cli.generate import EVERYTHING, generate
from cp_plugin.cli.plan import plan
from cp_plugin.core.options import Options

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Context parallelism for Megatron-LM, NeMo and torch."
)


@app.command()
def doctor(
    everything: Annotated[
        bool, typer.Option("--all", help="also show libraries and kernels that are not available here")
    ] = False,
    megatron: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="instead: examine a Megatron-LM checkout, or an unpacked wheel"),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="with --megatron: print JSON")] = False,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- FLAGS]", help="with --megatron: the run's flags; without, everything is examined"),
    ] = None,
) -> None:
    """Show what is installed, which attention kernels work here, and how to get what is missing."""
    from cp_plugin.cli.doctor import show

    if megatron is not None:
        from cp_plugin.cli import doctor_megatron

        with flags.errors_in_one_line():
            found = doctor_megatron.examine(megatron, words or [])
        if json_:
            print(json.dumps(found))
        elif not doctor_megatron.show(Console(), found, megatron):
            raise typer.Exit(1)
        return
    if not show(Console(), everything=everything):
        raise typer.Exit(1)


@app.command()
@flags.provider_options(without=("backend", "fp8", "gradient_dtype"))
def draw(
    path: Annotated[Path, typer.Argument(help="picture to write; PNG, SVG or PDF by its suffix")],
    provider: Annotated[str | None, typer.Option(help="draw this provider; without it, the token layouts")] = None,
    ranks: Annotated[int, typer.Option(min=1, max=8, help="context-parallel ranks")] = 4,
    sent: Annotated[bool, typer.Option("--sent", help="draw the bytes it sends, on 8 and 64 ranks")] = False,
    full: Annotated[bool, typer.Option("--full", help="without a causal mask")] = False,
    documents: Annotated[
        str | None,
        typer.Option(help="with --provider needed: the fetched keys of a pack of such lengths, as 24,14,10,8,5,3"),
    ] = None,
    *,
    options: Options,
) -> None:
    """Draw which rank holds and computes what, and how long it takes: a provider, or a ring on every layout."""
    from cp_plugin.cli.draw import draw_documents, draw_layouts, draw_method, draw_traffic

    with flags.errors_in_one_line():
        flags.check_output(path, "picture", flags.PICTURES)
        chosen = {"layout": options.layout, **options.chosen}
        if documents is not None:
            if provider != "needed" or sent or full or options != Options():
                raise ValueError(f"--documents {documents} needs --provider needed, and goes with --ranks alone")
            draw_documents(path, packs.lengths(documents), ranks)
        elif provider is None:
            if sent or full or options != Options():
                raise ValueError("--sent, --full and the options of a provider need --provider")
            draw_layouts(path, ranks, tokens=8 * ranks)
        elif sent:
            draw_traffic(path, provider, **chosen)
        else:
            draw_method(path, provider, ranks, causal=not full, **chosen)
    typer.echo(f"wrote {path}")


@app.command()
@flags.provider_options(without=("layout", "backend"))
def traffic(
    provider: flags.Providers = None,
    size: Annotated[int | None, typer.Option(min=1, max=65536, help="ranks; default: 64, or 4 with --measure")] = None,
    heads: Annotated[int, typer.Option(help="query heads of a rank")] = 32,
    kv_heads: Annotated[int, typer.Option(help="key/value heads of a rank")] = 8,
    head_dim: int = 128,
    v_head_dim: flags.ValueDim = 0,
    seq_length: Annotated[int | None, typer.Option(help="default: 131072, or 32 a rank with --measure")] = None,
    batch: int = 1,
    dtype: flags.Dtype = flags.Dtype.bfloat16,
    full: Annotated[bool, typer.Option("--full", help="without a causal mask")] = False,
    window: Annotated[int | None, typer.Option(min=1, help="sliding window: previous tokens that a token sees")] = None,
    documents: packs.Documents = None,
    *,
    options: Options,
    decay: Annotated[flags.Decays, typer.Option(help="of linear attention: per head, token, or key dimension")] = (
        flags.Decays.none
    ),
    measure: Annotated[
        bool, typer.Option("--measure", help="run on Gloo ranks here; compare with the formula")
    ] = False,
    as_json: flags.AsJson = False,
) -> None:
    """Show the bytes that a rank sends for one attention call, along each mesh axis, forward and backward."""
    from cp_plugin.cli.tables import print_traffic, print_why, traffic_as_json
    from cp_plugin.core.problem import Problem
    from cp_plugin.testing.traffic import compare, price

    with flags.errors_in_one_line():
        size = size if size is not None else 4 if measure else 64
        tokens = seq_length if seq_length is not None else 32 * size if measure else 131072
        problem = Problem(
            size=size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            seq_length=tokens,
            batch=batch,
            dtype=flags.torch_dtype(dtype),
            causal=not full,
            decay=decay.value,
            window=None if window is None else (window, window if full else 0),
            bounds=() if documents is None else packs.bounds(documents, tokens),
        )
        rows = price(provider or (), problem, options)
        measured = compare(rows) if measure else None
    if as_json:
        print(json.dumps(traffic_as_json(problem, rows, measured), indent=2))
    else:
        print_traffic(Console(), problem, rows, measured)
        print_why(Console(), [row.setup for row in rows] if provider else [])
    differing = [text for text in measured or () if text is not None]
    if measure:
        ran = sum(bool(row.ranks) for row in rows)
        _verdict(not differing and ran > 0, f"ledger = trace = formula in {ran - len(differing)} of {ran}", as_json)
    if not any(row.ranks for row in rows):
        raise typer.Exit(1)


@app.command()
@flags.provider_options()
def verify(
    provider: flags.Providers = None,
    size: Annotated[int, typer.Option(min=1, help="ranks")] = 4,
    device: flags.Device = flags.Device.auto,
    dtype: Annotated[
        list[flags.Dtype] | None,
        typer.Option(help="default: float32 and bfloat16; bfloat16 with --fp8 or --gradient-dtype model"),
    ] = None,
    heads: Annotated[int, typer.Option(help="query heads of a rank")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="default: both as many as query heads, and a quarter")] = None,
    head_dim: int = 32,
    v_head_dim: flags.ValueDim = 0,
    seq_length: Annotated[int | None, typer.Option(help="default: 32 a rank")] = None,
    batch: int = 2,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="the mask; default: both")] = None,
    *,
    options: Options,
    decode: Annotated[
        bool,
        typer.Option("--decode", help="verify generation: prompts, then token by token; with --fp8 comm, an FP8 cache"),
    ] = False,
    as_json: flags.AsJson = False,
) -> None:
    """Run providers on this machine's devices, forward and backward, and compare with attention on one device."""
    from cp_plugin.cli.tables import print_verified, verified_as_json
    from cp_plugin.comm import network_between
    from cp_plugin.core.problem import Problem
    from cp_plugin.testing import verify as training
    from cp_plugin.testing import verify_decode as generation

    with flags.errors_in_one_line():
        where = flags.device_name(device)
        if decode:
            generation.refuse(causal, options)
        half = options.fp8 is not None or options.gradient_dtype == "model"
        dtypes = dtype or [flags.Dtype.float32, flags.Dtype.bfloat16][half:]
        masks = [True] if decode else [True, False] if causal is None else [causal]
        fewer = heads // 4 if heads % 4 == 0 else 1
        problems = [
            Problem(
                size=size,
                heads=heads,
                kv_heads=g,
                head_dim=head_dim,
                v_head_dim=v_head_dim,
                seq_length=32 * size if seq_length is None else seq_length,
                batch=batch,
                dtype=flags.torch_dtype(name),
                causal=mask,
                network=network_between(where),
            )
            for name, mask, g in itertools.product(dtypes, masks, [heads, fewer] if kv_heads is None else [kv_heads])
        ]
        planned = (generation if decode else training).plan(provider or (), problems, options)
        results = generation.verify(planned, where) if decode else training.verify(planned, where)
    if as_json:
        print(json.dumps(verified_as_json(planned, results), indent=2))
    else:
        title = f"{size} ranks on {where}{', prefill and decode' * decode}, against attention on one device"
        print_verified(Console(), title, planned, results, decode=decode)
    good = sum(result.ok for result in results)
    refused = len(planned) - len(results)
    text = f"{good} of {len(results)} within limits" + (
        f"; {refused} cannot run, for the reasons given" * bool(refused)
    )
    _verdict(good == len(results) > 0, text, as_json)


app.command()(bench)
app.command()(calibrate)
app.command()(dataset)
app.command(context_settings={"allow_extra_args": True})(example)
app.command()(explain)
app.command(context_settings=EVERYTHING)(generate)
app.command(context_settings={"allow_extra_args": True})(plan)


def _verdict(ok: bool, text: str, quiet: bool) -> None:
    """Print the verdict unless quiet; exit with status 1 on failure."""
    from cp_plugin.cli.terminal import print_verdict

    if not quiet:
        print_verdict(ok, text)
    if not ok:
        raise typer.Exit(1)
