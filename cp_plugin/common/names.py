"""Lookup by user-typed names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def find[T](kind: str, name: str, among: Mapping[str, T]) -> T:
    """The entry of that name, ignoring case and the separator (space, ``_`` or ``-``).

    Raises:
        ValueError: for an unknown name; the message suggests the nearest ones and lists all.
    """
    plain = {_plain(known): known for known in among}
    if _plain(name) not in plain:
        raise ValueError(f"unknown {kind} {name!r}{did_you_mean(name, among)} (there are {', '.join(among)})")
    return among[plain[_plain(name)]]


def did_you_mean(name: str, among: Iterable[str]) -> str:
    """``: did you mean x or y?``, or an empty string where no name is close."""
    plain = {_plain(known): known for known in among}
    within = [known for known in plain if len(_plain(name)) > 2 and _plain(name) in known]
    near = [plain[known] for known in dict.fromkeys([*within, *get_close_matches(_plain(name), plain, cutoff=0.6)])]
    return f": did you mean {' or '.join(near[:3])}?" if near else ""


def one_of(flag: str, value: str, valid: Iterable[str], *, suggest: bool = True) -> None:
    """ValueError for a flag's value that is not one of the valid ones.

    suggest: whether the message suggests the nearest.
    """
    valid = list(valid)
    if value not in valid:
        near = did_you_mean(value, valid) if suggest else ""
        choose = f"{near} Choose" if near else ": choose"
        raise ValueError(f"{flag} {value}{choose} one of {', '.join(valid)}")


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower())
