"""The ``cp-plugin plan`` command: the fastest context-parallel method and its flags, or one configuration in depth."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from cp_plugin.engine.attention.calls import Setup, settled
from cp_plugin.engine.common.names import one_of
from cp_plugin.engine.common.text import show_option
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.methods import registry as providers
from cp_plugin.planner import explain as explaining
from cp_plugin.planner import search
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.price import problems_of
from cp_plugin.planner.query import Fixed, Query, from_name, keep_fitting, resize_cluster
from cp_plugin.planner.training.footprint import footprint
from cp_plugin.planner.training.model import LINEAR
from cp_plugin.planner.training.parallel import RECOMPUTE
from cp_plugin.tools import flags, output, show_plan
from cp_plugin.tools.draw import canvas
from cp_plugin.tools.output import new_console

_TOKENS = 131072
"""Default length of a sequence."""
_OWN = "conflicts with Megatron's flags, which set it themselves"
Recompute = StrEnum("Recompute", ["none", "selective", "full"])


class _Request(NamedTuple):
    """The flags that describe the workload and the machine; None: not given."""

    model: str | None
    megatron: list[str]
    """Megatron's own flags, instead of the name of a model."""
    cluster: str | None
    changes: dict[str, int]
    """Overrides of the cluster's nodes."""
    devices: int | None
    seq_length: int | None
    fixed: Fixed
    global_batch: int | None
    memory: float | None
    """GB per device."""
    fp8: bool
    documents: str | None

    def check(self) -> None:
        """ValueError for a memory below 0, or unless either a model or Megatron's flags were given."""
        if self.memory is not None and not 0 < self.memory < math.inf:
            raise ValueError(f"--memory {self.memory}: write GB per device, such as 80")
        if self.model is not None and self.megatron:
            raise ValueError(
                f"--model {self.model} and Megatron's flags ({self.megatron[0]} ...): give only one of the two"
            )
        if self.model is None and not self.megatron:
            raise ValueError("--model is missing: give a name, such as llama3-8b, or Megatron's flags after --")
        if self.megatron:
            flags.refuse({f"--{name}": size for name, size in asdict(self.fixed).items()}, _OWN)
            flags.refuse({"--seq-length": self.seq_length}, _OWN)

    @property
    def needs(self) -> int:
        """Count the devices of one data-parallel replica."""
        if not self.megatron:
            return math.prod(size or 1 for size in (self.fixed.tensor, self.fixed.pipeline, self.fixed.context))
        from cp_plugin.megatron.flags.args import peek

        axes = ("tensor-model", "pipeline-model", "context")
        sizes = (peek(self.megatron, f"--{axis}-parallel-size") or "1" for axis in axes)
        return math.prod(int(size) for size in sizes if size.isdecimal())

    @property
    def machine(self) -> hardware.Cluster:
        """The named cluster; by default inferred from the GPUs here."""
        if self.cluster is not None:
            return hardware.cluster(self.cluster)
        if torch.cuda.device_count() == 0:
            raise ValueError(
                "--cluster is missing, and this machine has no GPU to infer it from: give one of "
                f"{', '.join(hardware.clusters())}, or a file written by cp-plugin calibrate"
            )
        machine, how = hardware.infer_cluster("--cluster", self.devices or self.needs, cpu=False)
        print(how, file=sys.stderr)
        return machine

    def ask(self) -> Query:
        """The question for the planner, for whole nodes unless the devices were given; ValueError for flags that
        contradict each other."""
        self.check()
        machine = self.machine
        if self.megatron:
            from cp_plugin.megatron.planned.command import question

            devices = self.devices or self.needs
            model, parallel, allowed = question(self.megatron, devices)
            cluster = resize_cluster(machine, devices, self.changes)
            return Query(model=model, cluster=cluster, shapes=[parallel], allowed=allowed)
        devices = self.devices or max(self.needs, self.changes.get("per_node") or machine.per_node)
        return from_name(str(self.model), devices, self.seq_length or _TOKENS, machine, self.fixed, **self.changes)


@flags.provider_options(without=("backend", "fp8"))
def plan(
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="a model of the catalogue, such as llama3-8b")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="a packaged cluster, such as dgx-h100, or a file written by cp-plugin calibrate"
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="devices in total; default: one node, or as many as the sizes need")
    ] = None,
    seq_length: Annotated[int | None, typer.Option(min=1, help=f"tokens of one sequence; default: {_TOKENS}")] = None,
    documents: flags.Documents = None,
    tensor: Annotated[int | None, typer.Option(min=1, help="tensor-parallel ranks; default: the best")] = None,
    pipeline: Annotated[int | None, typer.Option(min=1, help="pipeline stages; default: the best")] = None,
    context_parallel: Annotated[
        int | None, typer.Option("--context", min=1, help="context-parallel ranks; default: the best")
    ] = None,
    recompute: Annotated[
        Recompute | None, typer.Option(help="activation recomputation; default: the least that fits in memory")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(min=1, help="sequences per iteration; default: one per data-parallel rank, at most 16M tokens"),
    ] = None,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="also consider sending in FP8; with --explain: send in FP8")
    ] = False,
    memory: Annotated[
        float | None, typer.Option(metavar="GB", help="usable memory per device; default: all of it")
    ] = None,
    per_node: Annotated[int | None, typer.Option(min=1, help="devices per node; default: the cluster's")] = None,
    nics: Annotated[int | None, typer.Option(min=1, help="network cards per node; default: the cluster's")] = None,
    reproduce: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PAPER", help="compare a paper's figures with predictions instead; all: every paper; repeatable"
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="show where the time of one configuration goes, what limits it, and its memory"),
    ] = False,
    provider: Annotated[
        str | None, typer.Option(metavar="NAME", help="with --explain: the method; default: the planner's choice")
    ] = None,
    *,
    options: Options,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="also draw what takes each method's time: .png, .svg or .pdf")
    ] = None,
    as_json: output.AsJson = False,
    megatron: Annotated[
        list[str] | None, typer.Argument(metavar="FLAGS", help="after --: Megatron's flags, in place of --model")
    ] = None,
) -> None:
    """Find the fastest context-parallel method for a model on a cluster, and the flags that enable it.

    Name a model (--model llama3-8b), or write your Megatron flags after --; Megatron parses and checks them.
    """
    began = time.perf_counter()
    changes = {name: n for name, n in (("per_node", per_node), ("nics", nics)) if n is not None}
    again = None if recompute is None else recompute.value
    request = _Request(
        *(model, megatron or [], cluster, changes, devices, seq_length),
        Fixed(tensor=tensor, pipeline=pipeline, context=context_parallel, recompute=again),
        *(global_batch, memory, fp8, documents),
    )
    with flags.errors_in_one_line("--context", translated=not megatron):
        if reproduce or explain:
            flags.refuse({"--plot": plot}, f"has no effect with --{'reproduce' if reproduce else 'explain'}")
        if plot is not None:
            output.check_output(plot, "picture", output.PICTURES, "--plot")
        if reproduce:
            if as_json:
                raise ValueError("--json has no effect with --reproduce, which prints tables: leave --json out")
            raise typer.Exit(not _reproduced(reproduce))
        if explain:
            raise typer.Exit(not _explained(request, provider, options, as_json))
        chosen = {"provider": provider, "layout": options.layout, **options.chosen}
        chosen.pop("gradient_dtype", None)  # which a search takes, too
        shown = {f"--{name.replace('_', '-')}": value and show_option(value) for name, value in chosen.items()}
        flags.refuse(shown, "has no effect without --explain")
        answer = _searched(request, options, quiet=as_json)
        if plot is not None:
            _draw(answer, plot)

    def printed() -> None:
        show_plan.print_plan(new_console(), answer)
        output.print_lines(new_console(), f"planned in {time.perf_counter() - began:.1f} s", style="dim")

    output.show(as_json, lambda: show_plan.as_json(answer), printed)
    if not answer.fits(answer.best):
        raise typer.Exit(1)


def _reproduced(names: list[str]) -> bool:
    """Return True if the predictions are within their limits; ValueError without the published figures."""
    folder = Path(__file__).parents[2] / "ci" / "papers"
    if not folder.is_dir():
        raise ValueError(
            f"--reproduce {names[0]}: the papers' figures are in the source repository, not in this package; "
            "run it in a checkout after pip install -e ."
        )
    sys.path.append(str(folder))
    from evidence.report import reproduce_and_show

    return reproduce_and_show(names, new_console())


def _explained(request: _Request, provider: str | None, options: Options, as_json: bool) -> bool:
    """Explain one configuration; return whether it fits. Context parallelism takes the remaining devices by default."""
    request.check()
    if request.megatron:
        raise ValueError(f"--explain with Megatron's flags ({request.megatron[0]} ...): give --model and sizes instead")
    flags.refuse({"--memory": request.memory}, "has no effect with --explain")
    tensor, pipeline = request.fixed.tensor or 1, request.fixed.pipeline or 1
    devices = request.devices or max(request.needs, request.changes.get("per_node") or request.machine.per_node)
    context = request.fixed.context or max(1, devices // (tensor * pipeline))
    fixed = replace(request.fixed, tensor=tensor, pipeline=pipeline, context=context)
    request = request._replace(fixed=fixed, devices=devices)
    options = replace(options, fp8="comm") if request.fp8 else options
    query = keep_fitting(request.ask(), request.global_batch)
    if provider is None and options != Options():
        named = ", ".join(f"--{name.replace('_', '-')}" for name in providers.order_choices(options))
        raise ValueError(f"{named}: a method's options need --provider NAME")
    shapes = sorted(query.shapes, key=lambda shape: RECOMPUTE.index(shape.recompute))
    least = next((shape for shape in shapes if query.fits(footprint(query.model, shape))), shapes[-1])
    query = flags.packed(replace(query, shapes=[least], free=False), request.documents)
    setup = _chosen(query) if provider is None else _settled(query, provider, options)
    explanation = explaining.explain(query.model, query.shapes[0], setup, query.cluster)
    output.show(
        as_json,
        lambda: show_plan.explained_as_json(explanation),
        lambda: show_plan.print_explanation(new_console(), explanation),
    )
    return explanation.fits


def _chosen(query: Query) -> Setup:
    """Return the planner's choice among our methods."""
    answer = search.answer(query)
    best = next((p for p in answer.methods if not p.candidate.upstream), answer.best)
    why = (
        f"the planner's choice among {answer.tried} configurations; of methods that tie, the simplest (cp-plugin plan)"
    )
    return replace(best.candidate.setup, why=(why, *best.candidate.setup.why))


def _settled(query: Query, provider: str, options: Options) -> Setup:
    """The named method; ValueError for an unknown one, and options that do not fit it."""
    letter, its = next(iter(problems_of(query.model, query.shapes[0], query.cluster).items()))
    if provider not in providers.registry():
        one_of("--provider", provider, providers.names("linear" if letter == LINEAR else "softmax"))
    return settled(providers.get(provider), its, options)


def _searched(request: _Request, options: Options, *, quiet: bool) -> search.Plan:
    query = flags.packed(request.ask(), request.documents)
    query = replace(
        query,
        allowed=replace(query.allowed, options=replace(query.allowed.options, **options.chosen)),
        fp8=(None, "comm") if request.fp8 else (None,),
        limit=1e9 * request.memory if request.memory is not None else 0.0,
    )
    query = keep_fitting(query, request.global_batch)
    with new_console(stderr=True, quiet=quiet).status("planning") as status:
        return search.answer(query, progress=lambda text: status.update(f"simulating {text}"))


def _draw(plan: search.Plan, path: Path) -> None:
    """Draw the time of an iteration and its parts, a bar for each method; ValueError if matplotlib is missing."""
    names = [f"{one.candidate.name}\n{show_plan.sizes(one.parallel)}" for one in plan.methods]
    figure = canvas.new_figure(10, 1.5 + 0.6 * len(names))
    axes, left = figure.subplots(), [0.0] * len(names)
    for part in dict.fromkeys(part for one in plan.methods for part, taken in one.iteration.parts.items() if taken):
        seconds = [one.iteration.parts.get(part, 0.0) for one in plan.methods]
        axes.barh(names, seconds, left=left, label=part.replace("_", " "))
        left = [sum(pair) for pair in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of an iteration, predicted")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    canvas.save(figure, path)
