"""Lookup by user-typed names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from cp_plugin.engine.common.text import either


def find[T](kind: str, name: str, among: Mapping[str, T]) -> T:
    """The entry of that name, ignoring case and the separator (space, ``_`` or ``-``); ValueError for an unknown name;
    the message suggests the nearest ones and lists all."""
    plain = {_plain(known): known for known in among}
    if _plain(name) not in plain:
        raise ValueError(not_one_of(f"unknown {kind} {name!r}", name, among))
    return among[plain[_plain(name)]]


def did_you_mean(name: str, among: Iterable[str]) -> str:
    """``: did you mean x or y?``, or an empty string where no name is close.

    A name that differs only in case or separator is suggested alone.
    """
    plain = {_plain(known): known for known in among}
    if _plain(name) in plain:
        return f": did you mean {plain[_plain(name)]}?"
    within = [known for known in plain if len(_plain(name)) > 2 and _plain(name) in known]
    cutoff = 0.6 if len(_plain(name)) < 4 else 0.7  # one slip of the finger in three letters leaves two of them
    near = [plain[known] for known in dict.fromkeys([*within, *get_close_matches(_plain(name), plain, cutoff=cutoff)])]
    helps = len(near) == 1 or 2 * len(near) <= len(plain)  # most of them are no hint
    return f": did you mean {either(near[:3])}?" if near and helps else ""


def one_of(flag: str, value: str, valid: Iterable[str], *, suggest: bool = True) -> None:
    """ValueError for a flag's value that is not one of the valid ones.

    suggest: whether the message suggests the nearest.
    """
    valid = list(valid)
    if value not in valid:
        raise ValueError(not_one_of(f"{flag} {value}", value, valid, suggest=suggest))


def not_one_of(shown: str, value: str, valid: Iterable[str], *, suggest: bool = True) -> str:
    """``--cp-provider rong: did you mean ring? Choose one of upstream, ring``; ``shown``: the flag with its value."""
    valid = list(dict.fromkeys(valid))
    near = did_you_mean(str(value), valid) if suggest else ""
    return f"{shown}{near} Choose one of {', '.join(valid)}" if near else f"{shown}: choose one of {', '.join(valid)}"


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().lower())
