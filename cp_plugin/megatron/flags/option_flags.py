"""The flags for the fields of ``Options``: one line each, by which they are declared, read and shown.

``auto``, or no flag at all, leaves the choice to the provider. The help says which providers take which flag, and asks
the registry.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from cp_plugin.core.layout import LAYOUTS
from cp_plugin.core.problem import Backward, Fp8, GradientDtype, Options, Problem
from cp_plugin.core.text import in_words
from cp_plugin.kernels import backends
from cp_plugin.linear import kernels
from cp_plugin.methods import registry as providers

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionFlag:
    """One flag."""

    option: str
    """The field of ``Options``."""
    metavar: str
    meaning: str
    default: str
    """What ``auto`` means."""
    read: Callable[[str], Any] = str
    """The value from its text; None for a text that is none."""
    write: str = ""
    """What to write instead of a text that is none."""
    unset: str = AUTO
    """The text that leaves the field open."""

    @property
    def flag(self) -> str:
        """As it is on the command line."""
        return f"--cp-{self.option.replace('_', '-')}"

    @property
    def attribute(self) -> str:
        """The attribute of the parsed namespace."""
        return f"cp_{self.option}"

    def help(self) -> str:
        """The help text, with the providers that take the flag."""
        taking = takers(self.option)
        some = f"; with {', '.join(taking)}" if taking != providers.names() else ""
        return f"{self.meaning}{some}. Default: {self.unset}, {self.default}"


def _grid(text: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text, re.ASCII)
    return (int(found[1]), int(found[2])) if found else None


def _count(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[1-9]\d*", text, re.ASCII) else None


def _fp8(text: str) -> Fp8 | None:
    return cast(Fp8, text) if text in ("comm", "compute") else None


def _sums(text: str) -> GradientDtype | None:
    return cast(GradientDtype, text) if text == "model" else None


def _direction(text: str) -> Backward | None:
    return cast(Backward, text) if text in ("kv", "q") else None


OPTION_FLAGS = (
    OptionFlag(
        option="layout",
        metavar="NAME",
        meaning=f"which tokens each rank holds: {', '.join(LAYOUTS)}",
        default="the provider's first",
    ),
    OptionFlag(
        option="backend",
        metavar="NAME",
        meaning=f"attention kernel: {', '.join(backends.names())}; of linear layers: {', '.join(kernels.KERNELS)}",
        default="the fastest that runs here",
    ),
    OptionFlag(
        option="grid",
        metavar="RxC",
        meaning="rows and columns of the grid of ranks",
        default="the grid that sends the fewest bytes",
        read=_grid,
        write="ROWSxCOLUMNS, such as 4x2",
    ),
    OptionFlag(
        option="head_parallel",
        metavar="U",
        meaning="ranks that share the heads of the same tokens, in front of the method",
        default="the provider's choice: none, but for usp",
        read=_count,
        write="a number of ranks, such as 2",
    ),
    OptionFlag(
        option="intra_size",
        metavar="N",
        meaning="ranks of the inner one of two nested rings",
        default="as many neighbours as share a host",
        read=_count,
        write="a number of ranks, such as 8",
    ),
    OptionFlag(
        option="backward",
        metavar="WHAT",
        meaning="what travels around the rings in the backward: kv (keys and values) or q (queries and gradients)",
        default="what is fewer bytes",
        read=_direction,
        write="kv or q",
    ),
    OptionFlag(
        option="head_groups",
        metavar="N",
        meaning="groups of heads between which communication and computation overlap",
        default="the provider's choice",
        read=_count,
        write="a number of groups, such as 2",
    ),
    OptionFlag(
        option="fp8",
        metavar="WHAT",
        meaning="comm: what attention sends in two bytes an element travels in one, as e4m3 with a power of two for "
        "each block of tokens and head; compute: and its kernel computes in FP8 (Transformer Engine, Hopper)",
        default="all in the model's dtype",
        read=_fp8,
        write="comm or compute",
        unset="off",
    ),
    OptionFlag(
        option="gradient_dtype",
        metavar="DTYPE",
        meaning="in what dtype sums of gradients (dq, or dk and dv) travel between ranks; model: that of the model, "
        "half of the bytes; on a rank they are in float32 either way",
        default="exact",
        read=_sums,
        write="model",
        unset="float32",
    ),
)


def add_option_flags(group: argparse._ArgumentGroup) -> None:
    """Declare the flags."""
    for flag in OPTION_FLAGS:
        group.add_argument(flag.flag, metavar=flag.metavar, help=flag.help())


def given(args: argparse.Namespace) -> list[str]:
    """The flags that were given another value than ``auto``."""
    return [flag.flag for flag in OPTION_FLAGS if getattr(args, flag.attribute, None) not in (None, flag.unset)]


def options_from(args: argparse.Namespace) -> Options:
    """Read the flags of a parsed namespace.

    Raises:
        ValueError: for a text that is no value: the flag, the text, what to write.
    """
    found = {}
    for flag in OPTION_FLAGS:
        text = getattr(args, flag.attribute, None)
        if text not in (None, flag.unset):
            value = flag.read(text)
            if value is None:
                raise ValueError(f"{flag.flag} {text}: write {flag.write}, or {flag.unset}")
            found[flag.option] = value
    return Options(**found)


def takers(option: str) -> list[str]:
    """The providers that take an option."""
    return [name for name in providers.names() if _takes(name, option)]


def shown(options: Options) -> dict[str, str]:
    """Flag -> value as one would write it, for all that was chosen but layout and kernel."""
    chosen = options.chosen
    return {f.flag: in_words(chosen[f.option]) for f in OPTION_FLAGS if f.option in chosen}


def _takes(provider: str, option: str) -> bool:
    if option in ("layout", "backend", "fp8"):
        return True
    if option != "head_parallel":
        return option in providers.get(provider).options
    try:  # in front of any provider that does not divide the heads itself
        providers.settle(provider, Problem(size=2, heads=2, kv_heads=2), Options(head_parallel=2))
    except ValueError:
        return False
    return True
