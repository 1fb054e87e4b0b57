"""Write what is generated in the documentation: drawings, and the blocks between markers in the pages.

    python docs/generate.py            rewrite them
    python docs/generate.py --check    compare them with what the code gives now; exit status 1 if they differ

A block is what stands between ``<!-- generated: NAME ARGUMENTS -->`` and ``<!-- end -->``; ``blocks.py`` makes it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Set
from pathlib import Path

sys.path += [
    str(Path(__file__).parents[1] / "ci" / folder) for folder in ("papers", "parity", "perf")
]  # evidence, support, placement

import beyond_page
import blocks
import examples_page
import layers
import measured_page
import papers_page
import wins_page

DOCS = Path(__file__).parent
_LAYERS = DOCS / "images" / "layers.svg"
_BLOCK = re.compile(r"<!-- generated: (.+?) -->\n(.*?)<!-- end -->", re.DOTALL)
_DRAWN_WITH = re.compile(r"Matplotlib v([^, ]+)")


def filled(page: str) -> str:
    """The text of a page with all its blocks made anew.

    Raises:
        ValueError: for a block that nothing makes.
    """
    return _BLOCK.sub(lambda found: f"<!-- generated: {found[1]} -->\n{blocks.make(found[1])}\n<!-- end -->", page)


def stale_pages(but: Set[str] = frozenset()) -> list[str]:
    """The pages that are not what the code gives now, without the blocks of these names."""
    compared = {p: _BLOCK.sub(lambda found: "" if found[1] in but else found[0], p.read_text()) for p in _pages()}
    return [p.relative_to(DOCS.parent).as_posix() for p, text in compared.items() if filled(text) != text]


def stale_drawings() -> tuple[list[str], str]:
    """The drawings that are missing or not what the code gives now, and why they were not compared, if so.

    Another version of matplotlib draws other files, so drawings are compared only with the version that drew them.
    """
    kept = {name: DOCS / "images" / "methods" / name for name in blocks.DRAWINGS}
    missing = [name for name, path in kept.items() if not path.exists()]
    drew = {found[1] for path in kept.values() if path.exists() and (found := _DRAWN_WITH.search(path.read_text()))}
    here = blocks.matplotlib_version()
    if drew != {here}:
        return missing, f"drawings not compared: matplotlib {', '.join(sorted(drew))} drew them, and {here} is here"
    with tempfile.TemporaryDirectory() as folder:
        fresh = {name: Path(folder) / name for name in kept if name not in missing}
        for name, path in fresh.items():
            blocks.DRAWINGS[name](path)
        return missing + [n for n, path in fresh.items() if path.read_bytes() != kept[n].read_bytes()], ""


def stale_layers() -> list[str]:
    """The drawing of the layers, if it is not that of the import contract now."""
    return [] if _LAYERS.exists() and _LAYERS.read_text() == layers.drawing() else ["docs/images/layers.svg"]


def write() -> None:
    """Rewrite all pages and drawings."""
    _LAYERS.write_text(layers.drawing())
    for name, draw in blocks.DRAWINGS.items():
        draw(DOCS / "images" / "methods" / name)
        print(f"drew {name}")
    for page in _pages():
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)
            print(f"rewrote {page.relative_to(DOCS.parent)}")
    papers_page.write()
    print("wrote papers.md and its pictures")
    measured_page.write()
    print("wrote measured.md and its pictures")
    wins_page.write()
    print("wrote wins.md")
    beyond_page.write()
    print("wrote beyond.md and its pictures")
    examples_page.write()


def main() -> int:
    parser = argparse.ArgumentParser(description="Write what is generated in the documentation.")
    parser.add_argument("--check", action="store_true", help="only compare; exit status 1 if anything differs")
    if not parser.parse_args().check:
        write()
        return 0
    drawings, reason = stale_drawings()
    if reason:
        print(reason)
    stale = stale_pages() + stale_layers() + drawings + papers_page.stale() + beyond_page.stale()
    stale += examples_page.stale() + measured_page.stale() + wins_page.stale()
    print(f"stale: {', '.join(stale)}; run python docs/generate.py" if stale else "the documentation is up to date")
    return 1 if stale else 0


def _pages() -> list[Path]:
    return [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]


if __name__ == "__main__":
    sys.exit(main())
