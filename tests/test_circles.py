"""No circle of imports, lazy ones included: what a file needs can be read before it."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

from package_sources import SOURCES


def _module(file: str) -> str:
    return f"cp_plugin.{file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules among these that it imports anywhere. ``from package import module`` imports the module."""
    found: dict[str, set[str]] = {}
    for module, source in sources.items():
        needed = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                needed |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                named = {f"{node.module}.{alias.name}" for alias in node.names}
                needed |= {one if one in sources else node.module for one in named}
        found[module] = (needed & sources.keys()) - {module}
    return found


def circle(imports: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, in their order; none: there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_a_circle_through_a_lazy_import_is_found() -> None:
    lazy = {"p": "", "p.a": "from p import b", "p.b": "def f():\n    from p.a import x", "p.c": "import p.a"}
    assert set(circle(graph(lazy))) == {"p.a", "p.b"}
    assert circle(graph({**lazy, "p.b": ""})) == []


def test_no_module_is_needed_by_what_it_needs() -> None:
    imports = graph({_module(file): source for file, source in SOURCES.items()})
    assert len(imports) > 200
    assert circle(imports) == []
