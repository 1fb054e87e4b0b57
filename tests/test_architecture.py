"""Import rules: adapters, cycles, side effects, file sizes. The layers are import-linter's (pyproject.toml)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest
from package_sources import PACKAGE, SOURCES

KERNELS = PACKAGE.parent / "kernels" / "cp_kernels"


@cache
def imports(source: str) -> set[str]:
    """The modules, and the names in them, that a source file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def importers(module: str) -> set[str]:
    return {
        name
        for name, source in SOURCES.items()
        if any(found == module or found.startswith(f"{module}.") for found in imports(source))
    }


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules among these that it imports. ``from package import module`` imports the module."""
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


def cycle(dependencies: dict[str, set[str]]) -> list[str]:
    """The modules of one import cycle, in order; empty: there is none."""
    try:
        TopologicalSorter(dependencies).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_import_cycles_even_lazy_ones() -> None:
    lazy = {"p": "", "p.a": "from p import b", "p.b": "def f():\n    from p.a import x", "p.c": "import p.a"}
    assert set(cycle(graph(lazy))) == {"p.a", "p.b"}
    assert cycle(graph({**lazy, "p.b": ""})) == []
    names = {file: f"cp_plugin.{file.removesuffix('.py').replace('/', '.')}" for file in SOURCES}
    package = graph({names[file].removesuffix(".__init__"): source for file, source in SOURCES.items()})
    assert len(package) > 200
    assert cycle(package) == []


def test_layouts_tiles_and_kernels_know_no_process_groups() -> None:
    unaware = ("core/layout", "core/tiles", "core/mask", "kernels/", "linear/", "methods/")
    assert not {name for name in importers("torch.distributed") if name.startswith(unaware)}


@pytest.mark.parametrize(
    ("library", "adapters"),
    [
        ("megatron", ("megatron/", "nemo/")),
        *(
            (library, ("kernels/backends/", "cli/bench/te_peer", "megatron/", "nemo/"))
            for library in ("transformer_engine", "flash_attn", "apex")
        ),
    ],
)
def test_optional_libraries_stay_in_their_adapters(library: str, adapters: tuple[str, ...]) -> None:
    assert not {name for name in importers(library) if not name.startswith(adapters)}


def test_our_kernels_need_torch_and_triton_alone() -> None:
    allowed = {"torch", "triton", "cp_kernels"} | set(sys.stdlib_module_names)
    found = {name.split(".")[0] for p in KERNELS.glob("*.py") for name in imports(p.read_text())}
    assert found <= allowed, found - allowed


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
    from cp_plugin.cli.app import Program

    commands = "bench calibrate dataset doctor draw example generate plan traffic verify"
    assert set(Program.modules) == set(commands.split())


def test_threads_are_started_in_one_place() -> None:
    """Which puts them on their starter's CUDA device."""
    made = re.compile(r"\b(Thread|Timer|ThreadPoolExecutor|start_new_thread)\(")
    sources = SOURCES | {f"kernels/{file.name}": file.read_text() for file in KERNELS.glob("*.py")}
    assert {name for name, source in sources.items() if made.search(source)} == {"common/background.py"}
