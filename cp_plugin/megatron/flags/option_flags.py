"""Flags generated from the providers' declared options (``engine.core.options.Option``).

``auto``, or leaving the flag out, leaves the choice to the provider.
"""

from __future__ import annotations

import argparse

from cp_plugin.engine.common.text import show_option
from cp_plugin.engine.core.options import AUTO as AUTO
from cp_plugin.engine.core.options import Option, Options
from cp_plugin.megatron.flags.declared import KERNEL, LAYOUT, declared


def all_options() -> list[Option]:
    """All options; each has a flag."""
    return list(declared().options.values())


def add_option_flags(group: argparse._ArgumentGroup) -> None:
    """Declare the flags."""
    for option in all_options():
        taking = takers(option)
        some = f"; with {', '.join(taking)}" if taking != declared().names() else ""
        group.add_argument(
            option.flag,
            metavar=option.metavar,
            help=f"{option.meaning}{some}. Default: {option.unset}, {option.default}",
        )


def takers(option: Option) -> list[str]:
    """The providers that take an option: softmax, then linear."""
    known = option in (LAYOUT, KERNEL)  # of every provider
    linear = [] if known else declared().takers(option, "linear")
    return [*declared().takers(option), *(f"--cp-linear-provider {name}" for name in linear)]


def given(args: argparse.Namespace) -> list[Option]:
    """The options whose flags were given a value other than ``auto``."""
    return [option for option in all_options() if getattr(args, option.attribute, None) not in (None, option.unset)]


def options_from(args: argparse.Namespace) -> Options:
    """Read the flags; ValueError for all values that cannot be parsed."""
    values, wrong = {}, []
    for option in given(args):
        try:
            values[option] = option.parse(getattr(args, option.attribute))
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError(" | ".join(wrong))
    return Options(**values)


def shown(options: Options) -> dict[str, str]:
    """Flag -> value as on a command line, for all chosen options but layout and kernel."""
    return {option.flag: show_option(options.chosen[option]) for option in all_options() if option in options.chosen}
