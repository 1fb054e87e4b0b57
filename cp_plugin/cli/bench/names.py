"""Names that users write in flags."""

from __future__ import annotations

from collections.abc import Iterable

from cp_plugin.planner.names import did_you_mean


def check(flag: str, name: str, known: Iterable[str]) -> None:
    """ValueError for a name that is none of the known ones; the message lists them, and the nearest."""
    listed = list(dict.fromkeys(known))
    if name not in listed:
        raise ValueError(f"{flag} {name}: {name!r} is none of {', '.join(listed)}{did_you_mean(name, listed)}")
