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

_GB = 1e9
_TOKENS = 131072
"""Of a sequence, unless it is given."""
_OWN = "conflicts with Megatron's flags, which set it themselves"
Recompute = StrEnum("Recompute", ["none", "selective", "full"])
_SeqLength = Annotated[int | None, typer.Option(min=1, help=f"tokens of one sequence; default: {_TOKENS}")]
_Tensor = Annotated[int | None, typer.Option(min=1, help="tensor-parallel ranks; default: the best")]
_Pipeline = Annotated[int | None, typer.Option(min=1, help="pipeline stages; default: the best")]
_Context = Annotated[int | None, typer.Option("--context", min=1, help="context-parallel ranks; default: the best")]
_Recomputed = Annotated[
    Recompute | None, typer.Option(help="activation recomputation; default: the least that fits in memory")
]
_GlobalBatch = Annotated[
    int | None,
    typer.Option(min=1, help="sequences per iteration; default: one per data-parallel rank, at most 16M tokens"),
]
_Fp8 = Annotated[bool, typer.Option("--fp8", help="also consider sending in FP8; with --explain: send in FP8")]
_Memory = Annotated[float | None, typer.Option(metavar="GB", help="usable memory per device; default: all of it")]
_Reproduce = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PAPER", help="compare a paper's figures with predictions instead; all: every paper; repeatable"
    ),
]
_Explain = Annotated[
    bool,
    typer.Option("--explain", help="show where the time of one configuration goes, what limits it, and its memory"),
]
_Provider = Annotated[
    str | None, typer.Option(metavar="NAME", help="with --explain: the method; default: the planner's choice")
]
_Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="also draw what takes each method's time: .png, .svg or .pdf")
]
_Megatron = Annotated[
    list[str] | None, typer.Argument(metavar="FLAGS", help="after --: Megatron's flags, in place of --model")
]
_WITHOUT = "has no effect without --explain"
_ALWAYS = ("gradient_dtype",)
"""Options that a search takes, too."""


class _Given(NamedTuple):
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
        """Devices of one data-parallel replica."""
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
        found, how = hardware.infer_cluster("--cluster", self.devices or self.needs, cpu=False)
        print(how, file=sys.stderr)
        return found

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
    model: Annotated[str | None, flags.MODEL] = None,
    cluster: Annotated[str | None, flags.CLUSTER] = None,
    devices: flags.TotalDevices = None,
    seq_length: _SeqLength = None,
    documents: flags.Documents = None,
    tensor: _Tensor = None,
    pipeline: _Pipeline = None,
    context_parallel: _Context = None,
    recompute: _Recomputed = None,
    global_batch: _GlobalBatch = None,
    fp8: _Fp8 = False,
    memory: _Memory = None,
    per_node: flags.PerNode = None,
    nics: flags.Nics = None,
    reproduce: _Reproduce = None,
    explain: _Explain = False,
    provider: _Provider = None,
    *,
    options: Options,
    plot: _Plot = None,
    as_json: output.AsJson = False,
    megatron: _Megatron = None,
) -> None:
    """Find the fastest context-parallel method for a model on a cluster, and the flags that enable it.

    Name a model (--model llama3-8b), or write your Megatron flags after --; Megatron parses and checks them.
    """
    began = time.perf_counter()
    changes = {name: n for name, n in (("per_node", per_node), ("nics", nics)) if n is not None}
    again = None if recompute is None else recompute.value
    given = _Given(
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
            raise typer.Exit(not _explained(given, provider, options, as_json))
        chosen = {"provider": provider, "layout": options.layout, **options.chosen}
        for name in [name for name in chosen if name not in _ALWAYS]:
            flags.refuse({f"--{name.replace('_', '-')}": chosen[name] and show_option(chosen[name])}, _WITHOUT)
        found = _searched(given, options, quiet=as_json)
        if plot is not None:
            _draw(found, plot)

    def printed() -> None:
        show_plan.print_plan(new_console(), found)
        output.print_lines(new_console(), f"planned in {time.perf_counter() - began:.1f} s", style="dim")

    output.show(as_json, lambda: show_plan.as_json(found), printed)
    if not found.fits(found.best):
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


def _explained(given: _Given, provider: str | None, options: Options, as_json: bool) -> bool:
    """Explain one configuration; return whether it fits. Context parallelism takes the remaining devices by default."""
    given.check()
    if given.megatron:
        raise ValueError(f"--explain with Megatron's flags ({given.megatron[0]} ...): give --model and sizes instead")
    flags.refuse({"--memory": given.memory}, "has no effect with --explain")
    tensor, pipeline = given.fixed.tensor or 1, given.fixed.pipeline or 1
    devices = given.devices or max(given.needs, given.changes.get("per_node") or given.machine.per_node)
    context = given.fixed.context or max(1, devices // (tensor * pipeline))
    fixed = replace(given.fixed, tensor=tensor, pipeline=pipeline, context=context)
    given = given._replace(fixed=fixed, devices=devices)
    options = replace(options, fp8="comm") if given.fp8 else options
    asked = keep_fitting(given.ask(), given.global_batch)
    if provider is None and options != Options():
        named = ", ".join(f"--{name.replace('_', '-')}" for name in providers.order_choices(options))
        raise ValueError(f"{named}: a method's options need --provider NAME")
    shapes = sorted(asked.shapes, key=lambda shape: RECOMPUTE.index(shape.recompute))
    least = next((shape for shape in shapes if asked.fits(footprint(asked.model, shape))), shapes[-1])
    asked = flags.packed(replace(asked, shapes=[least], free=False), given.documents)
    setup = _chosen(asked) if provider is None else _settled(asked, provider, options)
    found = explaining.explain(asked.model, asked.shapes[0], setup, asked.cluster)
    output.show(
        as_json,
        lambda: show_plan.explained_as_json(found),
        lambda: show_plan.print_explanation(new_console(), found),
    )
    return found.fits


def _chosen(asked: Query) -> Setup:
    """The planner's choice among our methods."""
    found = search.answer(asked)
    best = next((p for p in found.methods if not p.candidate.upstream), found.best)
    why = f"the planner's choice among {found.tried} configurations; of methods that tie, the simplest (cp-plugin plan)"
    return replace(best.candidate.setup, why=(why, *best.candidate.setup.why))


def _settled(asked: Query, provider: str, options: Options) -> Setup:
    """The named method; ValueError for an unknown one, and options that do not fit it."""
    letter, its = next(iter(problems_of(asked.model, asked.shapes[0], asked.cluster).items()))
    if provider not in providers.registry():
        one_of("--provider", provider, providers.names("linear" if letter == LINEAR else "softmax"))
    return settled(providers.get(provider), its, options)


def _searched(given: _Given, options: Options, *, quiet: bool) -> search.Plan:
    """Search the fastest training."""
    asked = flags.packed(given.ask(), given.documents)
    asked = replace(
        asked,
        allowed=replace(asked.allowed, options=replace(asked.allowed.options, **options.chosen)),
        fp8=(None, "comm") if given.fp8 else (None,),
        limit=given.memory * _GB if given.memory is not None else 0.0,
    )
    asked = keep_fitting(asked, given.global_batch)
    with new_console(stderr=True, quiet=quiet).status("planning") as status:
        return search.answer(asked, progress=lambda text: status.update(f"simulating {text}"))


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
