"""Rules of the source: imports, cycles, side effects, sizes, versions, words, state. The layers are import-linter's."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter

import grimp
import pytest
from changed import imported
from package_sources import PACKAGE, SOURCES

KERNELS = PACKAGE.parent / "kernels" / "cp_kernels"


@cache
def imports(source: str) -> set[str]:
    """The modules, and the names in them, that a source file imports anywhere."""
    return set(imported(ast.walk(ast.parse(source))))


def importers(module: str) -> set[str]:
    return {
        name
        for name, source in SOURCES.items()
        if any(used == module or used.startswith(f"{module}.") for used in imports(source))
    }


def test_no_import_cycles_even_lazy_ones() -> None:
    package = grimp.build_graph("cp_plugin", cache_dir=None)
    needed = {module: package.find_modules_directly_imported_by(module) for module in package.modules}
    assert len(needed) > 200
    TopologicalSorter(needed).prepare()  # its CycleError has the modules


def test_layouts_tiles_and_kernels_know_no_process_groups() -> None:
    unaware = (
        "engine/core/layout",
        "engine/core/tiles",
        "engine/core/mask",
        "engine/kernels/",
        "engine/linear/",
        "engine/methods/",
    )
    assert not {name for name in importers("torch.distributed") if name.startswith(unaware)}


@pytest.mark.parametrize(
    ("library", "adapters"),
    [
        ("megatron", ("megatron/", "nemo/")),
        *(
            (library, ("engine/kernels/backends/", "tools/bench/te_peer", "megatron/", "nemo/"))
            for library in ("transformer_engine", "flash_attn", "apex")
        ),
    ],
)
def test_optional_libraries_stay_in_their_adapters(library: str, adapters: tuple[str, ...]) -> None:
    assert not {name for name in importers(library) if not name.startswith(adapters)}


def test_our_kernels_need_torch_and_triton_alone() -> None:
    allowed = {"torch", "triton", "cp_kernels"} | set(sys.stdlib_module_names)
    libraries = {name.split(".")[0] for p in KERNELS.glob("*.py") for name in imports(p.read_text())}
    assert libraries <= allowed, libraries - allowed


def test_importing_the_package_has_no_side_effects() -> None:
    """No Megatron, no compiler, no CUDA, no environment, no output."""
    code = (
        "import os, sys; before = dict(os.environ); import torch; import cp_plugin\n"
        "optional = 'megatron', 'transformer_engine', 'matplotlib', 'modelopt', 'cp_kernels'\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in optional or m.startswith('torch._dynamo')]\n"
        "assert not torch.cuda.is_initialized() and dict(os.environ) == before"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "cp_plugin" not in done.stderr


def test_files_have_at_most_400_lines() -> None:
    assert not {name: lines for name, source in SOURCES.items() if (lines := source.count("\n")) > 400}


def test_the_command_line_is_frozen() -> None:
    from cp_plugin.tools.app import Program

    commands = "bench calibrate dataset doctor draw example generate plan traffic verify"
    assert set(Program.modules) == set(commands.split())


def test_threads_are_started_in_one_place() -> None:
    """Which puts them on their starter's CUDA device."""
    made = re.compile(r"\b(Thread|Timer|ThreadPoolExecutor|start_new_thread)\(")
    sources = SOURCES | {f"kernels/{file.name}": file.read_text() for file in KERNELS.glob("*.py")}
    assert {name for name, source in sources.items() if made.search(source)} == {"engine/common/background.py"}


ELSEWHERE = {
    "megatron/compat.py": "the one file",
    "engine/common/versions.py": "which versions are supported",
    "megatron/mixers/modelopt.py": "nvidia-modelopt's version",
}


def _from_megatron(tree: ast.AST) -> set[str]:
    return {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] == "megatron"
    }


def _named(node: ast.AST) -> set[str]:
    parts = list(ast.walk(node))
    return {n.id for n in parts if isinstance(n, ast.Name)} | {n.attr for n in parts if isinstance(n, ast.Attribute)}


def branches(source: str) -> list[str]:
    """The expressions of a source file that branch on a library's version."""
    tree = ast.parse(source)
    ours = _from_megatron(tree)
    expressions = []
    for node in ast.walk(tree):
        match node:
            case ast.Compare() if {"version_tuple", "megatron_version", "__version__"} & _named(node):
                expressions.append(ast.unparse(node))
            case ast.Compare(left=ast.Constant(value=str()), ops=[ast.In() | ast.NotIn()], comparators=[held]) if (
                "parameters" in _named(held)
            ):
                expressions.append(ast.unparse(node))
            case ast.Call(func=ast.Name(id="hasattr" | "getattr"), args=[owner, *others]) if (
                isinstance(owner, ast.Name) and owner.id in ours and (len(others) == 2 or node.func.id == "hasattr")
            ):
                expressions.append(ast.unparse(node))
            case ast.Try(body=body, handlers=handlers) if any(
                _named(h.type) & {"ImportError", "AttributeError", "ModuleNotFoundError"} for h in handlers if h.type
            ):
                expressions += [ast.unparse(line) for line in body if _from_megatron(line)]
    return expressions


def test_versions_are_asked_for_in_one_file() -> None:
    by_file = {
        file: lines
        for file, source in SOURCES.items()
        if file.startswith(("megatron/", "nemo/", "tools/", "engine/common/", "engine/core/"))
        and (lines := branches(source))
    }
    assert {file: lines for file, lines in by_file.items() if file not in ELSEWHERE} == {}
    assert set(ELSEWHERE) <= by_file.keys(), "no longer needed here"


FOREIGN = {
    "has no effect": r"(would|does|do) nothing (with|without)\b|would do nothing",
    "split (evenly) across": r"divide(s|d)? (the \w+ )?over\b",
    "training, or a training run": r"\b(a|an|each|every|this) training\b(?! (run|script|command|step))|\btrainings\b",
    "again": r"\banew\b",
    "in the same way": r"\balike\b",
    "next to": r"\bbeside\b(?!s)",
    "setting --flag": r"is switched on|are switched on",
    "terminating rank 3": r"is ended, since|says nothing",
    "forward or backward pass": r"\b(in|for|as) the (forward|backward)\b(?! (pass|of))",
    "forever": r"\bfor ever\b",
}
"""What to write -> what a translator writes."""


def told(source: str) -> Iterator[str]:
    """The texts of a module that may be shown: of three words or more, without docstrings and parts of f-strings."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    hidden = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    hidden |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden:
            text = node.value
        else:
            continue
        if text.count(" ") > 1:
            yield text


def foreign(text: str) -> list[str]:
    """What to write instead of each phrase found."""
    return [instead for instead, phrase in FOREIGN.items() if re.search(phrase, text)]


def test_no_message_is_translated() -> None:
    better_by_text = {text: better for source in SOURCES.values() for text in told(source) if (better := foreign(text))}
    assert better_by_text == {}


EXPLAINED = {
    "engine/core/options.py: _DECLARED": "names of all options, filled where they are declared",
    "megatron/state.py: STATE": "the one State",
    "engine/attention/recompute.py: _local": "of the thread: autograd repeats a forward pass in threads of its own",
    "engine/comm/threads.py: _idle": "threads that outlive a call, since libraries keep what they build per thread",
    "engine/core/mask.py: _READ": "a cache of the numbers in a tensor, for as long as it lives unchanged",
    "engine/core/spelling.py: _python": "of the context: how messages that are written inside it spell options",
    "engine/core/layout.py: _orders": "a cache of what a function of its arguments returns, with a limit in bytes",
    "huggingface/layers.py: _running": "of the thread: whose layer runs, for functions that transformers calls",
    "huggingface/attention.py: _numbers": "names in the registry of transformers, which has no way to take one out",
    "engine/kernels/blocks.py: _depths": "as ``_orders``: which keys of a tree are at which depth",
    "engine/kernels/fused.py: _observer": "who watches the kernels of a traced method, in all of its threads",
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
    bindings: dict[str, ast.expr | None] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            bindings |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bindings[node.target.id] = node.value
    return bindings


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
    names = {name for name, value in bound.items() if _class_of(value) in STATEFUL}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            parts = list(ast.walk(function))
            own = {n.id for n in parts if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            own |= {n.arg for n in parts if isinstance(n, ast.arg)}
            for node in parts:
                names |= set(node.names) if isinstance(node, ast.Global) else set()
                for owner in _changed(node):
                    if isinstance(owner, ast.Name) and owner.id in bound.keys() - own:
                        names.add(owner.id)
    return names


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
    changed = set()
    for node in parts:
        for owner in _changed(node):
            inside = isinstance(owner, ast.Attribute)  # else a function of the module may be called
            module = owner.value if inside else owner
            sets = isinstance(node, ast.Attribute) or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
            if isinstance(module, ast.Name) and module.id in modules and (inside or sets):
                changed.add(ast.unparse(owner))
    return changed


def test_state_is_in_one_object() -> None:
    """Mutable state lives in the adapter's one ``State`` and the few places explained here."""
    names = {f"{file}: {name}" for file, source in SOURCES.items() for name in mutable(source)}
    assert names == set(EXPLAINED), names ^ set(EXPLAINED)
    assert {file: changed for file, source in SOURCES.items() if (changed := modules_changed(source))} == {}
