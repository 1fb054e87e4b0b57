"""``--cp-provider auto``: the planner chooses the provider and its options before anything is patched.

It plans for the validated model, parallel sizes, sequence length and, if known, documents, within the options that the
user gave. The choice is written into the arguments as if its flags had been on the command line, so that ranks compare
it and checkpoints save it. Every rank plans for itself; the result is deterministic.

Stock Megatron is chosen if it can run and the predicted gain does not exceed the known prediction error.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
from collections.abc import Sequence
from dataclasses import replace

from cp_plugin.engine.attention.calls import settled_or_reason
from cp_plugin.engine.common.text import show_bytes
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods import registry as providers
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.flags import args as our_flags
from cp_plugin.megatron.flags.args import UPSTREAM, Settings
from cp_plugin.megatron.flags.linear_flags import attribute
from cp_plugin.megatron.flags.option_flags import AUTO
from cp_plugin.megatron.planned.sizes import question
from cp_plugin.megatron.rules import checks
from cp_plugin.planner.candidates import STOCK, Allowed, without_sums
from cp_plugin.planner.errors import describe, off_by
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.hardware import Inferred
from cp_plugin.planner.price import Priced
from cp_plugin.planner.query import Query
from cp_plugin.planner.search import Plan, answer, simplest, tying

CLUSTER = "--cp-cluster"
_ASKED = f"--cp-provider {AUTO}"
_ELSEWHERE = "only works in a training command"


def decide(args: argparse.Namespace, settings: Settings, *, may_leave: bool = False) -> Settings:
    """Return the settings with the planner's choice, write it into the arguments, and print it on rank 0.

    Args:
        may_leave: stock Megatron may be chosen; the settings are then inactive.

    Raises:
        ValueError: for an unknown cluster or model, and if no provider can run this or fits the memory.
    """
    try:
        cluster = _cluster(args)
        model, parallel, allowed, packed = question(args, settings)
        allowed = replace(allowed, stock=allowed.stock and not cpu.active())
        plan = answer(Query(model=model, cluster=cluster.cluster, shapes=[parallel], allowed=allowed))
    except ValueError as error:
        raise ValueError(f"{_ASKED}: {error}; or name a provider: {', '.join(providers.names())}") from error
    real = allowed.real
    assert real is not None
    best, stock = _best(plan, real, allowed), _stock(plan)
    reason = _why_not_stock(args, real, stock) if may_leave and stock is not None else _ELSEWHERE
    enough = stock is not None and plan.beating(stock) is None
    leave = enough and not reason
    chosen = stock if leave and stock is not None else best
    tie = "" if stock is None else f"a tie ({off_by(stock.provider, best.provider)})"
    headline = _describe_ours(plan, best, stock)
    if leave:
        headline = (
            f"{chosen.candidate.name}: stock Megatron, nothing is replaced; predicted {_ms(chosen)} ms per attention "
            f"call, {_each([best])}; iterations are {tie}"
        )
    lines = [headline, f"planned for {cluster.how}", f"equivalent flags without the planner: {_flags(chosen)}"]
    if stock is not None and enough and not leave:
        lines.append(
            f"stock Megatron would do just as well: {_flags(stock)}, whose iterations are {tie}; it was not chosen "
            f"because {reason}"
        )
    if packed is not None and not leave:
        lines.append(
            f"planned for packs such as one of {len(packed.lengths)} documents, the longest of {max(packed.lengths)} "
            f"tokens, drawn from {packed.prefix}.idx"
        )
    elif real.documents and not leave:
        lines.append("planned for packs as single sequences, because document lengths are unknown before training")
    args.cp_cluster = None
    if leave:
        args.cp_provider, args.cp_comm_type = UPSTREAM, [_comm_type(chosen)]
        settings = our_flags.settings_from(args)
    else:
        if settings.linear is None or settings.linear.options.gradient_dtype is None:
            args.cp_gradient_dtype = None  # the chosen provider may have no sums
        words = best.candidate.flags.split()
        for flag, value in zip(words[::2], words[1::2], strict=True):
            setattr(args, attribute(flag), value)
        settings = our_flags.settings_from(args)
    checks.say(args, (f"{AUTO}: {line}" for line in lines))
    return replace(settings, planned=tuple(lines))


def _cluster(args: argparse.Namespace) -> Inferred:
    """The named cluster, or the one this process runs on."""
    if args.cp_cluster is None:
        return hardware.infer_cluster(CLUSTER, args.world_size, cpu=cpu.active())
    try:
        return Inferred(hardware.cluster(args.cp_cluster), f"{CLUSTER} {args.cp_cluster}")
    except ValueError as error:
        raise ValueError(f"{CLUSTER} {args.cp_cluster} cannot be used: {error}") from error


def _best(plan: Plan, real: Problem, allowed: Allowed) -> Priced:
    """The simplest of our methods that tie; ValueError if there is none, or none that fits."""
    ours = [p for p in plan.methods if not p.candidate.upstream]
    if not ours:
        reasons = " | ".join(f"{name}: {_why_not(name, real, allowed)}" for name in providers.names())
        raise ValueError(f"{_ASKED}: no provider can run this model. {reasons}")
    if able := [p for p in ours if plan.fits(p)]:
        return simplest(able)
    least = min(ours, key=lambda priced: priced.footprint.total)
    raise ValueError(
        f"{_ASKED}: nothing fits the memory: {least.candidate.name}, the smallest, needs "
        f"{show_bytes(least.footprint.total)}, and {plan.query.cluster.device.name} has "
        f"{show_bytes(plan.query.memory)}. Raise --context-parallel-size or --tensor-model-parallel-size, use "
        f"--recompute-granularity full, or name another device with {CLUSTER}"
    )


def _stock(plan: Plan) -> Priced | None:
    """The best of Megatron's own methods, if any can run this and fits."""
    able = [p for p in plan.methods if p.candidate.upstream and plan.fits(p)]
    return plan.best if plan.best in able else simplest(able) if able else None


def _why_not(name: str, real: Problem, allowed: Allowed) -> str:
    provider = providers.get(name)
    layouts = [layout for layout in provider.layouts if layout in allowed.layouts]
    if not layouts:
        return f"it runs on {', '.join(provider.layouts)}, but these flags allow {', '.join(allowed.layouts)}"
    return str(
        settled_or_reason(provider, real, replace(without_sums(provider, allowed.options), layout=layouts[0])).reason
    )


def _why_not_stock(args: argparse.Namespace, real: Problem, stock: Priced) -> str:
    """Return why stock Megatron cannot be chosen here; empty: it can."""
    if args.transformer_impl != "transformer_engine" or importlib.util.find_spec("transformer_engine") is None:
        return "it needs Transformer Engine, which is not installed"
    if args.attention_backend.name not in ("auto", "flash", "fused"):
        return f"it has no --attention-backend {args.attention_backend.name} under context parallelism"
    if real.documents:
        return "it needs every document padded separately"
    if _comm_type(stock) == "a2a+p2p":
        return "Megatron makes its groups before the planner chooses"
    if real.seq_length % (2 * real.size) or args.cp_pad_sequence:
        return "it cannot pad sequences"
    trial = copy.copy(args)
    trial.cp_provider = trial.cp_cluster = None
    try:
        our_flags.settings_from(trial)
    except ValueError:
        return "some flags need the plugin"
    return ""


def _comm_type(stock: Priced) -> str:
    return stock.candidate.name.removeprefix(f"{STOCK} ")


def _flags(priced: Priced) -> str:
    """The flags that select it without the planner."""
    return f"--cp-provider {UPSTREAM} " * priced.candidate.upstream + priced.candidate.flags


def _describe_ours(plan: Plan, best: Priced, stock: Priced | None) -> str:
    """The choice of one of the plugin's providers, in one line."""
    setup, ours = best.candidate.setup, [p for p in plan.methods if not p.candidate.upstream and plan.fits(p)]
    tied = [p for p in tying(ours) if p is not best]
    chosen = ", ".join(part for part in (setup.layout, str(setup)) if part)
    parts = [f"{best.candidate.name} ({chosen}): predicted {_ms(best)} ms per attention call"]
    parts += [f"the simplest in a tie with {_each(tied)}"] if tied else []
    parts += [] if stock is None else [_each([stock])]
    return "; ".join([*parts, describe(p.provider for p in (*ours, *filter(None, [stock])))])


def _each(some: Sequence[Priced]) -> str:
    return ", ".join(f"{p.candidate.name} {_ms(p)}" for p in some)


def _ms(priced: Priced) -> str:
    """Milliseconds of one attention call, forward and backward."""
    return f"{priced.main.seconds * 1e3:.3g}"
