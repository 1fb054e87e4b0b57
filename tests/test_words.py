"""The documentation stays short enough to be read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "examples", "patches", "ci", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
ALL, PAGE, README = 60_000, 2_500, 700


def words(text: str) -> int:
    """Of Markdown: whatever has a letter or a digit, in code and tables too."""
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def test_the_readme_has_two_screens() -> None:
    assert words((ROOT / "README.md").read_text()) <= README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_can_be_read(page: Path) -> None:
    assert words(page.read_text()) <= PAGE, "split it, or move evidence into a record"


def test_pages_of_messages_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site has them beside those of the repository."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import messages

    assert {name: n for name, text in messages.pages().items() if (n := words(text)) > PAGE} == {}
    sys.modules.pop("messages")


def test_all_pages_together() -> None:
    found = {page.relative_to(ROOT).as_posix(): words(page.read_text()) for page in PAGES}
    longest = sorted(found.items(), key=lambda item: -item[1])[:5]
    assert sum(found.values()) <= ALL, f"the longest: {longest}"
