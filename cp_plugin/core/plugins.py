"""What a third party adds by an entry point in its own pyproject, without touching this package.

[project.entry-points."cp_plugin.providers"]
mymethod = "my_package.my_module:PROVIDER"
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from importlib.metadata import entry_points
from typing import Any


def with_entry_points[T](
    group: str,
    built_in: Iterable[T],
    *,
    fits: Callable[[Any], bool],
    one: str,
    many: str,
    reserved: Collection[str] = (),
) -> dict[str, T]:
    """Name -> what is built in, then what the entry points of a group lead to; each has a ``name``.

    Args:
        fits: whether what an entry point leads to is of this kind.
        one, many: the kind in words, such as "a cp_plugin Provider" and "context-parallel providers".
        reserved: names that nothing may have.

    Raises:
        ValueError: if two share a name, or an entry point leads to something else.
    """
    found: dict[str, T] = {}

    def add(new: T, where: str) -> None:
        name: str = new.name  # type: ignore[attr-defined]
        if name in found or name in reserved:
            raise ValueError(f"two {many} are called {name!r}; the second is {where}")
        found[name] = new

    for new in built_in:
        add(new, "built in")
    for point in entry_points(group=group):
        new = point.load()
        if not fits(new):
            raise ValueError(f"entry point {point.name!r} = {point.value!r} is not {one}")
        add(new, point.value)
    return found
