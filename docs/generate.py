"""Regenerate the documentation: drawings, whole pages, and the marked blocks of the other pages.

    python docs/generate.py            rewrite them
    python docs/generate.py --check    compare them with what the code gives now; exit status 1 if they differ

A block stands between ``<!-- generated: NAME ARGUMENTS -->`` and ``<!-- end -->``; ``blocks.py`` makes it.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import blocks
import papers_page
import wins_page

DOCS = Path(__file__).parent
_IMAGES = DOCS / "images"
_BLOCK = re.compile(r"<!-- generated: (.+?) -->\n(.*?)<!-- end -->", re.DOTALL)
_DRAWN_WITH = re.compile(r"Matplotlib v([^, ]+)")


def filled(page: str) -> str:
    """The text of a page with fresh blocks.

    Raises:
        ValueError: for an unknown block.
    """
    return _BLOCK.sub(lambda match: f"<!-- generated: {match[1]} -->\n{blocks.make(match[1])}\n<!-- end -->", page)


def stale_pages() -> dict[str, str]:
    """Pages that differ from what the code gives now, with the lines that do."""
    stale = {}
    for page, old, new in _renewed():
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), "the page", "the code", n=0, lineterm="")
        stale[page.relative_to(DOCS.parent).as_posix()] = "\n".join(lines)
    return stale


def stale_drawings() -> tuple[list[str], str]:
    """Missing or outdated drawings, and the reason if they could not be compared.

    Matplotlib's output depends on its version, so drawings are compared only with the version that drew them.
    """
    missing = [name for name in blocks.DRAWINGS if not (_IMAGES / name).exists()]
    kept = {name: (_IMAGES / name).read_text() for name in blocks.DRAWINGS if name not in missing}
    drew, installed = {x[1] for text in kept.values() if (x := _DRAWN_WITH.search(text))}, version("matplotlib")
    if drew != {installed}:
        reason = f"drawings not compared: drawn by matplotlib {', '.join(sorted(drew))}, installed is {installed}"
        return missing, reason
    with tempfile.TemporaryDirectory() as folder:
        for name in kept:
            Path(folder, name).parent.mkdir(exist_ok=True)
            blocks.DRAWINGS[name](Path(folder, name))
        return missing + [name for name, text in kept.items() if Path(folder, name).read_text() != text], ""


def write() -> None:
    """Rewrite all pages and drawings."""
    for name, draw in blocks.DRAWINGS.items():
        draw(_IMAGES / name)
        print(f"drew {name}")
    for path, text in _whole().items():
        path.write_text(text)
        print(f"wrote {path.name}")
    for page, _, new in _renewed():
        page.write_text(new)
        print(f"rewrote {page.relative_to(DOCS.parent)}")


def _whole() -> dict[Path, str]:
    """Pages and records that are generated as a whole, and that blocks quote."""
    return papers_page.files() | wins_page.files()


def main() -> int:
    parser = argparse.ArgumentParser(description="Regenerate the documentation.")
    parser.add_argument("--check", action="store_true", help="only compare; exit status 1 if anything differs")
    if not parser.parse_args().check:
        write()
        return 0
    drawings, reason = stale_drawings()
    if reason:
        print(reason)
    pages = stale_pages()
    for lines in pages.values():
        print(lines)
    stale = [*pages, *drawings, *(path.name for path, text in _whole().items() if path.read_text() != text)]
    print(f"stale: {', '.join(stale)}; run python docs/generate.py" if stale else "the documentation is up to date")
    return 1 if stale else 0


def _renewed() -> Iterator[tuple[Path, str, str]]:
    """Pages whose blocks differ from what the code gives now, with their old and new text."""
    for page in (DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))):
        text = page.read_text()
        if (new := filled(text)) != text:
            yield page, text, new


if __name__ == "__main__":
    sys.exit(main())
