"""The site has every message that the plugin raises, and its examples raise theirs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

import messages  # noqa: E402

PACKAGE = ROOT / "cp_plugin"
LISTED = {file for group in messages.LISTED for file in messages.files_of(group)}
ADAPTER = {
    path.relative_to(PACKAGE).as_posix() for name in ("megatron", "methods") for path in (PACKAGE / name).rglob("*.py")
}
FILES = [
    *sorted(ADAPTER - LISTED),
    "cli/flags.py",
    "core/layout.py",
    "common/plugins.py",
    "generate.py",
    "kernels/backends/__init__.py",
    "kernels/blocks.py",
    "linear/kernels.py",
    "run.py",
    "testing/launch.py",
    "testing/machine.py",
    "testing/ranks.py",
]
"""Files of which every message has an entry."""
ENTRIES = [entry for entries in messages.chapters().values() for entry in entries]
TRIED = [entry for entry in ENTRIES if entry.example]


def test_every_message_has_an_entry() -> None:
    assert messages.uncovered(FILES) == []
    assert len(ENTRIES) >= 90 and len(TRIED) >= 24


def test_a_message_without_an_entry_is_noticed() -> None:
    assert "testing/machine.py" in FILES and messages.uncovered(["attention/api.py", "comm/group.py"])


def test_messages_without_entry_are_listed() -> None:
    page = messages.pages()["others"]
    for group in messages.LISTED:
        assert f"## {group}\n\n- `" in page and messages.listed(group) in page
    with pytest.raises(ValueError, match="no group 'others' of messages"):
        messages.listed("others")


def test_the_pages_have_every_chapter_and_every_rule() -> None:
    pages = messages.pages()
    assert all(messages.table(chapter) in pages[chapter] for chapter in messages.chapters())
    rules = {rule.name: rule for of_group in messages.RULES.values() for rule in of_group}
    shown = pages["refused"] + pages["refused-in-part"] + pages["adjusted"]
    assert shown.count("\n| `") == len(rules)


def test_every_entry_has_its_message_once() -> None:
    found = [(m.file, m.text) for m in (entry.message() for entry in (*ENTRIES, *messages.internal()))]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("has", "message"),
    [
        ("no such words at all", "0 texts of no file have 'no such words at all'"),
        ("cp_group must be provided", r"2 texts of megatron/patches/rope\.py have 'cp_group must be provided'"),
        ("<flag> <text>: ...", r"cli/bench/contestants\.py: '<flag> <text>: \.\.\.' fits too many messages"),
    ],
)
def test_an_entry_without_a_message_of_its_own_is_refused(has: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        messages.Entry(has=has, why="").message()


@pytest.mark.parametrize("entry", TRIED, ids=lambda entry: entry.example.removeprefix("--context-parallel-size 4 "))
def test_example_raises_its_message(validated: Callable[..., argparse.Namespace], entry: messages.Entry) -> None:
    with pytest.raises(ValueError) as raised:
        validated(entry.example)
    assert entry.message().pattern.fullmatch(str(raised.value)), str(raised.value)
