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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.utils import get_blend_and_blend_per_split

from cp_plugin.attention.setups import settled_or_reason
from cp_plugin.common.text import in_bytes
from cp_plugin.core.problem import Problem
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.flags import args as our_flags
from cp_plugin.megatron.flags.args import UPSTREAM, Settings
from cp_plugin.megatron.flags.linear_flags import attribute
from cp_plugin.megatron.flags.option_flags import AUTO
from cp_plugin.megatron.planned.sizes import from_args
from cp_plugin.megatron.rules import checks
from cp_plugin.methods import registry as providers
from cp_plugin.planner.candidates import Allowed, Candidate, upstream_names, without_sums
from cp_plugin.planner.errors import in_words, off_by
from cp_plugin.planner.machine import hardware, inferred
from cp_plugin.planner.machine.inferred import Inferred
from cp_plugin.planner.price import Priced
from cp_plugin.planner.search import Plan, plan
from cp_plugin.planner.training.model import Model
from cp_plugin.planner.training.parallel import Parallel

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
    layouts = checks.allowed_layouts(args, settings)
    try:
        cluster = _cluster(args)
        model, parallel = from_args(args, settings)
        real = checks.padded_problem(args, settings)
        packed = pack_of(args, real.seq_length)
        if packed is not None:
            parallel = replace(  # Megatron joins the sequences of a micro-batch
                parallel,
                documents=packed.lengths,
                seq_length=sum(packed.lengths),
                micro_batch=1,
                global_batch=parallel.global_batch // parallel.micro_batch,
            )
        allowed = Allowed(options=settings.options, layouts=layouts, suits=_ours(real))
        found = plan(model, [parallel], cluster.cluster, allowed=allowed)
    except ValueError as error:
        raise ValueError(f"{_ASKED}: {error}; or name a provider: {', '.join(providers.names())}") from error
    best = _best(found, real, allowed)
    stock = None if cpu.active() or settings.linear is not None else _upstream(model, parallel, cluster, real)
    answer = _Answer(found=found, best=best, stock=stock, cluster=cluster, packed=packed, real=real)
    reason = _why_not_stock(args, real, stock) if may_leave and stock is not None else _ELSEWHERE
    leave = answer.stock_is_enough and not reason
    lines = tuple(_of_stock(answer) if leave else _of_ours(answer, reason))
    args.cp_cluster = None
    if leave:
        assert stock is not None
        args.cp_provider, args.cp_comm_type = UPSTREAM, [_comm_type(stock)]
        settings = our_flags.settings_from(args)
    else:
        if settings.linear is None or settings.linear.options.gradient_dtype is None:
            args.cp_gradient_dtype = None  # the chosen provider may have no sums
        words = best.candidate.flags.split()
        for flag, value in zip(words[::2], words[1::2], strict=True):
            setattr(args, attribute(flag), value)
        settings = our_flags.settings_from(args)
    checks.say(args, (f"{AUTO}: {line}" for line in lines))
    return replace(settings, planned=lines)


class Packed(NamedTuple):
    """A representative pack."""

    lengths: tuple[int, ...]  # tokens of its documents
    prefix: str  # the dataset they are drawn from


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The planner's result."""

    found: Plan  # the plugin's providers
    best: Priced
    stock: Priced | None  # the best of Megatron's own methods, if any
    cluster: Inferred
    packed: Packed | None
    real: Problem

    @property
    def stock_is_enough(self) -> bool:
        """Whether the plugin's gain is within the typical error of predictions."""
        return self.stock is not None and self.found.beating(self.stock) is None


def pack_of(args: argparse.Namespace, tokens: int) -> Packed | None:
    """Draw a pack as ``--dataloader-inter-document-masking`` does: in random order, the last document cut.

    Lengths come from the dataset's ``.idx``; of a blend, from the dataset with the greatest weight. Every rank draws
    the same pack.

    Returns:
        None for other data, or without an ``.idx``: mock data, conversations (``--sft``), missing files.
    """
    if not getattr(args, "dataloader_inter_document_masking", False) or args.mock_data:
        return None
    together, of_splits = get_blend_and_blend_per_split(args)
    blend = together or (of_splits and of_splits[0])
    if not blend:
        return None
    prefixes, weights = blend
    prefix = prefixes[int(np.argmax(weights)) if weights else 0]
    if not IndexedDataset.exists(prefix):
        return None
    dataset = IndexedDataset(prefix)  # keeps its lengths mapped
    rng, left, found = np.random.default_rng(0), tokens, []
    while left:
        found.append(min(left, max(1, int(dataset.sequence_lengths[rng.integers(len(dataset))]))))
        left -= found[-1]
    return Packed(tuple(found), prefix)


def _cluster(args: argparse.Namespace) -> Inferred:
    """The named cluster, or the one this process runs on."""
    if args.cp_cluster is None:
        return inferred.here(CLUSTER, args.world_size, cpu=cpu.active())
    try:
        return Inferred(hardware.cluster(args.cp_cluster), f"{CLUSTER} {args.cp_cluster}")
    except ValueError as error:
        raise ValueError(f"{CLUSTER} {args.cp_cluster} cannot be used: {error}") from error


def _ours(real: Problem) -> Callable[[Candidate], bool]:
    """Select the plugin's candidates that support packed documents and sinks, which the planner does not model."""

    def suits(candidate: Candidate) -> bool:
        setup = candidate.setup
        return not candidate.upstream and providers.unsupported(setup.provider, real, setup.options) is None

    return suits


def _best(found: Plan, real: Problem, allowed: Allowed) -> Priced:
    """The best plan; ValueError if there is none."""
    if not found.found:
        reasons = " | ".join(f"{name}: {_why_not(name, real, allowed)}" for name in providers.names())
        raise ValueError(f"{_ASKED}: no provider can run this model. {reasons}")
    if found.fits(found.best):
        return found.best
    least = min(found.found, key=lambda priced: priced.footprint.total)
    raise ValueError(
        f"{_ASKED}: nothing fits the memory: {least.candidate.name}, the smallest, needs "
        f"{in_bytes(least.footprint.total)}, and {found.cluster.device.name} has {in_bytes(found.limit)}. Raise "
        "--context-parallel-size or --tensor-model-parallel-size, use --recompute-granularity full, or name another "
        f"device with {CLUSTER}"
    )


def _why_not(name: str, real: Problem, allowed: Allowed) -> str:
    provider = providers.get(name)
    layouts = [layout for layout in provider.layouts if layout in allowed.layouts]
    if not layouts:
        return f"it runs on {', '.join(provider.layouts)}, but these flags allow {', '.join(allowed.layouts)}"
    return str(
        settled_or_reason(provider, real, replace(without_sums(provider, allowed.options), layout=layouts[0])).reason
    )


def _upstream(model: Model, parallel: Parallel, cluster: Inferred, real: Problem) -> Priced | None:
    """The best of Megatron's own methods, if any can run this."""
    can = upstream_names(real)
    allowed = Allowed(suits=lambda candidate: candidate.name in can)
    found = plan(model, [parallel], cluster.cluster, allowed=allowed)
    return found.best if found.found and found.fits(found.best) else None


def _why_not_stock(args: argparse.Namespace, real: Problem, stock: Priced) -> str:
    """Why stock Megatron cannot be chosen here; empty: it can."""
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
    return stock.candidate.name.removeprefix(f"{UPSTREAM} ")


def _of_stock(answer: _Answer) -> Iterator[str]:
    """Lines for a choice of stock Megatron."""
    stock, best = answer.stock, answer.best
    assert stock is not None
    yield (
        f"{stock.candidate.name}: stock Megatron, nothing is replaced; predicted {_ms(stock)} ms per attention call, "
        f"{best.candidate.name} {_ms(best)}; iterations are {_beside_ours(answer)}"
    )
    yield f"planned for {answer.cluster.how}"
    yield f"equivalent flags without the planner: --cp-provider {UPSTREAM} {stock.candidate.flags}"


def _of_ours(answer: _Answer, reason: str) -> Iterator[str]:
    """Lines for a choice of one of the plugin's providers; reason: why stock Megatron is not chosen."""
    best, found, stock, setup = answer.best, answer.found, answer.stock, answer.best.candidate.setup
    chosen = ", ".join(part for part in (setup.layout, str(setup)) if part)
    tied, slower = (
        [p for p in some if found.fits(p)] for some in (found.found[1 : found.tied], found.found[found.tied :])
    )
    parts = [f"{best.candidate.name} ({chosen}): predicted {_ms(best)} ms per attention call"]
    if tied:
        parts.append(f"the simplest in a tie with {_each(tied)}")
    if slower:
        least = slower[0].iteration.seconds / found.fastest
        parts.append(f"iterations take {least:.2f}x or more with {_each(slower)}")
    if found.lost:
        parts.append(f"others take at least {found.lost[0].seconds / found.fastest:.2f}x")
    parts += [] if stock is None else [f"{stock.candidate.name} {_ms(stock)}"]
    parts.append(in_words(p.provider for p in (*found.found, *filter(None, [stock]))))
    yield "; ".join(parts)
    yield f"planned for {answer.cluster.how}"
    yield f"equivalent flags without the planner: {best.candidate.flags}"
    if stock is not None and answer.stock_is_enough:
        yield (
            f"stock Megatron would do just as well: --cp-provider {UPSTREAM} {stock.candidate.flags}, whose iterations "
            f"are {_beside_ours(answer)}; it was not chosen because {reason}"
        )
    if answer.packed is not None:
        count, longest = len(answer.packed.lengths), max(answer.packed.lengths)
        yield (
            f"planned for packs such as one of {count} documents, the longest of {longest} tokens, drawn from "
            f"{answer.packed.prefix}.idx"
        )
    elif answer.real.documents:
        yield "planned for packs as single sequences, because document lengths are unknown before training"


def _beside_ours(answer: _Answer) -> str:
    """Stock Megatron's iteration time: ``a tie (typical error 10 %)``, or ``1.24x as long (typical error 10 %)``."""
    stock, found = answer.stock, answer.found
    assert stock is not None
    by = found.beating(stock)
    if by is None:
        return f"a tie ({off_by(stock.provider, min(found.found, key=lambda p: p.iteration.seconds).provider)})"
    return f"{stock.iteration.seconds / by.iteration.seconds:.2f}x as long ({off_by(stock.provider, by.provider)})"


def _each(some: Sequence[Priced]) -> str:
    return ", ".join(f"{p.candidate.name} {_ms(p)}" for p in some)


def _ms(priced: Priced) -> str:
    """Milliseconds of one attention call, forward and backward."""
    return f"{priced.main.seconds * 1e3:.3g}"
