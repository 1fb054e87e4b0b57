"""The checks of a training run's arguments, before and after Megatron's own ``validate_args``.

Before: whatever Megatron would stop at, or silently change, with a worse message. After: what only Megatron's defaults
decide. Between the two, one assertion of Megatron's is stepped around: see ``lift_divisor``.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from cp_plugin.attention import traced_blocks
from cp_plugin.core.problem import Problem
from cp_plugin.kernels import blocks
from cp_plugin.linear import kernels
from cp_plugin.megatron.compat import megatron_version
from cp_plugin.megatron.flags import linear_flags
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.rules import layout, table
from cp_plugin.megatron.rules.model import problem_of
from cp_plugin.megatron.rules.rule import adjust, refuse
from cp_plugin.megatron.rules.run import Run
from cp_plugin.megatron.state import Model
from cp_plugin.methods import registry as providers
from cp_plugin.methods.protocol import Kind
from cp_plugin.methods.registry import Resolved
from cp_plugin.placement.layouts import ALL, get_layout


def before(args: argparse.Namespace, settings: Settings) -> None:
    """Check and adjust the namespace as it was parsed.

    Raises:
        ValueError: for all that the plugin does not support, naming flag, value and fix.
    """
    run = _run(args, settings)
    _refuse(run, late=False)
    _say(args, adjust(table.TRAINING, run, "warn"))
    _say(args, adjust(table.TRAINING, run))


def count_tokens(args: argparse.Namespace, settings: Settings) -> None:
    """Sum losses per token where the layout needs it; says so."""
    _say(args, adjust(layout.RULES, _run(args, settings)))


def allowed_layouts(args: argparse.Namespace, settings: Settings) -> list[str]:
    """The layouts that a provider may have which is still to be chosen.

    Raises:
        ValueError: if there is none; why not the first.
    """
    found, reasons = [], []
    for name in ALL if settings.options.layout is None else [settings.options.layout]:
        trial, told = copy.copy(args), replace(settings, options=replace(settings.options, layout=name), linear=None)
        run = _run(trial, told)
        trial.calculate_per_token_loss |= layout.needs_counting(run, get_layout(name))
        try:
            if settings.linear is not None:
                linear_flags.check_layout(settings.linear, name)
            refuse(layout.RULES, run)
            found.append(name)
        except ValueError as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return found


def after(args: argparse.Namespace, settings: Settings, device: torch.device | None) -> Model:
    """Check the namespace once Megatron has filled it in; the model's attention, as its providers will do it.

    device: None: of another machine, whose kernels are not known.

    Raises:
        ValueError: for what the plugin, the provider or the attention kernel does not support.
    """
    _refuse(_run(args, settings, device), late=True)
    converted = args.context_parallel_size > 1 and layout.contiguous_between_layers(args)
    model = replace(model_of(args, settings), converted=converted)
    if device is not None:
        _check_kernels(settings, model, device)
    return model


def padded(args: argparse.Namespace, settings: Settings, seq_length: int) -> int:
    """A sequence's length with the padding of ``--cp-pad-sequence``."""
    return _run(args, settings).padded(seq_length)


def padded_problem(args: argparse.Namespace, settings: Settings) -> Problem:
    """``problem_of`` for sequences with the padding of ``--cp-pad-sequence``."""
    problem = problem_of(args)
    return replace(problem, seq_length=padded(args, settings, problem.seq_length))


def model_of(args: argparse.Namespace, settings: Settings) -> Model:
    """The attention of the model, as ``resolve`` finds it, and how its sequences are padded."""
    run = _run(args, settings)
    model = resolve(settings, padded_problem(args, settings))
    left = None if args.window_attn_skip_freq else model.problem.mask().left
    return replace(model, padding=run.padding, parts=run.parts, experts=bool(args.num_experts), left=left)


def resolve(settings: Settings, problem: Problem) -> Model:
    """Let the providers choose what the flags left open; of softmax attention unless the planner is to choose it.

    Raises:
        ValueError: for flags that do not fit the model or the number of ranks, naming flag, value and fix.
    """
    kinds = [kind for kind in settings.kinds if not (kind == "softmax" and settings.undecided)]
    return Model(problem=problem, resolved={kind: resolve_kind(kind, settings, problem) for kind in kinds})


def resolve_kind(kind: Kind, settings: Settings, problem: Problem) -> Resolved:
    """``resolve`` for one kind of attention; ``problem``: a call of softmax attention in this model."""
    flag, (provider, options) = "--cp-provider", settings.of(kind)
    if kind == "linear" and settings.linear is not None:
        flag, problem = "--cp-linear-provider", settings.linear.problem(problem)
    resolved = providers.settle(provider, problem, options)
    reason = providers.unsupported(resolved.provider, problem, resolved.options)
    if reason is not None:
        raise ValueError(f"{flag} {provider} cannot run this model: {reason}")
    return resolved


def _check_kernels(settings: Settings, model: Model, device: torch.device) -> None:
    """ValueError for calls that no kernel of the device can do."""
    linear = settings.linear
    if linear is not None:
        call = model.resolved["linear"].problem
        kernels.choose(linear.options.backend, device, call.dtype, call.documents, linear.kind.decay)
    if settings.softmax:
        blocks.choose(settings.options, model.problem, device)
    if "softmax" in model.resolved:
        traced_blocks.refuse_tiles(settings.provider, model.problem, settings.options, device)


def need_provider_on_cpu(args: argparse.Namespace, settings: Settings) -> None:
    """ValueError for context parallelism without a provider in CPU mode: stock Megatron has none there."""
    refuse([table.ON_CPU], _run(args, settings))


@contextmanager
def lift_divisor(args: argparse.Namespace, settings: Settings) -> Iterator[None]:
    """Let Megatron accept every sequence length that the layout accepts.

    Megatron asserts that ``--seq-length`` is a multiple of twice the context-parallel size, which zigzag needs and
    other layouts do not, nor sequences that are padded. It does not assert it of ``--encoder-seq-length``, which it
    otherwise takes for the same thing and copies to ``seq_length``: so the length is handed over under that name.
    Validation sets both.
    """
    length, cp = args.seq_length, args.context_parallel_size
    if (
        length is not None
        and args.encoder_seq_length is None
        and length % (2 * cp)
        and (settings.pad_sequence or length % _run(args, settings).layout.divisor(cp) == 0)
    ):
        args.seq_length, args.encoder_seq_length = None, length
    yield
    assert length is None or args.seq_length == args.encoder_seq_length == length


def _run(args: argparse.Namespace, settings: Settings, device: torch.device | None = None) -> Run:
    return Run(args=args, settings=settings, version=megatron_version(), device=device)


def _refuse(run: Run, *, late: bool) -> None:
    rules = (*table.TRAINING, *(table.LINEAR if run.settings.linear is not None else ()))
    refuse((rule for rule in rules if late or not rule.late), run, prefix=run.asked, suffix=run.instead)


def _say(args: argparse.Namespace, told: list[str]) -> None:
    if args.rank == 0:
        for text in told:
            print(f"cp_plugin: {text}", flush=True)
