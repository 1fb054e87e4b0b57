"""The ``cp-plugin explain`` command: one configuration in depth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cp_plugin.attention.setups import Setup, settled
from cp_plugin.cli import files, flags, output, packs
from cp_plugin.cli.tables import settings
from cp_plugin.cli.terminal import new_console
from cp_plugin.common.text import in_seconds
from cp_plugin.core.options import Options
from cp_plugin.methods import registry as providers

if TYPE_CHECKING:
    from cp_plugin.planner.asked import Asked, Fixed
    from cp_plugin.planner.explain import Explanation
    from cp_plugin.planner.machine.hardware import Cluster


@flags.provider_options(without=("backend",))
def explain(
    model: Annotated[str, flags.MODEL],
    cluster: Annotated[str, flags.CLUSTER],
    provider: Annotated[
        str | None, typer.Option(metavar="NAME", help="context-parallel method; default: the planner's choice")
    ] = None,
    devices: flags.TotalDevices = None,
    seq_length: Annotated[int, typer.Option(help="tokens of one sequence")] = 131072,
    documents: packs.Documents = None,
    tensor: Annotated[int, typer.Option(min=1, help="tensor-parallel ranks")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="pipeline stages")] = 1,
    context: Annotated[int | None, typer.Option(help="context-parallel ranks; default: all remaining devices")] = None,
    recompute: flags.Recompute = None,
    global_batch: Annotated[
        int | None, typer.Option(help="sequences per iteration; default: one per data-parallel rank")
    ] = None,
    per_node: flags.PerNode = None,
    nics: flags.Nics = None,
    *,
    options: Options,
    every_rank: Annotated[
        bool, typer.Option("--every-rank", help="simulate every rank instead of three representative ones")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="draw the timeline to this .png, .svg or .pdf file")] = None,
    as_json: output.AsJson = None,
) -> None:
    """Show where the time of one configuration goes, what limits it, and the memory it needs."""
    from cp_plugin.cli.show_explained import as_json as in_json
    from cp_plugin.cli.show_explained import print_explanation
    from cp_plugin.planner.asked import Fixed, recomputation
    from cp_plugin.planner.explain import explain as look_into
    from cp_plugin.planner.machine.hardware import cluster as named
    from cp_plugin.planner.machine.hardware import override

    with flags.errors_in_one_line("--context"):
        if plot is not None:
            files.check_output(plot, "picture", files.PICTURES, "--plot")
        if provider is None and options != Options():
            given = ", ".join(f"--{name.replace('_', '-')}" for name in providers.in_order(options))
            raise ValueError(f"{given}: a method's options need --provider NAME")
        flags.check_sizes(
            {"--devices": devices, "--context": context, "--global-batch": global_batch}
            | {"--per-node": per_node, "--nics": nics}
        )
        fixed = Fixed(tensor=tensor, pipeline=pipeline, context=context, recompute=recomputation(recompute))
        machine = override(named(cluster), **flags.changes(per_node, nics))
        asked = packs.packed(_asked(model, machine, devices, seq_length, fixed, global_batch), documents)
        setup = _chosen(asked) if provider is None else _asked_for(asked, provider, options)
        found = look_into(asked.model, asked.shapes[0], setup, asked.cluster, every=every_rank)
        if plot is not None:
            _draw(plot, found)
    output.show(as_json, lambda: in_json(found), lambda: print_explanation(new_console(), found))
    if plot is not None and not output.only_json(as_json):
        typer.echo(f"wrote {plot}")
    if not found.fits:
        raise typer.Exit(1)


def _asked(
    model: str, machine: Cluster, devices: int | None, seq_length: int, fixed: Fixed, global_batch: int | None
) -> Asked:
    """The configuration with one shape; by default context parallelism takes the remaining devices, and the least
    recomputation that fits is taken."""
    from cp_plugin.planner.asked import fitting, of_name
    from cp_plugin.planner.training.footprint import footprint
    from cp_plugin.planner.training.parallel import RECOMPUTE

    others = (fixed.tensor or 1) * (fixed.pipeline or 1)
    total = devices or max(others * (fixed.context or 1), machine.per_node)
    fixed = replace(fixed, context=fixed.context or max(1, total // others))
    asked = of_name(model, total, seq_length, machine, fixed)
    shapes = sorted(fitting(asked, global_batch).shapes, key=lambda shape: RECOMPUTE.index(shape.recompute))
    limit = machine.device.memory_bytes
    least = next((shape for shape in shapes if footprint(asked.model, shape).total <= limit), shapes[-1])
    return replace(asked, shapes=[least], free=False)


def _chosen(asked: Asked) -> Setup:
    """The planner's choice among our methods."""
    from cp_plugin.planner.search import answer

    found = answer(asked)
    best = next((p for p in found.found if not p.candidate.upstream), found.best)
    why = f"the planner's choice among {found.tried} configurations; of methods that tie, the simplest (cp-plugin plan)"
    return replace(best.candidate.setup, why=(why, *best.candidate.setup.why))


def _asked_for(asked: Asked, provider: str, options: Options) -> Setup:
    from cp_plugin.planner.explain import first_letter
    from cp_plugin.planner.price import on
    from cp_plugin.planner.training.model import LINEAR
    from cp_plugin.planner.training.parallel import problem

    letter, parallel = first_letter(asked.model), asked.shapes[0]
    if provider not in providers.registry():
        flags.check_name("--provider", provider, providers.names("linear" if letter == LINEAR else "softmax"))
    its = on(problem(asked.model, parallel, letter), asked.cluster, parallel.tensor)
    return settled(providers.get(provider), its, options)


def _draw(path: Path, found: Explanation) -> None:
    from cp_plugin.cli.draw.gantt import draw_gantt

    setup = found.timeline.setup
    passes = {name: of.spans for name, of in found.passes.items()}
    title = (
        f"{found.model.name}, {setup.problem.seq_length:,} tokens on {found.parallel.devices} x "
        f"{found.timeline.cluster.name}; one attention call of {setup.provider.name}, {settings(setup)}: "
        f"{in_seconds(found.timeline.seconds)}, predicted"
    )
    draw_gantt(path, title, passes)
