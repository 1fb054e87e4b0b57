"""Checks of a training run's arguments before and after Megatron's own ``validate_args``.

Before: what Megatron would refuse with a worse message, or silently change. After: what depends on Megatron's defaults.
``lift_divisor`` bypasses one of Megatron's assertions in between.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.kernels import blocks
from cp_plugin.engine.linear import kernels
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.protocol import Kind
from cp_plugin.engine.methods.registry import Resolved
from cp_plugin.engine.placement.documents import ALL, get_layout
from cp_plugin.megatron.compat import megatron_version
from cp_plugin.megatron.flags import linear_flags
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.flags.option_flags import AUTO
from cp_plugin.megatron.rules import experts, flags, layers, layout, models, precision
from cp_plugin.megatron.rules.rule import Rule, adjust, refuse, when
from cp_plugin.megatron.rules.run import Run
from cp_plugin.megatron.state import Model

TRAINING = (*flags.RULES, *models.RULES, *precision.RULES, *layout.RULES, *experts.RULES)
"""For every training run with the plugin, in reporting order."""
LINEAR = layers.LINEAR
ON_CPU = Rule(
    name="upstream on the CPU",
    example="--context-parallel-size 4 --cp-provider upstream",
    what="--context-parallel-size {0.args.context_parallel_size} on the CPU needs --cp-provider with one of {names}",
    why="stock Megatron's context parallelism needs Transformer Engine, on CUDA",
    fix="add one, or leave --context-parallel-size out",
    looks_at=lambda run: when(
        not run.settings.active and run.args.context_parallel_size > 1 and _attends(run),
        names=", ".join([AUTO, *providers.names()]),
    ),
    sentence=True,
)


def _attends(run: Run) -> bool:
    """Return True if some layer has an attention that only Transformer Engine divides."""
    return "*" in (run.pattern or "*") and not getattr(run.args, "experimental_attention_variant", None)


RULES: dict[str, tuple[Rule, ...]] = {
    "all": (*TRAINING, ON_CPU),
    "linear attention": LINEAR,
    "a layer": layers.LAYER,
    "a linear layer": layers.LINEAR_LAYER,
    "a call of a layer": layers.CALL,
    "generation": layers.CONTINUED,
}
"""By subject."""


def check_parsed(args: argparse.Namespace, settings: Settings) -> None:
    """Check and adjust the parsed namespace; ValueError for everything unsupported."""
    run = run_of(args, settings)
    _refuse(run, late=False)
    say(args, adjust(TRAINING, run, "warn"))
    say(args, adjust(TRAINING, run))


def count_tokens(args: argparse.Namespace, settings: Settings) -> None:
    """Switch on per-token losses where the layout needs them, and print that."""
    say(args, adjust(layout.RULES, run_of(args, settings)))


def allowed_layouts(args: argparse.Namespace, settings: Settings) -> list[str]:
    """The layouts open to a provider that is yet to be chosen; ValueError with the first reason if there is none."""
    allowed, reasons = [], []
    for name in ALL if settings.options.layout is None else [settings.options.layout]:
        trial, told = copy.copy(args), replace(settings, options=replace(settings.options, layout=name), linear=None)
        run = run_of(trial, told)
        trial.calculate_per_token_loss |= layout.needs_counting(run, get_layout(name))
        try:
            if settings.linear is not None:
                linear_flags.check_layout(settings.linear.provider, name)
            refuse(layout.RULES, run)
            allowed.append(name)
        except ValueError as error:
            reasons.append(error)
    if not allowed:
        raise reasons[0]
    return allowed


def refuse_all(args: argparse.Namespace, settings: Settings) -> None:
    """ValueError with what no provider supports of validated flags; stock's own exchange is one that it replaces."""
    run = run_of(copy.copy(args), settings)
    vars(run.args).update(cp_comm_type=None, hierarchical_context_parallel_sizes=None)
    adjust(TRAINING, run)
    _refuse(run, late=True)


def check_validated(args: argparse.Namespace, settings: Settings, device: torch.device | None) -> Model:
    """Return the model's attention as the providers resolve it; ValueError for what any part does not support.

    device: None: another machine's, whose kernels are unknown.
    """
    _refuse(run_of(args, settings, device), late=True)
    model = model_of(args, settings)
    if device is not None:
        _check_kernels(settings, model, device)
    return model


def model_of(args: argparse.Namespace, settings: Settings) -> Model:
    """The model's resolved attention, with its padding."""
    run = run_of(args, settings)
    model = resolve(settings, run.problem)
    return replace(
        model,
        padding=run.padding,
        parts=run.parts,
        experts=bool(args.num_experts),
        left=None if args.window_attn_skip_freq else model.problem.mask().left,
        converted=args.context_parallel_size > 1 and layout.contiguous_between_layers(args),
    )


def resolve(settings: Settings, problem: Problem) -> Model:
    """Let the providers resolve what the flags left open; softmax attention only once its provider is decided.

    Raises:
        ValueError: for flags that do not fit the model or the number of ranks.
    """
    kinds = [kind for kind in settings.kinds if not (kind == "softmax" and settings.undecided)]
    return Model(problem=problem, resolved={kind: resolve_kind(kind, settings, problem) for kind in kinds})


def resolve_kind(kind: Kind, settings: Settings, problem: Problem) -> Resolved:
    """``resolve`` for one kind of attention; ``problem``: a softmax call of the model."""
    flag, (provider, options) = "--cp-provider", settings.choice(kind)
    its = settings.linear_layers
    if kind == "linear" and its is not None:
        flag, problem = "--cp-linear-provider", its.problem(problem)
    resolved = providers.settle(provider, problem, options)
    reason = providers.unsupported(resolved.provider, problem, resolved.options)
    if reason is not None:
        raise ValueError(f"{flag} {provider} cannot run this model: {reason}")
    return resolved


def _check_kernels(settings: Settings, model: Model, device: torch.device) -> None:
    """ValueError for calls that no kernel of the device can do."""
    if "linear" in model.resolved:
        call, (_, options) = model.resolved["linear"].problem, settings.choice("linear")
        kernels.choose(options.backend, device, call)
    if "softmax" in model.resolved:
        blocks.choose(settings.options, model.problem, device)


def need_provider_on_cpu(args: argparse.Namespace, settings: Settings) -> None:
    """ValueError for context parallelism without a provider in CPU mode, where stock Megatron has none."""
    refuse([ON_CPU], run_of(args, settings))


@contextmanager
def lift_divisor(args: argparse.Namespace, settings: Settings) -> Iterator[None]:
    """Make Megatron accept every sequence length that the layout accepts.

    Megatron asserts that ``--seq-length`` is a multiple of twice the context-parallel size, as unpadded zigzag needs,
    but not ``--encoder-seq-length``, which it copies to ``seq_length``.
    """
    length, cp = args.seq_length, args.context_parallel_size
    if (
        length is not None
        and args.encoder_seq_length is None
        and length % (2 * cp)
        and (settings.pad_sequence or length % run_of(args, settings).layout.divisor(cp) == 0)
    ):
        args.seq_length, args.encoder_seq_length = None, length
    yield
    assert length is None or args.seq_length == args.encoder_seq_length == length


def run_of(args: argparse.Namespace, settings: Settings, device: torch.device | None = None) -> Run:
    """Return what the training rules look at."""
    return Run(args=args, settings=settings, version=megatron_version(), device=device)


def _refuse(run: Run, *, late: bool) -> None:
    rules = (*TRAINING, *(LINEAR if run.settings.linear is not None else ()))
    affixes = {"prefix": f"{run.settings.flag} does not support ", "suffix": f" (or {run.settings.instead})"}
    refuse((rule for rule in rules if late or not rule.late), run, **affixes)


def say(args: argparse.Namespace, told: Iterable[str]) -> None:
    """Print on rank 0."""
    if args.rank == 0:
        for text in told:
            print(f"cp_plugin: {text}", flush=True)
