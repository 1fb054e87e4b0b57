"""In headless Chromium, on a desktop and a phone, in both colour schemes: nothing is too wide, split, cut or too small.

The package ``chromium`` of the system is enough: see ``browser.py``.
"""

from __future__ import annotations

import logging
from pathlib import Path

import browser
import pytest
from nightly import ALL

ROOT = Path(__file__).parent.parent
WIDTHS, SCHEMES = (1440, 390), ("default", "slate")
SMALLEST = 11
"""Pixels of the words of a picture, as shown."""
VISITED = (
    "index.html",
    "install.html",
    "choose.html",
    "wins.html",
    "methods/attention2d.html",
    "methods/needed.html",
    "troubleshooting.html",
    "results.html",
    "support.html",
    "papers.html",
)
PICTURES = sorted((ROOT / "docs" / "images").rglob("*.svg"))

in_browser = pytest.mark.skipif(browser.program() is None, reason=f"not installed: {' or '.join(browser.PROGRAMS)}")


@in_browser
def test_pages_on_a_desktop_and_a_phone(tmp_path: Path) -> None:
    """By day those most visited, by night all."""
    mkdocs = pytest.importorskip("mkdocs.config", reason="mkdocs-material is not installed: pip install cp-plugin[dev]")
    from mkdocs.commands.build import build

    site = tmp_path / "site"
    logging.getLogger("mkdocs").setLevel(logging.ERROR)
    build(mkdocs.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site)))
    every = [path.relative_to(site).as_posix() for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    pages = every if ALL else [*VISITED]
    assert set(VISITED) <= set(every)
    found = browser.measured(site, pages, WIDTHS, SCHEMES, tmp_path / "chromium")
    assert len(found) == len(pages) * len(WIDTHS) * len(SCHEMES)
    assert [trouble for one in found for trouble in browser.troubles(one, SMALLEST)] == []
    assert len({one["paper"] for one in found}) == len(SCHEMES)
    assert any(one["pictures"] for one in found)


_PAGE = """<!doctype html><html><head><style>body {{ margin: 0 }} code {{ font: 14px monospace }}</style></head>
<body><div class="md-content">{0}</div></body></html>"""
_PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 100">
<text x="{x}" y="50" style="font-size: {size}px">some words</text></svg>"""


@in_browser
@pytest.mark.parametrize(
    ("content", "picture", "trouble"),
    [
        ("<p>short</p>", {}, None),
        ("<pre style='width: 900px'>a</pre>", {}, "too wide"),
        ("<table style='width: 900px'><tr><td>a</td></tr></table>", {}, "too wide"),
        (
            "<table><tr><td style='width: 60px; word-break: break-all'><code>contiguous</code></td></tr></table>",
            {},
            "split",
        ),
        ("<img src='x.svg' style='width: 358px'>", {"x": 10, "size": 14}, None),
        ("<img src='x.svg' style='width: 358px'>", {"x": 10, "size": 5}, "too small"),
        ("<img src='x.svg' style='width: 358px'>", {"x": 370, "size": 14}, "cut"),
    ],
)
def test_what_is_wrong_is_found(content: str, picture: dict[str, int], trouble: str | None, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "x.html").write_text(_PAGE.format(content))
    (site / "x.svg").write_text(_PICTURE.format(**{"x": 0, "size": 14} | picture))
    (one,) = browser.measured(site, ["x.html"], (390,), ("default",), tmp_path / "chromium")
    found = browser.troubles(one, SMALLEST)
    assert (found == []) if trouble is None else any(trouble in text for text in found), found


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_pictures_suit_a_dark_page(picture: Path) -> None:
    """No white paper, and words that turn pale, unless they are on boxes of their own."""
    text = picture.read_text()
    assert "prefers-color-scheme: dark" in text or picture.stem == "layers"
    assert 'fill="white"' not in text and "fill: #ffffff; " not in text.partition('<g id="axes_1">')[0]


def test_there_are_no_pictures_that_cannot_be_measured() -> None:
    assert [path.name for path in (ROOT / "docs").rglob("*.png")] == []
