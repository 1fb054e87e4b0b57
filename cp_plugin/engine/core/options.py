"""Provider options: their declaration (``Option``) and the user's choices (``Options``).

An option is declared once, next to its provider. Megatron and ``cp-plugin`` flags, arguments of NeMo's ``apply``, the
planner's search space and the documentation tables are derived from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from cp_plugin.engine.common.text import divisors, either, show_option
from cp_plugin.engine.core.spelling import flag_of, spelled

AUTO = "auto"
_DECLARED: set[str] = set()
"""Names of all options that were declared."""


@dataclass(eq=False, repr=False)
class Option(str):
    """The name of an option, a field of ``Options``, and its declaration."""

    name: str
    _: KW_ONLY
    metavar: str = "VALUE"
    meaning: str = ""
    """A phrase for help texts."""
    default: str = "the provider's choice"
    """What happens if it is not given."""
    unset: str = AUTO
    """The text for "not given"."""
    read: Callable[[str], Any] = str
    """Parses a text; None if it is invalid, as any other than the choices is, where there are some."""
    write: str = ""
    """What to write instead, for error messages."""
    choices: Sequence[str] = ()
    """The valid words; empty if it is not a word."""
    every: Callable[[int], Sequence[Any]] | None = None
    """Ranks -> all values, each priced by the planner. None: the provider chooses."""
    near: Callable[[int, Any], Sequence[Any]] = lambda ranks, value: ()
    """Ranks and a value -> values that the planner tries once the large choices are made."""
    misfit: Callable[[Any, int], str | None] = lambda value, ranks: None
    """Why a value does not fit a number of ranks; None if it does."""

    def __new__(cls, name: str, **declared: Any) -> Option:
        return super().__new__(cls, name)

    def __post_init__(self) -> None:
        _DECLARED.add(self.name)
        if self.choices:
            self.read = lambda text: text if text in self.choices else None

    @property
    def flag(self) -> str:
        """The flag of a training command line."""
        return flag_of(self)

    @property
    def accepted(self) -> str:
        """What may be written besides ``unset``, for error messages."""
        return ", ".join(self.choices) or self.write

    @property
    def attribute(self) -> str:
        """Its attribute in the parsed namespace."""
        return f"cp_{self}"

    def parse(self, text: str) -> Any:
        """The value of a text; None where it leaves the option open. ValueError for an invalid text."""
        if text == self.unset:
            return None
        value = self.read(text)
        if value is None:
            raise ValueError(f"{self.flag} {text}: write {self.accepted}, or {self.unset}")
        return value

    def check(self, value: object) -> None:
        """ValueError for a word that is not one of the choices."""
        if self.choices and value not in (*self.choices, self.unset):
            raise ValueError(f"{spelled(self, value)}: write {self.accepted}, or {self.unset}")

    def check_ranks(self, value: Any, ranks: int) -> None:
        """ValueError for a value that does not fit this number of ranks."""
        if reason := self.misfit(value, ranks):
            raise ValueError(f"{spelled(self, value)} {reason}")

    def unused(self, value: object, provider: str, takers: Sequence[str]) -> str:
        """The message for a value given with a provider that does not take this option."""
        return (
            f"{spelled(self, value)} has no effect with {spelled('provider', provider)}: leave it out, or use "
            f"{either(takers)}"
        )


def whole_number(text: str) -> int | None:
    """An integer >= 1; None for any other text."""
    return int(text) if re.fullmatch(r"[1-9]\d*", text, re.ASCII) else None


def rows_and_columns(text: str) -> tuple[int, int] | None:
    """``8x4``; None for any other text."""
    rows, by, columns = text.partition("x")
    grid = whole_number(rows), whole_number(columns)
    return (grid[0], grid[1]) if by and grid[0] and grid[1] else None


def grids(ranks: int) -> list[tuple[int, int]]:
    """All (rows, columns) of a number of ranks."""
    return [(rows, ranks // rows) for rows in divisors(ranks)]


def not_a_grid(grid: tuple[int, int], ranks: int) -> str | None:
    """Return why these rows and columns are no grid of the ranks; None if they are."""
    if tuple(grid) in grids(ranks):
        return None
    return f"does not hold {ranks} context-parallel ranks: use one of {', '.join(map(show_option, grids(ranks)))}"


def not_a_divisor(number: int, total: int, what: str = "{} context-parallel ranks") -> str | None:
    """Return why the total, such as the ranks, cannot be divided into groups of this number; None if it can."""
    if number >= 1 and total % number == 0:
        return None
    return f"does not divide {what.format(total)}: use one of {', '.join(map(str, divisors(total)))}"


@dataclass(frozen=True, slots=True, init=False)
class Options:
    """The user's choices besides the provider: ``Options(layout="zigzag", grid=(4, 2))``.

    Declared options are attributes too; those left to the provider (``Provider.choose``) are None.
    """

    layout: str | None
    """None: the provider's first layout."""
    backend: str
    """The attention kernel."""
    items: tuple[tuple[str, Any], ...]
    """All other choices by name."""

    def __init__(
        self, *, layout: str | None = None, backend: str = AUTO, items: Sequence[tuple[str, Any]] = (), **chosen: Any
    ) -> None:
        values = {**dict(items), **chosen}
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "backend", backend)
        object.__setattr__(self, "items", tuple((str(k), values[k]) for k in sorted(values) if values[k] is not None))

    def __getattr__(self, name: str) -> Any:
        if name not in _DECLARED:
            raise AttributeError(f"no provider declares an option {name!r}", name=name, obj=self)
        return self.chosen.get(name)

    @property
    def chosen(self) -> dict[str, Any]:
        """The choices other than layout and backend."""
        return dict(self.items)
