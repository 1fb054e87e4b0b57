"""The checks of a training run's arguments, before and after Megatron's own ``validate_args``.

Before: whatever Megatron would stop at, or silently change, with a worse message. After: what only Megatron's defaults
decide. Between the two, one assertion of Megatron's is stepped around: see ``lift_divisor``.
"""

from __future__ import annotations

import argparse
import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from cp_plugin.core.layout import LAYOUTS, Layout, get_layout
from cp_plugin.core.problem import Problem
from cp_plugin.kernels import blocks
from cp_plugin.megatron.compat import megatron_version, weakens_expert_losses
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.flags import linear_flags
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.flags.option_flags import AUTO
from cp_plugin.megatron.layers import fp8_scaling as scaling
from cp_plugin.megatron.layers import mla
from cp_plugin.megatron.patches import hybrid, mtp, packing
from cp_plugin.megatron.rules import linear_checks
from cp_plugin.megatron.rules.refusals import refuse
from cp_plugin.methods import registry as providers
from cp_plugin.methods.registry import Resolved
from cp_plugin.planner import traced_blocks


def before(args: argparse.Namespace, settings: Settings) -> None:
    """Check and adjust the namespace as it was parsed.

    Raises:
        ValueError: for what the plugin does not support, naming flag, value and fix.
    """
    refuse(args, settings)
    mla.check(args)
    mtp.check(args)
    hybrid.check(args)
    told = scaling.check(args, settings)
    if told is not None:
        _say(args, told)
    _check_spec(args)
    _check_seq_length(args, _layout(settings))
    if args.create_attention_mask_in_dataloader:
        _say(args, "--no-create-attention-mask-in-dataloader is switched on: the providers know the causal mask")
        args.create_attention_mask_in_dataloader = False
    if args.multi_latent_attention and args.apply_rope_fusion:
        _say(args, "--no-rope-fusion is switched on: the fused rotation of MLA is not tested with the plugin")
        args.apply_rope_fusion = False
    if packing.flags(args) and args.apply_rope_fusion:
        _say(args, "--no-rope-fusion is switched on: the fused rotation divides each document by a rule of its own")
        args.apply_rope_fusion = False
    if not settings.undecided:
        count_tokens(args, settings)


def count_tokens(args: argparse.Namespace, settings: Settings) -> None:
    """Sum losses per token where the layout needs it; says so."""
    if _needs_counting(args, _layout(settings)):
        _say(
            args,
            f"--calculate-per-token-loss is switched on: in the {_layout(settings).name} layout ranks may hold "
            "different numbers of tokens that count, and a mean of their means would weight tokens unequally",
        )
        args.calculate_per_token_loss = True


def allowed_layouts(args: argparse.Namespace, settings: Settings) -> list[str]:
    """The layouts that a provider may have which is still to be chosen.

    Raises:
        ValueError: if there is none; why not the first.
    """
    found, reasons = [], []
    for name in LAYOUTS if settings.options.layout is None else [settings.options.layout]:
        trial, told = copy.copy(args), replace(settings, options=replace(settings.options, layout=name), linear=None)
        trial.calculate_per_token_loss |= _needs_counting(args, LAYOUTS[name])
        try:
            if settings.linear is not None:
                linear_flags.check_layout(settings.linear, name)
            _check_layout(trial, told)
            found.append(name)
        except ValueError as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return found


def after(args: argparse.Namespace, settings: Settings, device: torch.device | None) -> Problem:
    """Check the namespace once Megatron has filled it in; the attention call that the provider is to do.

    device: None: of another machine, whose kernels are not known.

    Raises:
        ValueError: for what the plugin, the provider or the attention kernel does not support.
    """
    refuse(args, settings)
    mtp.check(args)  # Megatron reads some of these flags out of others
    hybrid.check(args)
    _check_layout(args, settings)
    _check_packed(args)
    if args.deterministic_mode and (device is None or device.type == "cuda"):
        raise ValueError(
            f"{settings.asked} does not support --deterministic-mode on CUDA: only CPU kernels are tested; "
            f"leave it out (or {settings.instead})"
        )
    problem = problem_of(args)
    if settings.linear is not None:
        linear_checks.after(args, settings.linear, problem, device)
    if settings.softmax:
        if not settings.undecided:
            settle(settings, problem)
        if device is not None:
            blocks.choose(settings.options, problem, device)
            if not settings.undecided:
                traced_blocks.refuse_tiles(settings.provider, problem, settings.options, device)
    return problem


def settle(settings: Settings, problem: Problem) -> Resolved:
    """Let the provider choose what the flags left open.

    Raises:
        ValueError: for flags that do not fit the model or the number of ranks, naming flag, value and fix.
    """
    settled = providers.settle(settings.provider, problem, settings.options)
    reason = providers.unsupported(settled.provider, problem, settled.options)
    if reason is not None:
        raise ValueError(f"--cp-provider {settings.provider} cannot run this model: {reason}")
    return settled


def need_provider_on_cpu(args: argparse.Namespace, settings: Settings) -> None:
    """ValueError for context parallelism without a provider in CPU mode: stock Megatron has none there."""
    if not settings.active and args.context_parallel_size > 1:
        raise ValueError(
            f"--context-parallel-size {args.context_parallel_size} on the CPU needs --cp-provider with one of "
            f"{', '.join([AUTO, *providers.names()])}: stock Megatron has it in Transformer Engine only, on CUDA"
        )


def problem_of(args: argparse.Namespace) -> Problem:
    """One attention call of this model, on one rank."""
    tp = args.tensor_model_parallel_size
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    head_dim, v_head_dim = mla.head_sizes(args)
    packed = bool(packing.flags(args))
    joined = args.micro_batch_size if packed else 1  # Megatron makes one sequence of a micro-batch
    return Problem(
        seq_length=args.seq_length * joined,
        size=args.context_parallel_size,
        heads=args.num_attention_heads // tp,
        kv_heads=max(1, groups // tp),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        batch=args.micro_batch_size // joined,
        dtype=args.params_dtype,
        causal=True,
        window=None if args.window_size is None else tuple(args.window_size),
        documents=packed,
        sink=args.softmax_type != "vanilla",
        network="gloo" if cpu.active() else "nccl",
    )


def _check_packed(args: argparse.Namespace) -> None:
    given = ", ".join(packing.flags(args))
    if given and args.pipeline_model_parallel_size > 1 and args.micro_batch_size > 1:
        raise ValueError(
            f"{given} with --pipeline-model-parallel-size {args.pipeline_model_parallel_size} and --micro-batch-size "
            f"{args.micro_batch_size}: Megatron joins a micro-batch to one pack, and hands it from stage to stage as "
            "if it had not: set --micro-batch-size 1"
        )


@contextmanager
def lift_divisor(args: argparse.Namespace, settings: Settings) -> Iterator[None]:
    """Let Megatron accept every sequence length that the layout accepts.

    Megatron asserts that ``--seq-length`` is a multiple of twice the context-parallel size, which zigzag needs and
    other layouts do not. It does not assert it of ``--encoder-seq-length``, which it otherwise takes for the same thing
    and copies to ``seq_length``: so the length is handed over under that name. Validation sets both.
    """
    length, cp = args.seq_length, args.context_parallel_size
    if (
        length is not None
        and args.encoder_seq_length is None
        and length % (2 * cp)
        and not _problem(length, cp, settings)
    ):
        args.seq_length, args.encoder_seq_length = None, length
    yield
    assert length is None or args.seq_length == args.encoder_seq_length == length


def _check_layout(args: argparse.Namespace, settings: Settings) -> None:
    _check_seq_length(args, _layout(settings))
    _check_expert_losses(args, settings, megatron_version())
    _check_torch_fsdp(args, settings)


def _needs_counting(args: argparse.Namespace, layout: Layout) -> bool:
    return args.context_parallel_size > 1 and not args.calculate_per_token_loss and layout.name != "zigzag"


def _layout(settings: Settings) -> Layout:
    """That of the tokens; while it is open, the one that accepts most lengths."""
    if settings.undecided:
        return get_layout(settings.options.layout or "contiguous")
    if settings.linear is not None:
        return providers.layout_for(providers.get(settings.linear.provider), settings.linear.options)
    return providers.layout_for(providers.get(settings.provider), settings.options)


def _problem(length: int, cp: int, settings: Settings) -> bool:
    return length % _layout(settings).divisor(cp) != 0


def _check_seq_length(args: argparse.Namespace, layout: Layout) -> None:
    for flag, length in (("--seq-length", args.seq_length), ("--encoder-seq-length", args.encoder_seq_length)):
        divisor = layout.divisor(args.context_parallel_size)
        if length is not None and (length <= 0 or length % divisor):
            below = length // divisor * divisor
            nearest = " or ".join(str(n) for n in (below, below + divisor) if n > 0)
            raise ValueError(
                f"{flag} {length} cannot be divided over --context-parallel-size {args.context_parallel_size} in the "
                f"{layout.name} layout: it must be a multiple of {divisor}; use {nearest}"
            )


def _check_torch_fsdp(args: argparse.Namespace, settings: Settings) -> None:
    """Megatron leaves out the division by the number of tokens there, with or without context parallelism."""
    if args.use_torch_fsdp2 and args.calculate_per_token_loss:
        raise ValueError(
            f"--use-torch-fsdp2 with --calculate-per-token-loss, which the {_layout(settings).name} layout needs or "
            "the command line asks for: Megatron does not divide the gradients of torch's FSDP by the number of "
            "tokens. Use --cp-layout zigzag without that flag, or --use-megatron-fsdp"
        )


def _check_expert_losses(args: argparse.Namespace, settings: Settings, version: str) -> None:
    """Megatron-Core before 0.19 weakens the routers' own losses when losses are summed per token.

    It multiplies them by this rank's tokens and later divides by those of all ranks: too small by a factor of the
    context-parallel (times the tensor-parallel) size. Found by the comparison with one rank; 0.19 has the factor.
    """
    coefficients = {"--moe-aux-loss-coeff": args.moe_aux_loss_coeff, "--moe-z-loss-coeff": args.moe_z_loss_coeff}
    given = [f"{flag} {value}" for flag, value in coefficients.items() if _nonzero(value)]
    if args.num_experts and given and args.calculate_per_token_loss and weakens_expert_losses(version):
        raise ValueError(
            f"{', '.join(given)} with --calculate-per-token-loss, which the {_layout(settings).name} layout needs or "
            f"the command line asks for: megatron-core {version} makes these losses too small under context "
            "parallelism. Use megatron-core 0.19, or --cp-provider ring --cp-layout zigzag without that flag"
        )


def _nonzero(value: float | list[float] | None) -> bool:
    return any(value) if isinstance(value, list) else bool(value)


def _check_spec(args: argparse.Namespace) -> None:
    """Megatron logs a ``--spec`` that cannot be imported, and trains with its default spec instead."""
    if args.spec is None:
        return
    shown = " ".join(args.spec)
    if len(args.spec) != 2:
        raise ValueError(f"--spec {shown}: give a module and a name in it, for example --spec my_package.my_spec layer")
    module, name = args.spec
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"--spec {shown}: module {module} cannot be imported ({error}), and Megatron would silently train with its "
            "default spec: fix the import or the name, or leave --spec out"
        ) from error
    if not hasattr(found, name):
        raise ValueError(f"--spec {shown}: module {module} has no {name!r}")


def _say(args: argparse.Namespace, text: str) -> None:
    if args.rank == 0:
        print(f"cp_plugin: {text}", flush=True)
