"""The flags of the providers' options, made from what the providers declare (``cp_plugin.core.options.Option``).

``auto``, or no flag at all, leaves the choice to the provider. The help says which providers take which flag.
"""

from __future__ import annotations

import argparse

from cp_plugin.core.options import AUTO as AUTO
from cp_plugin.core.options import Option, Options
from cp_plugin.core.text import in_words
from cp_plugin.methods import registry as providers


def declared() -> list[Option]:
    """All options, a flag each."""
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
    """The providers that take an option: those of softmax attention, then those of linear layers that declare it."""
    linear = [name for name in providers.names("linear") if option in providers.get(name).options]
    return [*providers.takers(option), *(f"--cp-linear-provider {name}" for name in linear)]


def given(args: argparse.Namespace) -> list[Option]:
    """The options whose flags were given another value than ``auto``."""
    return [option for option in declared() if getattr(args, option.attribute, None) not in (None, option.unset)]


def options_from(args: argparse.Namespace) -> Options:
    """Read the flags of a parsed namespace.

    Raises:
        ValueError: for a text that is no value: the flag, the text, what to write.
    """
    texts = {option: getattr(args, option.attribute, None) for option in declared()}
    values = {option: option.parse(text) for option, text in texts.items() if text is not None}
    return Options(**{option: value for option, value in values.items() if value is not None})


def shown(options: Options) -> dict[str, str]:
    """Flag -> value as one would write it, for all that was chosen but layout and kernel."""
    chosen = providers.in_order(options)
    return {option.flag: in_words(value) for option, value in chosen.items() if option in options.chosen}
