"""Flags generated from the providers' declared options (``engine.core.options.Option``).

``auto``, or leaving the flag out, leaves the choice to the provider.
"""

from __future__ import annotations

import argparse

from cp_plugin.engine.common.text import show_option
from cp_plugin.engine.core.options import AUTO as AUTO
from cp_plugin.engine.core.options import Option, Options
from cp_plugin.engine.methods import registry as providers


def add_option_flags(group: argparse._ArgumentGroup) -> None:
    """Declare the flags."""
    for option in providers.registry().options.values():
        taking = takers(option)
        some = f"; with {', '.join(taking)}" if taking != providers.names() else ""
        group.add_argument(
            option.flag,
            metavar=option.metavar,
            help=f"{option.meaning}{some}. Default: {option.unset}, {option.default}",
        )


def takers(option: Option) -> list[str]:
    """The providers that take an option: softmax, then linear."""
    linear = (
        [] if option in ("layout", "backend") else [name for name in providers.names("linear") if takes(name, option)]
    )
    return [*providers.takers(option), *(f"--cp-linear-provider {name}" for name in linear)]


def takes(provider: str, option: str) -> bool:
    """Return True if a provider takes an option."""
    return providers.takes(providers.get(provider), option)


def chosen_options(args: argparse.Namespace) -> list[Option]:
    """The options whose flags were given a value other than ``auto``."""
    options = providers.registry().options.values()
    return [option for option in options if getattr(args, option.attribute, None) not in (None, option.unset)]


def options_from(args: argparse.Namespace) -> Options:
    """Read the flags; ValueError for all values that cannot be parsed."""
    values, wrong = {}, []
    for option in chosen_options(args):
        try:
            values[option] = option.parse(getattr(args, option.attribute))
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError(" | ".join(wrong))
    return Options(**values)


def shown(options: Options) -> dict[str, str]:
    """Flag -> value as on a command line, for all chosen options but layout and kernel."""
    declared = providers.registry().options.values()
    return {option.flag: show_option(options.chosen[option]) for option in declared if option in options.chosen}
