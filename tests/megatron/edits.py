"""Edits of Megatron as forks and later versions make them (``edits.toml``), applied to the Megatron of this process.

A function whose text an edit changes gets the code, the defaults and the place of its edited definition: whoever holds
it, under whatever name, has the edited one, as if its file had been edited before Megatron was imported. Definitions,
imports and assignments that an edit adds are executed in their module. Edited files go to a folder of their own, where
``inspect`` finds their source.
"""

from __future__ import annotations

import ast
import importlib
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

SCRIPT = "script"
FILE = Path(__file__).with_name("edits.toml")


@dataclass(frozen=True, slots=True)
class Change:
    """One text of a file, and what stands there instead."""

    file: str  # under megatron/; "script": the plugin's own, in place of a user's
    old: str
    new: str
    everywhere: bool = False  # a name that is changed wherever it occurs


@dataclass(frozen=True, slots=True)
class Edit:
    """One entry of ``edits.toml``."""

    name: str
    changes: tuple[Change, ...]
    flags: str  # of a run that it matters to
    refusal: str = ""  # its pattern; empty: it is harmless
    of_itself: bool = False  # whether it changes losses, with the self-check and without


def read() -> list[Edit]:
    """All edits."""
    entries = tomllib.loads(FILE.read_text(encoding="utf-8"))
    edits = []
    for entry in (*entries.get("harmless", ()), *entries.get("harmful", ())):
        names = ("file", "old", "new", "everywhere")
        parts = [{name: entry.pop(name) for name in names if name in entry}, *entry.pop("also", ())]
        flags = entries["runs"][entry.pop("run", "gpt")]
        edits.append(Edit(changes=tuple(Change(**part) for part in parts), flags=flags, **entry))
    return edits


def texts(edit: Edit, root: Path) -> dict[str, tuple[str, str]]:
    """File -> its text, and the edited one.

    Args:
        root: of a ``megatron`` package.

    Raises:
        ValueError: for an old text that does not occur exactly once.
    """
    edited: dict[str, tuple[str, str]] = {}
    for change in edit.changes:
        file = Path(str(_module(SCRIPT).__file__)) if change.file == SCRIPT else root / change.file
        old = file.read_text(encoding="utf-8")
        old, new = edited.get(change.file, (old, old))
        if (times := new.count(change.old)) != 1 and not (change.everywhere and times):
            raise ValueError(f"{edit.name}: {change.file} has {change.old!r} {times} times, needed exactly once")
        edited[change.file] = old, new.replace(change.old, change.new)
    return edited


def apply(edit: Edit, folder: Path) -> None:
    """Edit the Megatron of this process.

    folder: for the edited files.
    """
    for file, (old, new) in texts(edit, installed()).items():
        path = folder / "megatron" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(new, encoding="utf-8")
        _take(_module(file), old, new, path)


def installed() -> Path:
    """The ``megatron`` package of this process."""
    return Path(str(sys.modules["megatron.core"].__file__)).parents[1]


def _module(file: str) -> ModuleType:
    name = "cp_plugin.megatron.models.gpt" if file == SCRIPT else f"megatron.{file.removesuffix('.py')}"
    return importlib.import_module(name.replace("/", "."))


def _take(module: ModuleType, old: str, new: str, path: Path) -> None:
    before, after = (dict(_definitions(ast.parse(text))) for text in (old, new))
    segments = {name: ast.get_source_segment(old, node) for name, node in before.items()}
    known = {ast.unparse(node) for node in ast.parse(old).body}
    codes = {code.co_qualname: code for code in _codes(compile(new, path, "exec"))}
    for node in ast.parse(new).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in vars(module):
            continue
        if ast.unparse(node) not in known:
            exec(compile(ast.Module([node], []), path, "exec"), vars(module))
    changed = 0
    for name, node in after.items():
        if name not in before or ast.get_source_segment(new, node) == segments[name]:
            continue
        function = _function(module, name)
        function.__code__ = codes[name]
        defaults, keywords = node.args.defaults, node.args.kw_defaults
        function.__defaults__ = tuple(_value(one, module) for one in defaults) or None
        names = [one.arg for one in node.args.kwonlyargs]
        pairs = zip(names, keywords, strict=True)
        function.__kwdefaults__ = {key: _value(one, module) for key, one in pairs if one is not None} or None
        changed += 1
    for name in after.keys() - before.keys():
        owner, _, method = name.rpartition(".")
        if owner and method not in vars(vars(module)[owner]):
            setattr(vars(module)[owner], method, FunctionType(codes[name], vars(module)))
    assert changed or after.keys() - before.keys(), f"{path}: this edit changes no function"
    module.__file__ = str(path)


def _definitions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods by their qualified names, but none that are inside of functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield inside + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{inside}{node.name}.")
        elif not isinstance(node, ast.expr):  # an `if`, a `try`
            yield from _definitions(node, inside)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _codes(one)


def _function(module: ModuleType, name: str) -> FunctionType:
    """The function itself, without what is around it."""
    holder: Any = module
    for part in name.split("."):
        holder = vars(holder)[part]
    holder = getattr(holder, "fget", None) or getattr(holder, "__func__", holder)
    while not (isinstance(holder, FunctionType) and holder.__code__.co_qualname == name):
        holder = holder.__wrapped__
    return holder


def _value(node: ast.expr, module: ModuleType) -> Any:
    return eval(compile(ast.Expression(node), "<default>", "eval"), vars(module))
