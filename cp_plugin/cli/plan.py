"""``cp-plugin plan``: which method, which grid, how fast."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console

from cp_plugin.cli import flags
from cp_plugin.core.options import Options

if TYPE_CHECKING:
    from cp_plugin.core.problem import Fp8
    from cp_plugin.planner.asked import Asked, Fixed
    from cp_plugin.planner.hardware import Cluster
    from cp_plugin.planner.search import Plan

_GB = 1e9


@flags.provider_options(only=("gradient_dtype",))
def plan(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="a model of the catalogue, such as llama3-8b")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="a packaged cluster, such as dgx-h100, or a file that calibrate wrote")
    ] = None,
    devices: Annotated[int | None, typer.Option(help="in all; default: one node, or what the sizes need")] = None,
    seq_length: Annotated[int, typer.Option(help="tokens of one sequence")] = 131072,
    tensor: Annotated[int | None, typer.Option(help="tensor-parallel ranks; default: the best")] = None,
    pipeline: Annotated[int | None, typer.Option(help="pipeline stages; default: the best")] = None,
    context_parallel: Annotated[
        int | None, typer.Option("--context", help="context-parallel ranks; default: the best")
    ] = None,
    recompute: flags.Recompute = None,
    global_batch: Annotated[
        int | None, typer.Option(help="sequences of an iteration; default: one per data rank")
    ] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="also with payloads in FP8")] = False,
    memory: Annotated[float | None, typer.Option(help="GB of a device that may be used; default: all")] = None,
    per_node: flags.PerNode = None,
    nics: flags.Nics = None,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="instead: what a prompt of --seq-length tokens takes, by every provider")
    ] = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="instead: what a token behind so many takes; with --prefill: both")
    ] = False,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="with --prefill: tokens of a prompt at a time; default: all")
    ] = None,
    reproduce: Annotated[
        list[str] | None,
        typer.Option(help="instead: published figures beside predicted ones; a paper's name, or all; repeat it"),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="with --reproduce: a folder for a picture of each paper")] = None,
    as_json: flags.AsJson = False,
    *,
    options: Options,
) -> None:
    """Find the fastest context-parallel method for a model on a cluster, and the flags that switch it on.

    Name a model (``--model llama3-8b``), or give a training's own flags behind ``--``; Megatron reads and checks them.
    With ``--prefill`` or ``--decode``: seconds and memory of answers, instead of a training's.
    """
    from cp_plugin.cli.show_plan import as_json as in_json
    from cp_plugin.cli.show_plan import print_plan
    from cp_plugin.planner.asked import Fixed, fitting, recomputation

    with flags.errors_in_one_line():
        if reproduce:
            if as_json:
                raise ValueError("--json with --reproduce: it has tables and pictures only; leave --json out")
            raise typer.Exit(not _reproduced(reproduce, plots))
        if chunk is not None and not prefill:
            raise ValueError(f"--chunk {chunk} is for --prefill: add that, or leave it out")
        if prefill or decode:
            return _answer(
                {"--pipeline": pipeline, "--recompute": recompute, "--plots": plots}
                | {"--gradient-dtype": options.gradient_dtype},
                name=model,
                megatron=context.args,
                cluster=cluster,
                changes=flags.changes(per_node, nics),
                batch=1 if global_batch is None else global_batch,
                seq_length=seq_length,
                in_json=as_json,
                devices=devices,
                tensor=tensor,
                context=context_parallel,
                chunk=chunk or 0,
                fp8=fp8,
                limit=None if memory is None else memory * _GB,
                prefill=prefill,
                decode=decode,
            )
        flags.check_sizes(
            {"--devices": devices, "--tensor": tensor, "--pipeline": pipeline, "--context": context_parallel}
            | {"--global-batch": global_batch, "--per-node": per_node, "--nics": nics}
        )
        if memory is not None and not 0 < memory < math.inf:
            raise ValueError(f"--memory {memory}: write GB of a device, such as 80")
        fixed = Fixed(
            tensor=tensor,
            pipeline=pipeline,
            context=context_parallel,
            recompute=recomputation(recompute),
        )
        asked = _asked(model, context.args, cluster, devices, seq_length, fixed, flags.changes(per_node, nics))
        limit = memory * _GB if memory is not None else asked.cluster.device.memory_bytes
        sends: tuple[Fp8 | None, ...] = (None, "comm") if fp8 else (None,)
        found = _searched(fitting(asked, limit, global_batch), sends, options, limit, quiet=as_json)
    if as_json:
        print(json.dumps(in_json(found), indent=2))
    else:
        print_plan(Console(), found)
    if not found.fits(found.best):
        raise typer.Exit(1)


def _reproduced(names: list[str], plots: Path | None) -> bool:
    """Whether the predictions keep their limits; ValueError where the published figures are not there."""
    folder = Path(__file__).parents[2] / "ci" / "papers"
    if not folder.is_dir():
        raise ValueError(
            f"--reproduce {names[0]}: the papers' figures are in the source repository, not in this package; in a "
            f"checkout of it: python ci/papers {' '.join(names)}"
        )
    sys.path.append(str(folder))
    from evidence.command import reproduce_and_show

    return reproduce_and_show(names, Console(), plots)


def _asked(
    model: str | None,
    megatron: list[str],
    cluster: str | None,
    devices: int | None,
    seq_length: int,
    fixed: Fixed,
    changes: dict[str, int],
) -> Asked:
    from cp_plugin.megatron.flags.planned import from_flags
    from cp_plugin.planner.asked import of_flags, of_name

    _check_model(model, megatron)
    if megatron:
        needs = _needed(megatron)
        return of_flags(megatron, devices or needs, _machine(cluster, devices or needs), from_flags, **changes)
    needs = (fixed.tensor or 1) * (fixed.pipeline or 1) * (fixed.context or 1)
    machine = _machine(cluster, devices or needs)
    whole = changes.get("per_node") or machine.per_node
    return of_name(str(model), devices or max(needs, whole), seq_length, machine, fixed, **changes)


def _answer(
    refused: dict[str, object],
    *,
    name: str | None,
    megatron: list[str],
    cluster: str | None,
    changes: dict[str, int],
    batch: int,
    seq_length: int,
    in_json: bool,
    devices: int | None,
    tensor: int | None,
    context: int | None,
    **rest: Any,
) -> None:
    """Price prompts and the tokens behind them."""
    from cp_plugin.cli.plan_inference import answered, print_answer, refuse
    from cp_plugin.cli.plan_inference import as_json as answer_as_json
    from cp_plugin.megatron.flags.planned import from_flags
    from cp_plugin.planner.hardware import override
    from cp_plugin.planner.parallel import Parallel

    refuse(refused)
    base = Parallel(micro_batch=batch, seq_length=seq_length)
    _check_model(name, megatron)
    needs = _needed(megatron) if megatron else (tensor or 1) * (context or 1)
    machine = _machine(cluster, devices or needs)
    machine = override(machine, **changes) if changes else machine
    devices = devices or (needs if megatron else None)
    with Console(stderr=True, quiet=in_json).status("planning"):
        found = answered(
            name, megatron, from_flags, machine, base, devices=devices, tensor=tensor, context=context, **rest
        )
    if in_json:
        print(json.dumps(answer_as_json(found), indent=2))
    else:
        print_answer(Console(), found)


def _check_model(model: str | None, megatron: list[str]) -> None:
    """ValueError unless one of the two was given."""
    if model is not None and megatron:
        raise ValueError(f"--model {model} and Megatron's flags ({megatron[0]} ...): give one of the two")
    if model is None and not megatron:
        raise ValueError("--model: which one? Write a name, such as llama3-8b, or Megatron's flags behind --")


def _machine(cluster: str | None, devices: int) -> Cluster:
    """The cluster of that name; without one, that of the GPUs here."""
    from cp_plugin.planner import hardware, inferred

    if cluster is not None:
        return hardware.cluster(cluster)
    if torch.cuda.device_count() == 0:
        raise ValueError(
            "--cluster: which one? There is no GPU here to go by. Write "
            f"{', '.join(hardware.clusters())}, or a file that cp-plugin calibrate wrote"
        )
    found, how = inferred.here("--cluster", devices, cpu=False)
    print(how, file=sys.stderr)
    return found


def _needed(megatron: list[str]) -> int:
    """Devices that the sizes among Megatron's flags need, without data parallelism."""
    given = dict(itertools.pairwise(megatron))
    sizes = (given.get(f"--{axis}-parallel-size", "1") for axis in ("tensor-model", "pipeline-model", "context"))
    return math.prod(int(size) for size in sizes if size.isdecimal())


def _searched(asked: Asked, fp8: tuple[Fp8 | None, ...], options: Options, limit: float, *, quiet: bool) -> Plan:
    from cp_plugin.planner.candidates import Allowed
    from cp_plugin.planner.search import plan as search

    console = Console(stderr=True, quiet=quiet)
    with console.status("planning") as status:
        return search(
            asked.model,
            asked.shapes,
            asked.cluster,
            fp8=fp8,
            limit=limit,
            allowed=Allowed(options=options),
            progress=lambda text: status.update(f"simulating {text}"),
        )
