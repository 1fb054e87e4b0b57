"""Rules of the source: imports, cycles, side effects, sizes, versions. The layers are import-linter's."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
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

    commands = "bench calibrate dataset doctor draw example plan traffic verify"
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
