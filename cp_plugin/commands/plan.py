"""``cp-plugin plan``: which method, which grid, how fast."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from cp_plugin.flags import AsJson, errors_in_one_line
from cp_plugin.megatron.planned import from_flags
from cp_plugin.planner import hardware, inferred
from cp_plugin.planner.asked import Asked, Fixed, fitting, of_flags, of_name
from cp_plugin.planner.hardware import Cluster
from cp_plugin.planner.names import find
from cp_plugin.planner.papers.command import reproduce_and_show
from cp_plugin.planner.parallel import RECOMPUTE
from cp_plugin.planner.search import Plan
from cp_plugin.planner.search import plan as search
from cp_plugin.planner.show import as_json as in_json
from cp_plugin.planner.show import print_plan
from cp_plugin.problem import Fp8

_GB = 1e9


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
    recompute: Annotated[
        str | None, typer.Option(help=f"{', '.join(RECOMPUTE)}; default: as little as fits the memory")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="sequences of an iteration; default: one per data rank")
    ] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="also with payloads in FP8")] = False,
    memory: Annotated[float | None, typer.Option(help="GB of a device that may be used; default: all")] = None,
    per_node: Annotated[int | None, typer.Option(help="devices of a node; default: the cluster's")] = None,
    nics: Annotated[int | None, typer.Option(help="network cards of a node; default: the cluster's")] = None,
    reproduce: Annotated[
        list[str] | None,
        typer.Option(help="instead: published figures beside predicted ones; a paper's name, or all; repeat it"),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="with --reproduce: a folder for a picture of each paper")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest context-parallel method for a model on a cluster, and the flags that switch it on.

    Name a model (``--model llama3-8b``), or give a training's own flags behind ``--``; Megatron reads and checks them.
    """
    with errors_in_one_line():
        if reproduce:
            if as_json:
                raise ValueError("--json with --reproduce: it has tables and pictures only; leave --json out")
            raise typer.Exit(not reproduce_and_show(reproduce, Console(), plots))
        changes = {name: n for name, n in (("per_node", per_node), ("nics", nics)) if n is not None}
        again = None if recompute is None else find("recomputation", recompute, {name: name for name in RECOMPUTE})
        fixed = Fixed(
            tensor=tensor,
            pipeline=pipeline,
            context=context_parallel,
            recompute=again,  # type: ignore[arg-type]
        )
        asked = _asked(model, context.args, cluster, devices, seq_length, fixed, changes)
        limit = memory * _GB if memory is not None else asked.cluster.device.memory_bytes
        sends: tuple[Fp8 | None, ...] = (None, "comm") if fp8 else (None,)
        found = _searched(fitting(asked, limit, global_batch), sends, limit, quiet=as_json)
    if as_json:
        print(json.dumps(in_json(found), indent=2))
    else:
        print_plan(Console(), found)
    if not found.fits(found.best):
        raise typer.Exit(1)


def _asked(
    model: str | None,
    flags: list[str],
    cluster: str | None,
    devices: int | None,
    seq_length: int,
    fixed: Fixed,
    changes: dict[str, int],
) -> Asked:
    if model is not None and flags:
        raise ValueError(f"--model {model} and Megatron's flags ({flags[0]} ...): give one of the two")
    if model is None and not flags:
        raise ValueError("--model: which one? Write a name, such as llama3-8b, or Megatron's flags behind --")
    if flags:
        needs = _needed(flags)
        return of_flags(flags, devices or needs, _machine(cluster, devices or needs), from_flags, **changes)
    needs = (fixed.tensor or 1) * (fixed.pipeline or 1) * (fixed.context or 1)
    machine = _machine(cluster, devices or needs)
    whole = changes.get("per_node") or machine.per_node
    return of_name(str(model), devices or max(needs, whole), seq_length, machine, fixed, **changes)


def _machine(cluster: str | None, devices: int) -> Cluster:
    """The cluster of that name; without one, that of the GPUs here."""
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


def _needed(flags: list[str]) -> int:
    """Devices that the sizes among Megatron's flags need, without data parallelism."""
    given = dict(itertools.pairwise(flags))
    sizes = (given.get(f"--{axis}-parallel-size", "1") for axis in ("tensor-model", "pipeline-model", "context"))
    return math.prod(int(size) for size in sizes if size.isdecimal())


def _searched(asked: Asked, fp8: tuple[Fp8 | None, ...], limit: float, *, quiet: bool) -> Plan:
    console = Console(stderr=True, quiet=quiet)
    with console.status("planning") as status:
        return search(
            asked.model,
            asked.shapes,
            asked.cluster,
            fp8=fp8,
            limit=limit,
            progress=lambda text: status.update(f"simulating {text}"),
        )
