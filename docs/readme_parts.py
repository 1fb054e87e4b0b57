"""Parts of the README on pages: sections, tables and fenced blocks, word for word, with links as from ``docs/``."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def section(*words: str) -> str:
    """The text below a heading, up to the next one of its level or above, without what is generated in it.

    Raises:
        ValueError: if there is no such heading.
    """
    title = " ".join(words)
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*)", _readme(), re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError(f"the README has no heading {title!r}")
    text = re.split(rf"^#{{1,{len(found[1])}}} ", _without_fences(found[2]), maxsplit=1, flags=re.MULTILINE)[0]
    return _as_seen_from_docs(found[2][: len(text)])


def fence(*words: str) -> str:
    """The first fenced block that has these words.

    Raises:
        ValueError: if none has.
    """
    wanted = " ".join(words)
    for block in _FENCE.findall(_readme()):
        if wanted in block:
            return block
    raise ValueError(f"the README has no block with {wanted!r}")


def table(*words: str) -> str:
    """The first table that has these words.

    Raises:
        ValueError: if none has.
    """
    wanted = " ".join(words)
    for block in re.findall(r"(?:^\|.*\n)+", _readme(), re.MULTILINE):
        if wanted in block:
            return _as_seen_from_docs(block)
    raise ValueError(f"the README has no table with {wanted!r}")


def _readme() -> str:
    return (ROOT / "README.md").read_text()


def _without_fences(text: str) -> str:
    """The text with its fenced blocks blanked, of the same length: a comment in a shell block is no heading."""
    return _FENCE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def _as_seen_from_docs(text: str) -> str:
    def relative(found: re.Match[str]) -> str:
        target = found[1]
        return f"]({target.removeprefix('docs/')})" if target.startswith("docs/") else f"](../{target})"

    return _LINK.sub(relative, text)
