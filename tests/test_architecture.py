"""What may know what, and what an import must not do. The layers themselves are import-linter's (pyproject.toml)."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys

import pytest
from package_sources import PACKAGE, SOURCES

from cp_plugin import renamed

KERNELS = PACKAGE.parent / "kernels" / "cp_kernels"


def imports(source: str) -> set[str]:
    """The modules a source file imports, anywhere in it."""
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


def test_only_the_adapter_imports_megatron() -> None:
    assert {name for name in importers("megatron") if not name.startswith(("megatron/", "nemo/"))} == set()


def test_layouts_tiles_and_kernels_know_no_process_groups() -> None:
    knowing = importers("torch.distributed")
    unaware = ("core/layout", "core/tiles", "core/mask", "kernels/", "linear/", "methods/")
    assert not {name for name in knowing if name.startswith(unaware)}


@pytest.mark.parametrize("library", ["transformer_engine", "flash_attn", "apex"])
def test_optional_libraries_stay_in_their_adapters(library: str) -> None:
    assert not {
        name
        for name in importers(library)
        if not name.startswith(("kernels/backends/", "cli/bench/te_peer", "megatron/", "nemo/"))
    }


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


def test_files_can_be_read_in_one_go() -> None:
    long = {name: lines for name, source in SOURCES.items() if (lines := source.count("\n")) > 400}
    assert not long


def test_the_command_line_is_frozen() -> None:
    from cp_plugin.cli.app import app

    assert {command.callback.__name__ for command in app.registered_commands} == {
        "bench",
        "calibrate",
        "dataset",
        "doctor",
        "draw",
        "example",
        "explain",
        "generate",
        "plan",
        "traffic",
        "verify",
    }


@pytest.mark.parametrize("old", sorted(renamed.MODULES))
def test_old_names_stay_valid(old: str) -> None:
    """And lead to the very same module, which keeps its new name, and what is inside of it."""
    now = importlib.import_module(renamed.MODULES[old])
    assert importlib.import_module(old) is now and now.__spec__ is not None
    assert now.__spec__.name == now.__name__ == renamed.MODULES[old]


def test_what_is_inside_of_a_renamed_package_is_not_loaded_twice() -> None:
    assert importlib.import_module("cp_plugin.mesh.group") is importlib.import_module("cp_plugin.comm.group")
