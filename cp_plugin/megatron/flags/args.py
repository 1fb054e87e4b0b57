"""The plugin's command-line flags and the ``Settings`` parsed from them.

Does not import Megatron, so that ``--cp-device`` can be read first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cp_plugin.engine.common.names import one_of
from cp_plugin.engine.core.options import Options, whole_number
from cp_plugin.engine.kernels import backends
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.placement.documents import get_layout
from cp_plugin.megatron.flags import linear_flags, option_flags
from cp_plugin.megatron.flags.linear_flags import DeltaNet, Linear
from cp_plugin.megatron.flags.option_flags import AUTO

if TYPE_CHECKING:
    from cp_plugin.engine.methods.protocol import Kind

UPSTREAM = "upstream"
SELFCHECKS = ("once", "strict", "off")
IDENTITIES_EVERY = 100  # iterations
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The plugin's settings of a run."""

    provider: str = UPSTREAM  # for softmax attention; ``auto`` until the planner has chosen one
    options: Options = field(default_factory=Options)
    """Layout, kernel and provider options; None where the flag was not given."""
    linear: Linear | None = None
    delta_net: DeltaNet | None = None  # None: no such layers, or Megatron's own context parallelism of them
    selfcheck: bool = True
    strict: bool = False  # whether a self-check that cannot run stops the run
    of_stock: bool = False  # whether stock context parallelism is compared with one rank
    check_every: int = 0  # iterations between two checks of a call's rows in training; 0: never
    identities_every: int = IDENTITIES_EVERY  # the same for the identities of its gradients
    verbose: bool = False  # whether the start-up audit lists the replaced functions
    recompute_attention: bool = False  # whether activation recomputation repeats attention
    pad_sequence: bool = False  # whether sequences are padded to a length that the layout divides
    planned: tuple[str, ...] = ()  # the planner's choice and reasons, as lines; empty if the user chose

    @property
    def undecided(self) -> bool:
        """True if the planner has yet to choose the provider."""
        return self.provider == AUTO

    @property
    def softmax(self) -> bool:
        """True if the plugin computes softmax attention in any layer."""
        return self.provider != UPSTREAM

    @property
    def active(self) -> bool:
        """True if the plugin changes Megatron at all."""
        return self.softmax or self.linear is not None

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of attention that the plugin computes."""
        present: dict[Kind, bool] = {"softmax": self.softmax, "linear": self.linear_layers is not None}
        return [kind for kind in present if present[kind]]

    @property
    def linear_layers(self) -> Linear | DeltaNet | None:
        """Settings of the layers in which a provider computes linear attention; None: there are none."""
        return self.linear or self.delta_net

    def choice(self, kind: Kind) -> tuple[str, Options]:
        """Provider and options of a kind of attention."""
        if kind == "softmax":
            return self.provider, self.options
        its = self.linear_layers
        assert its is not None, "a linear layer of a model without linear attention"
        return its.provider, its.options

    @property
    def flag(self) -> str:
        """The flag that activated the plugin, for messages."""
        if self.linear is not None:
            return f"--cp-linear-attention {self.linear.variant}"
        return f"--cp-provider {self.provider}"

    @property
    def instead(self) -> str:
        """How to run without the plugin, for messages."""
        return "use --cp-provider upstream" if self.linear is None else "leave --cp-linear-attention out"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags to a parser, as a group."""
    group = parser.add_argument_group("context parallelism (cp_plugin)")
    group.add_argument(
        "--cp-provider",
        metavar="NAME",
        help=f"context-parallel attention: {', '.join([UPSTREAM, AUTO, *providers.names()])}. {AUTO}: the method that "
        f"the planner predicts to be fastest for this model on --cp-cluster, or {UPSTREAM} if it ties. Default: "
        f"{UPSTREAM}, stock Megatron with nothing replaced",
    )
    group.add_argument(
        "--cp-cluster",
        metavar="NAME|FILE.toml",
        help=f"with --cp-provider {AUTO}: the cluster to plan for, a packaged profile or a file written by cp-plugin "
        "calibrate. Default: the packaged profile that matches this GPU and the ranks per node",
    )
    option_flags.add_option_flags(group)
    linear_flags.add_flags(group)
    group.add_argument(
        "--cp-device",
        metavar="NAME",
        help=f"device to train on: {', '.join(DEVICES)}. Default: auto, cuda if there is a CUDA device, else cpu",
    )
    group.add_argument(
        "--cp-selfcheck",
        metavar="WHEN",
        help=f"compare a tiny batch with a single rank before training: {', '.join(SELFCHECKS)}. strict: stop if the "
        f"comparison cannot run. With --cp-provider {UPSTREAM}, compare stock Megatron's step. Default: once",
    )
    group.add_argument(
        "--cp-check-every",
        metavar="N",
        help="in every N-th iteration, check one attention call of one layer, and stop on a mismatch: identities that "
        "output and gradients satisfy whatever the method, and a few rows of output and query gradient, recomputed "
        "from separately gathered keys and values; also one micro-batch's slices, and RoPE in one layer. Not checked: "
        "evaluation, and layers quantized by nvidia-modelopt (it rounds inside). 0: never. Default: everything except "
        f"the rows, every {IDENTITIES_EVERY} iterations",
    )
    group.add_argument(
        "--cp-pad-sequence",
        action="store_true",
        help="pad sequences and packs to a length that the layout can split evenly across the ranks; padding is "
        "excluded from attention, losses and expert load balancing. Default: any other --seq-length is refused",
    )
    group.add_argument(
        "--cp-verbose",
        action="store_true",
        help="at start-up, list the Megatron functions that are replaced. Default: print only their number",
    )
    group.add_argument(
        "--cp-recompute-attention",
        action="store_true",
        help="with --recompute-granularity: repeat attention and its communication in the backward pass, as stock "
        "Megatron does. Default: keep its output instead",
    )
    return parser


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the flags that a parser knows."""
    return [flag for action in parser._actions for flag in action.option_strings]


def repair_help(parser: argparse.ArgumentParser) -> None:
    """Escape per cent signs in help texts that argparse cannot format; Megatron-Core 0.19's ``--help`` fails on one."""
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        try:
            if action.help:
                formatter._expand_help(action)
        except (KeyError, TypeError, ValueError):
            action.help = action.help.replace("%", "%%")


def settings_from(args: argparse.Namespace) -> Settings:
    """Read and check the plugin's flags.

    Raises:
        ValueError: for unknown names (with the valid ones), unreadable values, kinds of attention without a common
            layout, and flags that would do nothing.
    """
    names = {
        "--cp-device": DEVICES,
        "--cp-selfcheck": SELFCHECKS,
        "--cp-provider": (UPSTREAM, AUTO, *providers.names()),
    }
    for flag, valid in names.items():
        if (value := getattr(args, linear_flags.attribute(flag), None)) is not None:
            misleading = flag == "--cp-device" or value in providers.registry()  # gpu: not cpu; lasp2: not usp
            one_of(flag, value, valid, suggest=not misleading)
    name, selfcheck = (getattr(args, f"cp_{what}", None) for what in ("provider", "selfcheck"))
    if name != AUTO and getattr(args, "cp_cluster", None) is not None:
        raise ValueError(
            f"--cp-cluster {args.cp_cluster} has no effect: only --cp-provider {AUTO} uses it. Leave it out"
        )
    linear = linear_flags.linear_from(args)
    if linear is None and name in (None, UPSTREAM):
        if linear_flags.has_delta_net(args):
            linear_flags.delta_net_from(args, None, Options())
        compared = name == UPSTREAM and selfcheck in ("once", "strict")
        _refuse_without_provider(args, name, "--cp-selfcheck" if compared else "")
        return Settings(of_stock=compared and args.context_parallel_size > 1, strict=selfcheck == "strict")
    options = option_flags.options_from(args)
    delta_net = None
    if linear is None:
        backends.check_name(options.backend)
        if args.context_parallel_size < 2:
            raise ValueError(
                f"--cp-provider {name} needs --context-parallel-size 2 or more, got {args.context_parallel_size}: "
                "raise it, or leave --cp-provider out"
            )
        delta_net = linear_flags.delta_net_from(args, name, options)
        if delta_net is not None:
            options = replace(options, layout=delta_net.options.layout)
    else:
        name = _softmax_provider(linear, name, args)
        linear, options = linear_flags.divided(linear, name, options)
    if options.layout is not None:
        get_layout(options.layout)
    if args.cp_recompute_attention and args.recompute_granularity is None:
        raise ValueError(
            "--cp-recompute-attention has no effect without --recompute-granularity: add --recompute-granularity "
            "selective, or leave --cp-recompute-attention out"
        )
    return Settings(
        provider=name or UPSTREAM,
        options=options,
        linear=linear,
        delta_net=delta_net,
        selfcheck=selfcheck != "off",
        strict=selfcheck == "strict",
        check_every=_check_every(args, 0),
        identities_every=_check_every(args, IDENTITIES_EVERY),
        verbose=bool(args.cp_verbose),
        recompute_attention=bool(args.cp_recompute_attention),
        pad_sequence=bool(args.cp_pad_sequence),
    )


def peek(argv: Sequence[str], flag: str) -> str | None:
    """The last value of a flag on an unparsed command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, nargs="?", dest="value")
    return parser.parse_known_args(list(argv))[0].value


def refuse_yaml(argv: Sequence[str]) -> None:
    """ValueError for plugin flags beside ``--yaml-cfg``, with which Megatron ignores the command line."""
    own = flags_of(add_arguments(argparse.ArgumentParser(add_help=False)))
    ignored = sorted({word.partition("=")[0] for word in argv} & set(own))
    yaml_cfg = peek(argv, "--yaml-cfg")
    if ignored and yaml_cfg is not None:
        raise ValueError(
            f"--yaml-cfg {yaml_cfg} makes Megatron ignore the command line, including {', '.join(ignored)}: pass the "
            "settings of that file as flags"
        )


_OWN_FLAGS = (
    "--cp-selfcheck",
    "--cp-check-every",
    "--cp-pad-sequence",
    "--cp-verbose",
    "--cp-recompute-attention",
)


def _softmax_provider(linear: Linear, name: str | None, args: argparse.Namespace) -> str | None:
    """The provider of the softmax layers beside linear ones; None: no such layers."""
    if name == UPSTREAM:
        raise ValueError(
            f"--cp-provider {UPSTREAM} leaves Megatron unchanged, but --cp-linear-attention {linear.variant} replaces "
            "its attention: leave one of them out"
        )
    if linear.hybrid:
        return name or linear_flags.SOFTMAX_PROVIDER
    idle = [] if name is None else [f"--cp-provider {name}"]
    idle += [
        option.flag for option in option_flags.chosen_options(args) if not option_flags.takes(linear.provider, option)
    ]
    why = f": all layers of --cp-layer-pattern {linear.pattern} are linear. "
    linear_flags.refuse_idle(idle, why + "Leave {them} out, or keep some softmax layers (N): --cp-layer-pattern LLLN")
    return None


def _check_every(args: argparse.Namespace, default: int) -> int:
    text = getattr(args, "cp_check_every", None)
    number = default if text is None else 0 if text == "0" else whole_number(text)
    if number is None:
        raise ValueError(f"--cp-check-every {text}: write a number of iterations, such as 100, or 0 for never")
    return number


def _refuse_without_provider(args: argparse.Namespace, name: str | None, used: str) -> None:
    own = [flag for flag in _OWN_FLAGS if flag != used and getattr(args, linear_flags.attribute(flag), None)]
    idle = [option.flag for option in option_flags.chosen_options(args)] + own
    why = f" without a context-parallel provider: add --cp-provider with one of {', '.join(providers.names())}"
    end = ", or leave {them} out"
    if name == UPSTREAM:
        why = f" with --cp-provider {UPSTREAM}, which is stock Megatron"
        end = ": leave {them} out, or name another provider"
    linear_flags.refuse_idle(idle, why + end)
