"""Flags for linear attention: kind, layers, provider.

    --cp-linear-attention gla --cp-layer-pattern LLLN      every fourth layer keeps softmax attention (--cp-provider)
    --cp-linear-attention lightning                        all layers are linear
    --hybrid-layer-pattern GGG* --cp-linear-provider lasp2  Megatron's own gated delta net (G), by a provider of ours

The providers of both kinds of layers share one token layout.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cp_plugin.engine.common.names import one_of
from cp_plugin.engine.core.options import AUTO, Options
from cp_plugin.engine.kernels import backends
from cp_plugin.engine.linear.kernels import KERNELS
from cp_plugin.engine.linear.variants import Variant, get, variants
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.placement.documents import get_layout
from cp_plugin.megatron.flags.option_flags import takes

if TYPE_CHECKING:
    from cp_plugin.engine.core.problem import Problem

LINEAR, SOFTMAX = "L", "N"
SOFTMAX_PROVIDER = "all_gather"
"""Default for the softmax layers of a hybrid model: with lasp2, LASP-2H (arXiv 2502.07563)."""
FLAGS = ("--cp-linear-attention", "--cp-layer-pattern", "--cp-linear-provider")


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Settings of linear attention."""

    variant: str
    provider: str = "lasp2"
    pattern: str = LINEAR  # repeated over the layers: L is linear, N is softmax attention
    options: Options = field(default_factory=Options)
    """Layout, kernel and provider options of the linear layers."""

    @property
    def kind(self) -> Variant:
        """The variant."""
        return get(self.variant)

    @property
    def hybrid(self) -> bool:
        """True if some layers have softmax attention."""
        return SOFTMAX in self.pattern

    def has(self, layer_number: int) -> bool:
        """Return True if a layer is linear; Megatron counts from 1 over all pipeline stages."""
        return self.pattern[(layer_number - 1) % len(self.pattern)] == LINEAR

    def problem(self, model: Problem) -> Problem:
        """A call of a linear layer in a model whose softmax layers have calls of ``model``."""
        return replace(
            self.kind.problem(model),
            window=None if self.hybrid else model.window,  # a hybrid's window and sink belong to its softmax layers
            sink=model.sink and not self.hybrid,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Settings of Megatron's gated delta net layers, where a provider of ours runs them."""

    provider: str
    options: Options = field(default_factory=Options)
    """The layout, which is that of attention."""
    sizes: Mapping[str, int]
    """Heads on one rank, and their sizes, as a ``Problem`` names them."""

    def problem(self, model: Problem) -> Problem:
        """A call of such a layer in a model whose softmax layers have calls of ``model``."""
        return replace(model, **self.sizes, decay="token", delta=True, window=None, sink=False)


def add_flags(group: argparse._ArgumentGroup) -> None:
    """Declare the flags."""
    kinds = "; ".join(f"{name}: {variant.summary}" for name, variant in variants().items())
    attention, pattern, provider = FLAGS
    group.add_argument(attention, metavar="NAME", help=f"linear attention instead of softmax attention. {kinds}")
    group.add_argument(
        pattern,
        metavar="PATTERN",
        help="which layers are linear (L) and which keep softmax attention (N), repeated over the layers; LLLN: every "
        "fourth is softmax. Default: L, all layers are linear",
    )
    group.add_argument(
        provider,
        metavar="NAME",
        help="context parallelism of the linear layers, and of Megatron's gated delta net (G in "
        f"--hybrid-layer-pattern): {', '.join(providers.names('linear'))}. Default: lasp2; for gated delta net "
        "Megatron's own all-to-all of heads",
    )


def linear_from(args: argparse.Namespace) -> Linear | None:
    """Read the flags; None without linear attention.

    Raises:
        ValueError: for an unknown name or letter, and for flags that would do nothing.
    """
    variant, pattern, provider = (getattr(args, attribute(flag), None) for flag in FLAGS)
    if variant is None and pattern is None and has_delta_net(args):
        return None
    if variant is None:
        idle = [f"{f} {v}" for f, v in zip(FLAGS[1:], (pattern, provider), strict=True) if v is not None]
        kinds = f"add --cp-linear-attention with one of {', '.join(variants())}"
        refuse_idle(idle, " without --cp-linear-attention: " + kinds + ", or leave {them} out")
        return None
    one_of("--cp-linear-attention", variant, variants())
    chosen = {"provider": provider, "pattern": pattern}
    linear = Linear(variant=variant, **{name: text for name, text in chosen.items() if text is not None})
    one_of("--cp-linear-provider", linear.provider, providers.names("linear"))
    _check_pattern(linear.pattern)
    return linear


def has_delta_net(args: argparse.Namespace) -> bool:
    """Return True if the model has Megatron's gated delta net layers."""
    return "G" in (getattr(args, "hybrid_layer_pattern", None) or "")


def delta_net_from(args: argparse.Namespace, provider: str | None, options: Options) -> DeltaNet | None:
    """Read ``--cp-linear-provider`` of a model with gated delta net layers; None: Megatron's own context parallelism.

    Args:
        provider: of softmax attention; None: Megatron's own.

    Raises:
        ValueError: for an unknown name, no provider of softmax attention, and providers without a common layout.
    """
    name = getattr(args, "cp_linear_provider", None)
    if name is None:
        return None
    one_of("--cp-linear-provider", name, providers.names("linear"))
    if provider in (None, AUTO):
        raise ValueError(
            f"--cp-linear-provider {name} with G in --hybrid-layer-pattern {args.hybrid_layer_pattern}: all layers "
            "share one token layout, which a softmax provider must support. Add --cp-provider with one of "
            f"{', '.join(providers.names())}"
        )
    heads = args.linear_num_value_heads // args.tensor_model_parallel_size  # Megatron repeats those of queries and keys
    sizes = {"head_dim": args.linear_key_head_dim, "v_head_dim": args.linear_value_head_dim}
    layout = _layout(name, provider, options.layout)
    return DeltaNet(provider=name, options=Options(layout=layout), sizes={"heads": heads, "kv_heads": heads} | sizes)


def divided(linear: Linear, provider: str | None, options: Options) -> tuple[Linear, Options]:
    """Split the options between linear and softmax layers, with a common layout; ValueError if there is none.

    Each provider gets the options it declares, softmax layers also those that nobody declares. A kernel goes to the
    kind of attention that has it. Without softmax layers the provider is None; ``auto``: the planner chooses it.
    """
    own = {option: value for option, value in options.chosen.items() if takes(linear.provider, option)}
    softmax = {None: [], AUTO: providers.names()}.get(provider, [provider])
    alone = [option for option in own if not any(takes(name, option) for name in softmax)]
    linear, options = replace(linear, options=Options(**own)), replace(options, **dict.fromkeys(alone))
    if provider == AUTO:
        if options.layout is not None:
            check_layout(linear.provider, options.layout)
        return linear, options
    layout, name = _layout(linear.provider, provider, options.layout), options.backend
    for_linear, for_softmax = (name in (AUTO, *of) for of in (KERNELS, backends.names()))
    if provider is None:
        one_of("--cp-backend", name, (AUTO, *KERNELS))
    elif not for_linear:
        backends.check_name(name)
    linear = replace(linear, options=replace(linear.options, layout=layout, backend=name if for_linear else AUTO))
    return linear, replace(options, layout=layout, backend=name if for_softmax else AUTO)


def refuse_idle(flags: Sequence[str], why: str) -> None:
    """ValueError for flags that were given and have no effect; why: goes on, with ``{them}`` in their place."""
    have, them = ("has", "it") if len(flags) == 1 else ("have", "them")
    if flags:
        raise ValueError(f"{', '.join(flags)} {have} no effect{why.format(them=them)}")


def attribute(flag: str) -> str:
    """A flag's attribute in a parsed namespace."""
    return flag.removeprefix("--").replace("-", "_")


def _check_pattern(text: str) -> None:
    if not text or set(text) - {LINEAR, SOFTMAX}:
        raise ValueError(
            f"--cp-layer-pattern {text}: write {LINEAR} for a linear layer and {SOFTMAX} for a softmax layer, such as "
            "LLLN"
        )
    if LINEAR not in text:
        raise ValueError(
            f"--cp-layer-pattern {text} has no linear layer ({LINEAR}): add one, or leave --cp-linear-attention out"
        )


def check_layout(linear: str, layout: str) -> None:
    """ValueError for a layout on which this provider of linear layers does not run."""
    get_layout(layout)
    has = providers.get(linear).layouts
    if layout not in has:
        raise ValueError(
            f"--cp-layout {layout} does not suit linear attention, which needs neighbouring tokens on the same rank: "
            f"--cp-linear-provider {linear} runs on {', '.join(has)}; use one of these"
        )


def _layout(linear: str, provider: str | None, chosen: str | None) -> str:
    has = providers.get(linear).layouts
    if chosen is not None:
        check_layout(linear, chosen)
        return chosen
    if provider is None:
        return has[0]
    common = [layout for layout in providers.get(provider).layouts if layout in has]
    if not common:
        fits = [name for name in providers.names() if set(providers.get(name).layouts) & set(has)]
        raise ValueError(
            f"--cp-provider {provider} runs only on the layout {', '.join(providers.get(provider).layouts)}, but "
            f"--cp-linear-provider {linear} on {', '.join(has)}; a model has a single layout: use "
            f"--cp-provider with one of {', '.join(fits)}"
        )
    return common[0]
