"""Options of providers: how one is declared (``Option``), and what a user chose (``Options``).

An option is declared once, beside the provider that has it. Flags of Megatron and of ``cp-plugin``, arguments of NeMo's
``apply``, what the planner tries and the tables of the documentation all come from that declaration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cp_plugin.core.text import in_words

AUTO = "auto"


class Option(str):
    """The name of an option, which is a field of ``Options``, and all that is known of it."""

    metavar: str
    meaning: str
    """Half a sentence, for help texts."""
    default: str
    """What it means to leave the option open."""
    unset: str
    """The text that leaves it open."""
    read: Callable[[str], Any]
    """The value from its text; None for a text that is none."""
    write: str
    """What to write, for the message about such a text."""
    choices: tuple[str, ...]
    """The words that there are; empty where it is no word."""
    every: Callable[[int], Sequence[Any]] | None
    """Ranks -> all values, of which the planner prices each one. None: the provider chooses."""
    near: Callable[[int, Any], Sequence[Any]]
    """Ranks and a value -> other values that the planner tries once the large choices are made."""

    def __new__(
        cls,
        name: str,
        *,
        metavar: str = "VALUE",
        meaning: str = "",
        default: str = "the provider's choice",
        unset: str = AUTO,
        read: Callable[[str], Any] = str,
        write: str = "",
        choices: Sequence[str] = (),
        every: Callable[[int], Sequence[Any]] | None = None,
        near: Callable[[int, Any], Sequence[Any]] = lambda ranks, value: (),
    ) -> Option:
        made = super().__new__(cls, name)
        made.metavar, made.meaning, made.default, made.unset = metavar, meaning, default, unset
        made.choices, made.every, made.near = tuple(choices), every, near
        made.read = (lambda text: text if text in choices else None) if choices else read
        made.write = write or " or ".join(choices)
        return made

    @property
    def flag(self) -> str:
        """As it is on the command line of a training."""
        return f"--cp-{self.replace('_', '-')}"

    @property
    def attribute(self) -> str:
        """Of the namespace that is parsed from such a command line."""
        return f"cp_{self}"

    def parse(self, text: str) -> Any:
        """The value of a text, None where it leaves the option open.

        Raises:
            ValueError: for a text that is no value: the flag, the text, what to write.
        """
        if text == self.unset:
            return None
        value = self.read(text)
        if value is None:
            raise ValueError(f"{self.flag} {text}: write {self.write}, or {self.unset}")
        return value

    def check(self, value: object) -> None:
        """ValueError for a word that is none of the choices."""
        if self.choices and value not in (*self.choices, self.unset):
            raise ValueError(f"{self.flag} {in_words(value)}: write {self.write}, or {self.unset}")


def whole_number(text: str) -> int | None:
    """A number of 1 or more; None for another text."""
    return int(text) if re.fullmatch(r"[1-9]\d*", text, re.ASCII) else None


def rows_and_columns(text: str) -> tuple[int, int] | None:
    """``8x4``; None for another text."""
    rows, by, columns = text.partition("x")
    found = whole_number(rows), whole_number(columns)
    return (found[0], found[1]) if by and found[0] and found[1] else None


@dataclass(frozen=True, slots=True, init=False)
class Options:
    """What a user chose, besides the provider's name: ``Options(layout="zigzag", grid=(4, 2))``.

    The options of providers are attributes, too; one that was left open, which is the provider's choice
    (``Provider.choose``), is None.
    """

    layout: str | None
    """Which tokens each rank holds; None: the provider's first layout."""
    backend: str
    """The attention kernel."""
    given: tuple[tuple[str, Any], ...]
    """All others that were chosen, by their names."""

    def __init__(
        self,
        *,
        layout: str | None = None,
        backend: str = AUTO,
        given: Sequence[tuple[str, Any]] = (),
        **chosen: Any,
    ) -> None:
        values = {**dict(given), **chosen}
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "backend", backend)
        object.__setattr__(self, "given", tuple((str(k), values[k]) for k in sorted(values) if values[k] is not None))

    def __getattr__(self, name: str) -> Any:
        if name == "given" or name.startswith("_"):
            raise AttributeError(name)
        return next((value for key, value in self.given if key == name), None)

    @property
    def chosen(self) -> dict[str, Any]:
        """The options that were chosen, without layout and backend, which every provider has."""
        return dict(self.given)
