"""Third-party extensions through entry points, declared in their own pyproject:

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
    """Built-in objects, then those of an entry-point group, by their ``name``; ValueError if two share a name, or an
    entry point loads another kind of object.

    Args:
        fits: whether a loaded object is of this kind.
        one, many: the kind in words, such as "a cp_plugin Provider" and "context-parallel providers".
        reserved: names that are not allowed.
    """
    by_name: dict[str, T] = {}

    def add(new: T, where: str) -> None:
        name: str = new.name  # type: ignore[attr-defined]
        if name in by_name or name in reserved:
            raise ValueError(f"two {many} are called {name!r}; the second is {where}")
        by_name[name] = new

    for new in built_in:
        add(new, "built in")
    for point in entry_points(group=group):
        new = point.load()
        if not fits(new):
            raise ValueError(f"entry point {point.name!r} = {point.value!r} is not {one}")
        add(new, point.value)
    return by_name
