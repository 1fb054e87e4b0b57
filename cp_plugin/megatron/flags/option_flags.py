"""Flags generated from the providers' declared options (``cp_plugin.core.options.Option``).

``auto``, or leaving the flag out, leaves the choice to the provider.
"""

from __future__ import annotations

import argparse

from cp_plugin.common.text import in_words
from cp_plugin.core.options import AUTO as AUTO
from cp_plugin.core.options import Option, Options
from cp_plugin.methods import registry as providers


def declared() -> list[Option]:
    """All options; each has a flag."""
    return list(providers.registry().options.values())


def add_option_flags(group: argparse._ArgumentGroup) -> None:
    """Declare the flags."""
    for option in declared():
        taking = takers(option)
        some = f"; with {', '.join(taking)}" if taking != providers.names() else ""
        group.add_argument(
            option.flag,
            metavar=option.metavar,
            help=f"{option.meaning}{some}. Default: {option.unset}, {option.default}",
        )


def takers(option: Option) -> list[str]:
    """The providers that take an option: softmax, then linear."""
    linear = [name for name in providers.names("linear") if option in providers.get(name).options]
    return [*providers.takers(option), *(f"--cp-linear-provider {name}" for name in linear)]


def given(args: argparse.Namespace) -> list[Option]:
    """The options whose flags were given a value other than ``auto``."""
    return [option for option in declared() if getattr(args, option.attribute, None) not in (None, option.unset)]


def options_from(args: argparse.Namespace) -> Options:
    """Read the flags; ValueError for a value that cannot be parsed."""
    texts = {option: getattr(args, option.attribute, None) for option in declared()}
    values = {option: option.parse(text) for option, text in texts.items() if text is not None}
    return Options(**{option: value for option, value in values.items() if value is not None})


def shown(options: Options) -> dict[str, str]:
    """Flag -> value as on a command line, for all chosen options but layout and kernel."""
    chosen = providers.in_order(options)
    return {option.flag: in_words(value) for option, value in chosen.items() if option in options.chosen}
