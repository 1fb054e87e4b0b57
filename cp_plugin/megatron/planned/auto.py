"""``--cp-provider auto``: the planner chooses among our providers and their options, before anything is replaced.

It plans for exactly this model, these parallel sizes and this length, as Megatron has validated them, within the
options that the user gave. The choice goes into the namespace, as if its flags had been on the command line: so it is
compared between the ranks, and saved in checkpoints. Every rank plans for itself, and comes to the same: nothing random
or measured goes into it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from cp_plugin.attention.setups import settled_or_reason
from cp_plugin.core.problem import Problem
from cp_plugin.core.text import in_bytes
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.flags import args as our_flags
from cp_plugin.megatron.flags.args import UPSTREAM, Settings
from cp_plugin.megatron.flags.linear_flags import attribute
from cp_plugin.megatron.flags.option_flags import AUTO
from cp_plugin.megatron.planned.sizes import from_args
from cp_plugin.megatron.rules import checks
from cp_plugin.methods import registry as providers
from cp_plugin.planner import hardware, inferred
from cp_plugin.planner.candidates import Allowed, Candidate, upstream_names, without_sums
from cp_plugin.planner.inferred import Inferred
from cp_plugin.planner.model import Model
from cp_plugin.planner.parallel import Parallel
from cp_plugin.planner.price import Priced
from cp_plugin.planner.search import KNOWN_ERROR, Plan, plan

CLUSTER = "--cp-cluster"
_ASKED = f"--cp-provider {AUTO}"


def decide(args: argparse.Namespace, settings: Settings) -> Settings:
    """The settings with the planner's choice, which goes into the namespace, too; rank 0 prints it.

    Raises:
        ValueError: for a cluster that is not known, a model that the planner does not know, and where no provider can
            do this or fits the memory.
    """
    layouts = checks.allowed_layouts(args, settings)
    try:
        cluster = _cluster(args)
        model, parallel = from_args(args, settings)
        real = checks.padded_problem(args, settings)
        allowed = Allowed(options=settings.options, layouts=layouts, suits=_ours(real))
        found = plan(model, [parallel], cluster.cluster, allowed=allowed)
    except ValueError as error:
        raise ValueError(f"{_ASKED}: {error}; or name a provider: {', '.join(providers.names())}") from error
    best = _best(found, real, allowed)
    beside = None if cpu.active() or settings.linear is not None else _upstream(model, parallel, cluster, real)
    lines = _lines(best, found, beside, cluster, real)
    words = best.candidate.flags.split()
    if settings.linear is None or settings.linear.options.gradient_dtype is None:
        args.cp_gradient_dtype = None  # a provider without sums was not chosen by it
    for flag, value in zip(words[::2], words[1::2], strict=True):
        setattr(args, attribute(flag), value)
    args.cp_cluster = None
    if args.rank == 0:
        for line in lines:
            print(f"cp_plugin: {AUTO}: {line}", flush=True)
    return replace(our_flags.settings_from(args), planned=lines)


def _cluster(args: argparse.Namespace) -> Inferred:
    """The one that was named, or the one that this is."""
    if args.cp_cluster is None:
        return inferred.here(CLUSTER, args.world_size, cpu=cpu.active())
    try:
        return Inferred(hardware.cluster(args.cp_cluster), f"{CLUSTER} {args.cp_cluster}")
    except ValueError as error:
        raise ValueError(f"{CLUSTER} {args.cp_cluster} cannot be used: {error}") from error


def _ours(real: Problem) -> Callable[[Candidate], bool]:
    """Whether a candidate is one of ours, and can do what the planner knows nothing of: packed documents, sinks."""

    def suits(candidate: Candidate) -> bool:
        setup = candidate.setup
        return not candidate.upstream and providers.unsupported(setup.provider, real, setup.options) is None

    return suits


def _best(found: Plan, real: Problem, allowed: Allowed) -> Priced:
    """The winner; ValueError where there is none."""
    if not found.found:
        reasons = " | ".join(f"{name}: {_why_not(name, real, allowed)}" for name in providers.names())
        raise ValueError(f"{_ASKED}: no provider can do this. {reasons}")
    if found.fits(found.best):
        return found.best
    least = min(found.found, key=lambda priced: priced.footprint.total)
    raise ValueError(
        f"{_ASKED}: nothing fits the memory: {least.candidate.name}, which needs least, needs "
        f"{in_bytes(least.footprint.total)}, and {found.cluster.device.name} has {in_bytes(found.limit)}. Raise "
        f"--context-parallel-size or --tensor-model-parallel-size, use --recompute-granularity full, or name another "
        f"device with {CLUSTER}"
    )


def _why_not(name: str, real: Problem, allowed: Allowed) -> str:
    provider = providers.get(name)
    layouts = [layout for layout in provider.layouts if layout in allowed.layouts]
    if not layouts:
        return f"it runs on {', '.join(provider.layouts)}, and here tokens can be {', '.join(allowed.layouts)}"
    return str(
        settled_or_reason(provider, real, replace(without_sums(provider, allowed.options), layout=layouts[0])).reason
    )


def _upstream(model: Model, parallel: Parallel, cluster: Inferred, real: Problem) -> Priced | None:
    """The best of Megatron's own methods, which repeats attention in recomputation; None: none can do this."""
    can = upstream_names(real)
    allowed = Allowed(suits=lambda candidate: candidate.name in can)
    found = plan(model, [parallel], cluster.cluster, allowed=allowed)
    return found.best if found.found and found.fits(found.best) else None


def _lines(best: Priced, found: Plan, beside: Priced | None, cluster: Inferred, real: Problem) -> tuple[str, ...]:
    """The choice and its reason, the cluster, the flags for the same, and what is to be known besides."""
    setup = best.candidate.setup
    chosen = ", ".join(part for part in (setup.layout, str(setup)) if part)
    others = ", ".join(f"{p.candidate.name} {_ms(p)}" for p in found.found[1:] if found.fits(p))
    parts = [f"{best.candidate.name} ({chosen}): predicted {_ms(best)} ms per attention call", others]
    parts += [] if beside is None else [f"{beside.candidate.name} {_ms(beside)}"]
    lines = ["; ".join(part for part in parts if part), f"planned for {cluster.how}"]
    lines.append(f"the same without the planner: {best.candidate.flags}")
    if beside is not None and best.iteration.seconds > (1 + KNOWN_ERROR) * beside.iteration.seconds:
        faster = best.iteration.seconds / beside.iteration.seconds
        lines.append(
            f"{beside.candidate.name} is predicted to make iterations {faster:.2f} times as fast: "
            f"--cp-provider {UPSTREAM} {beside.candidate.flags}"
        )
    if real.documents:
        lines.append("packed documents were planned for as one sequence")
    return tuple(lines)


def _ms(priced: Priced) -> str:
    """Of one attention call, forward and backward."""
    return f"{priced.main.seconds * 1e3:.3g}"
