"""Megatron's compiled dataset helper: a checkout builds it with ``make`` on the first rank, and exits if that fails.

The Makefile asks whatever ``python3`` is first on the path for pybind11, which is that of the environment only where it
has been activated.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path


def prepare() -> None:
    """Let the Makefile find this environment's Python, if it will be run on this rank.

    Raises:
        ModuleNotFoundError: if neither this Python nor the first on the path has pybind11.
    """
    if os.environ.get("RANK", "0") != "0" or not _to_be_compiled():
        return
    if find_spec("pybind11") is not None:
        os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
        return
    python = shutil.which("python3")
    if python is None or subprocess.run([python, "-m", "pybind11", "--includes"], capture_output=True).returncode != 0:
        raise ModuleNotFoundError(
            "Megatron compiles its dataset helper at the first start, for which pybind11 is missing: "
            f"{sys.executable} -m pip install pybind11",
            name="pybind11",
        )


def _to_be_compiled() -> bool:
    """Whether the Megatron that will be imported has the helper's source and Makefile, and not its result."""
    megatron = find_spec("megatron")
    for root in megatron.submodule_search_locations or () if megatron is not None else ():
        folder = Path(root, "core", "datasets")
        if folder.is_dir():
            built = any((folder / f"helpers_cpp{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
            return (folder / "Makefile").exists() and not built
    return False
