"""Shared by all tests."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from equipment.nccl import lazy
from hypothesis import settings
from nightly import thin

gc.set_threshold(100_000, 20, 100)  # torch and Megatron make a million objects: a full collection takes 0.3 s
torch.set_num_threads(1)  # ranks are forked from this process, and OpenMP's pool does not survive a fork

settings.register_profile("busy", deadline=None)  # a slow machine does not make an example fail
settings.load_profile("busy")
lazy.switch_on()  # a group's first operation waits for all of its ranks, as on NCCL (CP_PLUGIN_TEST_LAZY_GROUPS=0: off)

LONGEST_FIRST = (
    "planner/test_wins.py",
    "core/test_methods.py",
    "core/test_bytes.py",
    "megatron/test_cases.py",
    "test_quickstart.py",
    "test_gpu_check.py",
    "test_gpu_plan.py",
    "megatron/test_examples_megatron.py",
    "megatron/test_planted_faults.py",
    "megatron/test_fp8.py",
    "megatron/test_generate.py",
    "megatron/test_decoding.py",
    "test_printed_commands.py",
    "test_docs.py",
    "test_parity_cases.py",
)
"""Files that take longest: started last, they would leave the other processes idle at the end."""


LEFT_OUT = pytest.StashKey[dict[tuple[str, str], int]]()
"""Number of cases that this suite leaves out, by test and reason."""

CRASHED = pytest.StashKey[bool]()
"""Whether a worker of pytest-xdist ended with an error, which behind its last test leaves pytest's status at 0."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "case: a row of cases.toml")
    config.addinivalue_line("markers", "versions: a row that ci/versions.sh runs")
    config.addinivalue_line("markers", "covering(by day, at night): run a covering design of the cases (nightly.py)")
    config.stash[LEFT_OUT] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin the products, and put the longest files first; the rest stay in order."""
    config.stash[LEFT_OUT] = thin(items)
    here = Path(__file__).parent
    place = {here / name: index for index, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash.get(CRASHED, False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist
        session.config.workeroutput["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if error:
        node.config.stash[CRASHED] = True
    if hasattr(node, "workeroutput"):  # absent where it crashed
        node.config.stash[LEFT_OUT] = node.workeroutput["left_out"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for (test, reason), number in config.stash[LEFT_OUT].items():
        terminalreporter.write_line(f"LEFT OUT [{number}] {test}: {reason}")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a script of ci or docs, such as ``ci/perf/ratios``; afterwards its folder's modules are forgotten."""
    folders: list[Path] = []

    def load(path: str) -> ModuleType:
        file = Path(__file__).parents[1] / path
        folders.append(file.parent)
        monkeypatch.syspath_prepend(str(file.parent))
        sys.modules.pop(file.name, None)  # another folder's
        return import_module(file.name)

    yield load
    for path in (path for folder in folders for path in folder.glob("*.py")):
        sys.modules.pop(path.stem, None)
