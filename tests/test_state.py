"""Mutable state lives in the adapter's one ``State`` and the few places explained here."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from package_sources import PACKAGE, SOURCES

EXPLAINED = {
    "core/options.py: _DECLARED": "names of all options, filled where they are declared",
    "megatron/state.py: STATE": "the one State",
    "attention/recompute.py: _local": "of the thread: autograd repeats a forward in threads of its own",
    "comm/threads.py: _idle": "threads that outlive a call, since libraries keep what they build per thread",
    "core/mask.py: _READ": "a cache of the numbers in a tensor, for as long as it lives unchanged",
    "core/spelling.py: _python": "of the context: how messages that are written inside it spell options",
    "core/layout.py: _orders": "a cache of what a function of its arguments returns, with a limit in bytes",
    "huggingface/layers.py: _running": "of the thread: whose layer runs, for functions that transformers calls",
    "huggingface/attention.py: _numbers": "names in the registry of transformers, which has no way to take one out",
    "kernels/blocks.py: _depths": "as ``_orders``: which keys of a tree are at which depth",
    "kernels/fused.py: _observer": "who watches the kernels of a traced method, in all of its threads",
    "megatron/micro_batch.py: _OF_PACKS": "what was read of a pack, for as long as it lives unchanged",
    "megatron/micro_batch.py: _OF_TENSORS": "as ``_OF_PACKS``, of the last bounds without one",
    "megatron/mixers/mamba.py: _kept": "a cache of what a function of its arguments returns, with a limit in bytes",
    "megatron/rules/rule.py: NAMES": "of all rules, filled where they are made",
    "megatron/selfcheck/step.py: _CALLS": "numbers of keys in the store, which are used once",
}
WRITES = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove"}
WRITES |= {"setdefault", "update", "__setitem__"}
STATEFUL = {"local", "count", "Recent", "State", "Watch", "Ledger", "WeakKeyDictionary", "WeakValueDictionary", "deque"}
STATEFUL |= {"defaultdict", "Counter", "ContextVar", "ExitStack", "Lock", "RLock", "Queue"}
"""Classes of objects that are there to be changed."""


def _globals(tree: ast.Module) -> dict[str, ast.expr | None]:
    """A module's top-level bindings."""
    found: dict[str, ast.expr | None] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node.value
    return found


def _class_of(value: ast.expr | None) -> str:
    if not isinstance(value, ast.Call):
        return ""
    called = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _changed(node: ast.AST) -> Iterator[ast.expr]:
    """What a piece of code changes in place."""
    match node:
        case ast.Subscript(value=owner, ctx=ast.Store() | ast.Del()):
            yield owner
        case ast.Attribute(value=owner, ctx=ast.Store() | ast.Del()):
            yield owner
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in WRITES:
            yield owner
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, *_]):
            yield owner


def mutable(source: str) -> set[str]:
    """Module-level names of a source file that are rebound, changed in place, or of a stateful class."""
    tree = ast.parse(source)
    bound = _globals(tree)
    found = {name for name, value in bound.items() if _class_of(value) in STATEFUL}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            parts = list(ast.walk(function))
            own = {n.id for n in parts if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            own |= {n.arg for n in parts if isinstance(n, ast.arg)}
            for node in parts:
                found |= set(node.names) if isinstance(node, ast.Global) else set()
                for owner in _changed(node):
                    if isinstance(owner, ast.Name) and owner.id in bound.keys() - own:
                        found.add(owner.id)
    return found


def modules_changed(source: str) -> set[str]:
    """What a source file sets or changes in the package's modules: ``module.name = ``, ``module.name.clear()``."""
    parts = list(ast.walk(ast.parse(source)))
    modules = {
        (alias.asname or alias.name).rpartition(".")[2]
        for node in parts
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cp_plugin")
        for alias in node.names
        if PACKAGE.parent.joinpath(*f"{node.module}.{alias.name}".split(".")).with_suffix(".py").exists()
    }
    modules -= {n.id for n in parts if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    modules -= {n.arg for n in parts if isinstance(n, ast.arg)}
    found = set()
    for node in parts:
        for owner in _changed(node):
            inside = isinstance(owner, ast.Attribute)  # else a function of the module may be called
            module = owner.value if inside else owner
            sets = isinstance(node, ast.Attribute) or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
            if isinstance(module, ast.Name) and module.id in modules and (inside or sets):
                found.add(ast.unparse(owner))
    return found


def test_state_is_in_one_object() -> None:
    found = {f"{file}: {name}" for file, source in SOURCES.items() for name in mutable(source)}
    assert found == set(EXPLAINED), found ^ set(EXPLAINED)
    assert {file: changed for file, source in SOURCES.items() if (changed := modules_changed(source))} == {}
