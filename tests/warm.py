"""What is forked from a process that has imported Megatron: what each would do again is done before."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BESIDE_MEGATRON = {
    *("_pytest", "hypothesis", "cuda", "tensorboard", "rich", "google", "setuptools", "distutils", "yaml", "packaging"),
    *("pygments", "more_itertools", "psutil", "absl", "fsspec", "pluggy", "pydantic", "matplotlib", "PIL", "tqdm"),
}
"""Libraries of which no module holds a symbol of Megatron: half of what each rank would look through."""


@contextmanager
def cpu_mode() -> Iterator[None]:
    """CPU mode in the block."""
    from cp_plugin.megatron.cpu import mode

    mode.activate()
    try:
        yield
    finally:
        mode.deactivate()


@functools.cache
def warm_up() -> None:
    """Import what a training run imports late, read sources once, and make Megatron's mock data smaller.

    Megatron takes the help of its flags from its own source, 42 times in the start of a rank and a third of its time;
    the plugin looks for who holds what it replaces, for which every library beside Megatron is passed over here.
    Shuffling the mock data, 100,000 documents of which a test reads a few, took a fifth of the rest; all flags are
    parsed once more to look for a single one. All of this holds for this process and those that are forked from it. To
    be called in CPU mode where there is no GPU.
    """
    with warnings.catch_warnings(action="ignore"):  # an experimental part of Megatron, which it imports in any case
        for module in ("megatron.core.models.mimo", "megatron.core.tokenizers.text.libraries", "torch._dynamo"):
            importlib.import_module(module)
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
    from megatron.training import ft_integration
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    from cp_plugin.megatron.patches import patching

    read, known = ArgumentGroupFactory._get_field_docstrings, {}

    def read_once(factory: ArgumentGroupFactory, config: type) -> dict[str, str]:
        if config not in known:
            known[config] = read(factory, config)
        return known[config]

    ArgumentGroupFactory._get_field_docstrings = read_once
    tolerate_faults = ft_integration.setup
    ft_integration.setup = lambda: tolerate_faults() if "--enable-ft-package" in sys.argv else None
    MockGPTLowLevelDataset.size = 1000
    patching._WITHOUT_MEGATRON |= BESIDE_MEGATRON
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def read_no_sources() -> None:
    """Leave out help texts of flags, for which each rank of Megatron would read its sources."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    ArgumentGroupFactory._get_field_docstrings = lambda self, source: {}


def megatrons_own_data() -> None:
    """Megatron's mock data as they are, for what was recorded of them."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 100_000


def _program(command: Callable[[], object]) -> int:
    """The exit status of a program that does this: the number that it returns, if it does."""
    try:
        status = command()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return status if isinstance(status, int) else 0


def fork(command: Callable[[], object], out: int, err: int, limit: int = 0) -> int:
    """The process id of a fork that does this as a program of its own; out, err: where it writes to."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(limit)
            os.dup2(out, 1)
            os.dup2(err, 2)
            sys.stdout, sys.stderr = (os.fdopen(end, "w", buffering=1, closefd=False) for end in (1, 2))
            status = _program(command)
        finally:
            sys.stdout.flush()
            os._exit(status)
    return pid


class Forked:
    """As ``subprocess.Popen``, for ``python -m cp_plugin...``, without importing it all again; errors are in stdout."""

    def __init__(self, command: list[str], **_: Any) -> None:
        python, option, module, *words = command
        assert (python, option) == (sys.executable, "-m") and module.startswith("cp_plugin.")

        def program() -> object:
            os.environ["OMP_NUM_THREADS"] = "1"
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.argv = [module, *words]
            sys.modules.pop(module, None)
            return runpy.run_module(module, run_name="__main__", alter_sys=True)

        self.returncode = -1
        reading, writing = os.pipe()
        self.pid = fork(program, writing, writing)
        os.close(writing)
        self.stdout = os.fdopen(reading)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def run_forked(command: Callable[[], object], limit: int = 300) -> subprocess.CompletedProcess[str]:
    """What ``command`` prints, and its exit status, as of a program of its own that need not import Megatron again.

    limit: seconds after which it is killed.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = fork(command, out.fileno(), err.fileno(), limit)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess((), status, out.read(), err.read())


def python(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What ``python -c text`` does in ``folder``, in a fork of this process: modules of the folder come first."""

    def program() -> None:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)  # of another folder
        exec(text, {"__name__": "__main__"})

    return run_forked(program)
