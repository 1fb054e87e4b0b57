"""The ``cp-plugin`` command."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer

from cp_plugin import __version__
from cp_plugin.cli import files, flags, output, packs, shell
from cp_plugin.cli.bench.cli import bench
from cp_plugin.cli.calibrate import calibrate
from cp_plugin.cli.dataset import dataset
from cp_plugin.cli.examples.cli import example
from cp_plugin.cli.generate import EVERYTHING, generate
from cp_plugin.cli.plan import plan
from cp_plugin.cli.terminal import new_console
from cp_plugin.core.options import Options

app = shell.new_app(help="Context parallelism for Megatron-LM, NeMo, transformers and plain PyTorch.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{shell.PROGRAM} {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def doctor(
    everything: Annotated[
        bool, typer.Option("--all", help="also list libraries and kernels that are not available here")
    ] = False,
    megatron: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="examine this Megatron-LM checkout, or unpacked wheel, instead"),
    ] = None,
    as_json: output.AsJson = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORDS", help="with --megatron, after --: the flags of a run; default: examine everything"
        ),
    ] = None,
) -> None:
    """Show what is installed, which attention kernels work here, and how to get what is missing."""
    from cp_plugin.cli.doctor import show

    if megatron is not None:
        from cp_plugin.cli import doctor_megatron

        with flags.errors_in_one_line(translated=False):
            if everything:
                raise ValueError("--all has no effect with --megatron: leave it out")
            found = doctor_megatron.examine(megatron, words or [])
        console = new_console()
        output.show(as_json, lambda: found, lambda: doctor_megatron.show(console, found, megatron))
        if doctor_megatron.stops(found):
            raise typer.Exit(1)
        return
    if words or as_json:
        with flags.errors_in_one_line(translated=False):
            given = " ".join([*(words or []), *(["--json"] if as_json else [])])
            raise ValueError(f"{given} has no effect without --megatron DIR: add it, or leave this out")
    if not show(new_console(), everything=everything):
        raise typer.Exit(1)


@flags.provider_options(without=("backend", "fp8", "gradient_dtype"))
def draw(
    plot: Annotated[Path, typer.Option(help="picture to write, a .png, .svg or .pdf file")],
    provider: Annotated[
        str | None, typer.Option(metavar="NAME", help="method to draw; default: a ring on every token layout")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, max=8, help="context-parallel ranks")] = 4,
    sent: Annotated[bool, typer.Option("--sent", help="draw the bytes that are sent, on 8 and on 64 ranks")] = False,
    mask: Annotated[flags.Mask, typer.Option(help="attention mask")] = flags.Mask.causal,
    documents: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTHS",
            help="with --provider needed: the keys fetched for a pack of these documents, such as 24,14,10,8,5,3",
        ),
    ] = None,
    *,
    options: Options,
) -> None:
    """Draw which rank holds and computes what, and for how long: for one provider, or for a ring on every layout."""
    from cp_plugin.cli.draw import draw_documents, draw_layouts, draw_method, draw_traffic

    with flags.errors_in_one_line():
        files.check_output(plot, "picture", files.PICTURES, "--plot")
        full = mask is flags.Mask.full
        chosen = {"layout": options.layout, **options.chosen}
        if documents is not None:
            if provider != "needed" or sent or full or options != Options():
                raise ValueError(
                    f"--documents {documents} needs --provider needed, and no other options except --ranks and --plot"
                )
            draw_documents(plot, packs.lengths(documents), ranks)
        elif provider is None:
            given = ["--sent"] * sent + ["--mask full"] * full
            given += [f"--{name.replace('_', '-')}" for name, value in chosen.items() if value is not None]
            if given:
                raise ValueError(f"{', '.join(given)} {'needs' if len(given) == 1 else 'need'} --provider NAME")
            draw_layouts(plot, ranks, tokens=8 * ranks)
        elif sent:
            draw_traffic(plot, provider, **chosen)
        else:
            draw_method(plot, provider, ranks, causal=not full, **chosen)
    typer.echo(f"wrote {plot}")


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
    documents: packs.Documents = None,
    *,
    options: Options,
    decay: Annotated[flags.Decays, typer.Option(help="granularity of linear attention's decay")] = (flags.Decays.none),
    measure: Annotated[
        bool,
        typer.Option("--measure", help="run it on CPU ranks here and compare the bytes they send with the formula"),
    ] = False,
    as_json: output.AsJson = None,
) -> None:
    """Show how many bytes a rank sends in one attention call, along each mesh axis, forward and backward."""
    from cp_plugin.cli.tables import print_traffic, print_why, traffic_as_json
    from cp_plugin.core.problem import Problem
    from cp_plugin.testing.traffic import compare, price

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
            bounds=() if documents is None else packs.bounds(documents, tokens),
        )
        rows = price(provider or (), problem, options)
        flags.check_decay(decay, {row.setup.provider.kind for row in rows})
        measured = compare(rows) if measure else None

    def print_tables() -> None:
        print_traffic(new_console(), problem, rows, measured)
        print_why(new_console(), [row.setup for row in rows] if provider else [])

    output.show(as_json, lambda: traffic_as_json(problem, rows, measured), print_tables)
    differing = [text for text in measured or () if text is not None]
    if measure:
        ran = sum(bool(row.ranks) for row in rows)
        _verdict(not differing and ran > 0, f"ledger = trace = formula in {ran - len(differing)} of {ran}", as_json)
    if not any(row.ranks for row in rows):
        raise typer.Exit(1)


@flags.provider_options()
def verify(
    provider: flags.Providers = None,
    ranks: Annotated[int, typer.Option(min=1, help="ranks to start on this machine")] = 4,
    device: flags.Devices = flags.Device.auto,
    dtype: Annotated[
        list[flags.Dtype] | None,
        typer.Option(
            help="repeatable; default: float32 and bfloat16; bfloat16 with --fp8 or --gradient-dtype model",
        ),
    ] = None,
    heads: flags.Heads = 8,
    kv_heads: Annotated[
        int | None,
        typer.Option(min=1, help="key/value heads per tensor-parallel rank; default: --heads, then a quarter of that"),
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="size of a head")] = 32,
    v_head_dim: flags.ValueDim = None,
    seq_length: Annotated[int | None, typer.Option(help="tokens of one sequence; default: 32 per rank")] = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences per batch")] = 2,
    mask: Annotated[flags.Mask | None, typer.Option(help="attention mask; default: both")] = None,
    *,
    options: Options,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="verify generation instead: a prompt, then token by token; with --fp8 comm, the cache is in FP8, too",
        ),
    ] = False,
    as_json: output.AsJson = None,
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
            generation.refuse(mask, options)
        half = options.fp8 is not None or options.gradient_dtype == "model"
        dtypes = dtype or [flags.Dtype.float32, flags.Dtype.bfloat16][half:]
        masks = [flags.Mask.causal] if decode else list(flags.Mask) if mask is None else [mask]
        fewer = heads // 4 if heads % 4 == 0 else 1
        problems = [
            Problem(
                size=ranks,
                heads=heads,
                kv_heads=g,
                head_dim=head_dim,
                v_head_dim=v_head_dim or 0,
                seq_length=32 * ranks if seq_length is None else seq_length,
                batch=batch,
                dtype=flags.torch_dtype(name),
                causal=sees is flags.Mask.causal,
                network=network_between(where),
            )
            for name, sees, g in itertools.product(dtypes, masks, [heads, fewer] if kv_heads is None else [kv_heads])
        ]
        planned = (generation if decode else training).plan(provider or (), problems, options)
        results = generation.verify(planned, where) if decode else training.verify(planned, where)
    title = (
        f"{ranks} rank{'s' * (ranks > 1)} on {where}{', prefill and decode' * decode}, against attention on one device"
    )
    output.show(
        as_json,
        lambda: verified_as_json(planned, results),
        lambda: print_verified(new_console(), title, planned, results, decode=decode),
    )
    good = sum(result.ok for result in results)
    refused = len(planned) - len(results)
    text = f"{good} of {len(results)} within limits" + (
        f"; {refused} cannot run, for the reasons given" * bool(refused)
    )
    _verdict(good == len(results) > 0, text, as_json)


for _command in (doctor, draw, traffic, verify, bench, calibrate, dataset):
    shell.register(app, _command)
shell.register(app, example, allow_extra_args=True)
shell.register(app, plan, allow_extra_args=True)
shell.register(app, generate, **EVERYTHING)


def _verdict(ok: bool, text: str, as_json: Path | None) -> None:
    """Print the verdict, unless only JSON is printed; exit with status 1 on failure."""
    from cp_plugin.cli.terminal import print_verdict

    if not output.only_json(as_json):
        print_verdict(ok, text)
    if not ok:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
