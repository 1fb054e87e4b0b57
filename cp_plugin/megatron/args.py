"""The plugin's command-line flags: declaring them, and turning a parsed namespace into ``Settings``.

Nothing here imports Megatron, so that ``--cp-device`` can be read before Megatron is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

from cp_plugin import backends, providers
from cp_plugin.megatron import option_flags
from cp_plugin.megatron.cpu import DEVICES
from cp_plugin.problem import Options, Problem

UPSTREAM = "upstream"
SELFCHECKS = ("once", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked of the plugin."""

    provider: str = UPSTREAM
    options: Options = field(default_factory=Options)
    """Layout, kernel and the rest; None where the flag was not given."""
    selfcheck: bool = True
    log_traffic: bool = False

    @property
    def active(self) -> bool:
        """Whether the plugin changes Megatron at all."""
        return self.provider != UPSTREAM


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags to a parser, in a group of their own."""
    group = parser.add_argument_group("context parallelism (cp_plugin)")
    group.add_argument(
        "--cp-provider",
        metavar="NAME",
        help=f"context-parallel attention: {', '.join([UPSTREAM, *providers.names()])}. Default: {UPSTREAM}, which is "
        "stock Megatron with nothing replaced",
    )
    option_flags.add_option_flags(group)
    group.add_argument(
        "--cp-device",
        metavar="NAME",
        help=f"{', '.join(DEVICES)}. Default: auto, which is cuda where there is a CUDA device and cpu elsewhere",
    )
    group.add_argument(
        "--cp-selfcheck",
        metavar="WHEN",
        help=f"compare a tiny batch with one rank before training: {', '.join(SELFCHECKS)}. Default: once",
    )
    group.add_argument(
        "--cp-log-traffic",
        action="store_true",
        help="print the bytes that context-parallel attention sends per rank and iteration, at each log interval",
    )
    return parser


def repair_help(parser: argparse.ArgumentParser) -> None:
    """Escape per cent signs in help texts that argparse cannot format.

    Megatron-Core 0.19 has one ("headroom (e.g. 1.10 = 10%)"), and its ``--help`` ends in a traceback because of it.
    """
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
        ValueError: for an unknown provider, layout, backend, device or self-check (the message lists the valid ones), a
            value that cannot be read, a layout the provider does not run on, options that do not fit the number of
            ranks, and flags that would do nothing.
    """
    device = getattr(args, "cp_device", None)
    if device is not None:
        _one_of("--cp-device", device, DEVICES)
    selfcheck = getattr(args, "cp_selfcheck", None)
    if selfcheck is not None:
        _one_of("--cp-selfcheck", selfcheck, SELFCHECKS)
    name = getattr(args, "cp_provider", None) or UPSTREAM
    if name == UPSTREAM:
        _refuse_without_provider(args)
        return Settings()
    _one_of("--cp-provider", name, [UPSTREAM, *providers.names()])
    options = option_flags.options_from(args)
    backends.check_name(options.backend)
    size = args.context_parallel_size
    if size < 2:
        raise ValueError(
            f"--cp-provider {name} needs --context-parallel-size 2 or more, got {size}: raise it, or leave "
            "--cp-provider out"
        )
    providers.settle(name, any_model(size), options)  # `checks.after` does it again for the real one
    return Settings(provider=name, options=options, selfcheck=selfcheck != "off", log_traffic=bool(args.cp_log_traffic))


def any_model(size: int) -> Problem:
    """Where the model is not known: one that no provider refuses, since its heads can be divided over any ranks."""
    return Problem(size=size, heads=size, kv_heads=size)


def peek(argv: Sequence[str], flag: str) -> str | None:
    """The value of one flag on a command line, before anything parses it; the last one wins, as in argparse."""
    found = None
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            found = argv[i + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def refuse_yaml(argv: Sequence[str]) -> None:
    """With ``--yaml-cfg`` Megatron drops every command-line flag, the plugin's among them.

    Raises:
        ValueError: if the command line has both.
    """
    given = sorted({word.partition("=")[0] for word in argv} & _FLAGS)
    yaml_cfg = peek(argv, "--yaml-cfg")
    if given and yaml_cfg is not None:
        raise ValueError(
            f"--yaml-cfg {yaml_cfg} makes Megatron ignore the command line, and {', '.join(given)} with it: pass the "
            "settings of that file as flags"
        )


_OWN_FLAGS = ("--cp-selfcheck", "--cp-log-traffic")
_FLAGS = {"--cp-provider", "--cp-device", *_OWN_FLAGS, *(flag.flag for flag in option_flags.OPTION_FLAGS)}


def _refuse_without_provider(args: argparse.Namespace) -> None:
    own = [flag for flag in _OWN_FLAGS if getattr(args, flag.removeprefix("--").replace("-", "_"), None)]
    given = option_flags.given(args) + own
    if given:
        raise ValueError(
            f"{', '.join(given)} would do nothing without a context-parallel provider: add --cp-provider with one of "
            f"{', '.join(providers.names())}, or leave {'it' if len(given) == 1 else 'them'} out"
        )


def _one_of(flag: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"{flag} {value}: choose one of {', '.join(valid)}")
