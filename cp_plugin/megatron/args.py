"""The plugin's command-line flags: declaring them, and turning a parsed namespace into ``Settings``.

Nothing here imports Megatron, so that ``--cp-device`` can be read before Megatron is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from cp_plugin import backends, providers
from cp_plugin.layout import LAYOUTS
from cp_plugin.megatron.cpu import DEVICES
from cp_plugin.protocol import Options

UPSTREAM = "upstream"
SELFCHECKS = ("once", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user asked of the plugin. ``None`` means that the flag was not given."""

    provider: str = UPSTREAM
    layout: str | None = None
    backend: str = "auto"
    selfcheck: bool = True
    log_traffic: bool = False

    @property
    def active(self) -> bool:
        """Whether the plugin changes Megatron at all."""
        return self.provider != UPSTREAM

    @property
    def options(self) -> Options:
        """The same, as the core of the plugin wants it."""
        return Options(layout=self.layout, backend=self.backend)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags to a parser, in a group of their own."""
    group = parser.add_argument_group("context parallelism (cp_plugin)")
    group.add_argument(
        "--cp-provider",
        metavar="NAME",
        help=f"context-parallel attention: {', '.join([UPSTREAM, *providers.names()])}. Default: {UPSTREAM}, which is "
        "stock Megatron with nothing replaced",
    )
    group.add_argument(
        "--cp-layout",
        metavar="NAME",
        help=f"which tokens each rank holds: {', '.join(LAYOUTS)}. Default: the provider's first",
    )
    group.add_argument(
        "--cp-backend", metavar="NAME", help=f"attention kernel: {', '.join(backends.names())}. Default: auto"
    )
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
            layout the provider does not run on, and flags that would do nothing.
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
    settings = Settings(
        provider=name,
        layout=args.cp_layout,
        backend=args.cp_backend or "auto",
        selfcheck=selfcheck != "off",
        log_traffic=args.cp_log_traffic,
    )
    providers.layout_for(providers.get(name), settings.options)
    backends.check_name(settings.backend)
    if args.context_parallel_size < 2:
        raise ValueError(
            f"--cp-provider {name} needs --context-parallel-size 2 or more, got {args.context_parallel_size}: "
            "raise it, or leave --cp-provider out"
        )
    return settings


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


_FLAGS = {"--cp-provider", "--cp-layout", "--cp-backend", "--cp-device", "--cp-selfcheck", "--cp-log-traffic"}


def _refuse_without_provider(args: argparse.Namespace) -> None:
    given = [
        flag
        for flag in ("--cp-layout", "--cp-backend", "--cp-selfcheck", "--cp-log-traffic")
        if getattr(args, flag.removeprefix("--").replace("-", "_"), None)
    ]
    if given:
        raise ValueError(
            f"{', '.join(given)} would do nothing without a context-parallel provider: add --cp-provider with one of "
            f"{', '.join(providers.names())}, or leave {'it' if len(given) == 1 else 'them'} out"
        )


def _one_of(flag: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ValueError(f"{flag} {value}: choose one of {', '.join(valid)}")
