"""Fingerprints: short hashes of a symbol's source code that ignore comments, docstrings and formatting."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

_LENGTH = 16


def of_object(symbol: Any) -> str:
    """The fingerprint of a live function or class.

    Reads the object's own source, not that of a function it wraps, so that a symbol replaced by another extension does
    not pass for the original.

    Raises:
        OSError, TypeError: if there is no Python source.
    """
    return digest(definition(symbol))


def definition(symbol: Any) -> ast.AST:
    """The syntax tree of a live function or class; errors as ``of_object``."""
    function = symbol.__func__ if isinstance(symbol, staticmethod) else symbol
    source = inspect.getsource(function.__code__ if isinstance(function, FunctionType) else function)
    if not source[0].isspace():
        return ast.parse(source).body[0]
    (block,) = ast.parse(f"if True:\n{source}").body  # without its indentation, texts of several lines read otherwise
    return block.body[0]  # type: ignore[attr-defined]


def of_file(root: Path, target: str) -> str:
    """The fingerprint of ``"package.module:qualified.name"`` in the source tree under ``root``; as ``in_file``."""
    return digest(in_file(root, target))


def in_file(root: Path, target: str) -> ast.AST:
    """The syntax tree of ``"package.module:qualified.name"`` in the source tree under ``root``.

    Raises:
        ValueError: if the module or the name is not there.
    """
    module, _, qualname = target.partition(":")
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    if not path.exists():
        path = root.joinpath(*module.split("."), "__init__.py")
    if not path.exists():
        raise ValueError(f"{root} has no module {module}")
    node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for name in qualname.split("."):
        found = [n for n in _held(node) if _defines(n, name)]
        if len(found) != 1:
            raise ValueError(f"{path} defines {name!r} {len(found)} times, needed exactly once")
        node = found[0]
    return node


_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _held(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module or class, also under an ``if``, but not inside its functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _DEFINITION):
            yield from _held(child)


def _defines(node: ast.AST, name: str) -> bool:
    return isinstance(node, _DEFINITION) and node.name == name


def digest(node: ast.AST) -> str:
    """A definition's fingerprint."""
    return hashlib.sha256(_canonical(node).encode()).hexdigest()[:_LENGTH]


def _canonical(value: Any) -> str:
    """The tree as text, without absent fields, so that it is the same for every Python version."""
    if isinstance(value, ast.AST):
        fields = [(name, _without_docstring(value, name, child)) for name, child in ast.iter_fields(value)]
        inside = ",".join(f"{name}={_canonical(child)}" for name, child in fields if child is not None and child != [])
        return f"{type(value).__name__}({inside})"
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return repr(value)


def _without_docstring(node: ast.AST, name: str, child: Any) -> Any:
    has_one = name == "body" and isinstance(node, _DEFINITION)
    if has_one and ast.get_docstring(node, clean=False) is not None:
        return child[1:]
    return child
