"""Shared by all tests."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
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

DURATIONS = Path(__file__).with_name("durations.json")
"""Test file -> its seconds, of files of 5 s or more, as ``pytest --record-durations`` measured them."""

LEFT_OUT = pytest.StashKey[dict[tuple[str, str], int]]()
"""Number of cases that this suite leaves out, by test and reason."""

CRASHED = pytest.StashKey[bool]()
"""Whether a worker of pytest-xdist ended with an error, which behind its last test leaves pytest's status at 0."""


class Recorded:
    """Writes ``DURATIONS`` at the end of the session."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0].removeprefix("tests/")] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        longest = {file: round(seconds) for file, seconds in self.seconds.most_common() if seconds >= 5}
        DURATIONS.write_text(json.dumps(longest, indent=0) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorded())
    config.addinivalue_line("markers", "case: a row of cases.toml")
    config.addinivalue_line("markers", "versions: a row that ci/versions.sh runs")
    config.addinivalue_line("markers", "covering(by day, at night): run a covering design of the cases (nightly.py)")
    config.stash[LEFT_OUT] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin the products, and put the longest files first, lest a process is left with one at the end."""
    config.stash[LEFT_OUT] = thin(items)
    seconds = {Path(__file__).parent / file: seconds for file, seconds in json.loads(DURATIONS.read_text()).items()}
    items.sort(key=lambda item: -seconds.get(item.path, 0))


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
    """Import a script of ci or docs, such as ``ci/gpu/plan``; afterwards its folder's modules are forgotten."""
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
