"""The site builds without a warning, loads nothing from other hosts, and its links lead where the pages' do."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from nightly import nightly
from site_links import rewritten

ROOT = Path(__file__).parents[2]
PAGES = [path.relative_to(ROOT / "docs") for path in sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The site, built."""
    mkdocs = pytest.importorskip("mkdocs.config", reason="mkdocs-material is not installed: pip install cp-plugin[dev]")
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install cp-plugin[dev]")
    from mkdocs.commands.build import build

    folder = tmp_path_factory.mktemp("site")
    logging.getLogger("mkdocs").setLevel(logging.WARNING)
    build(mkdocs.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    yield folder


@nightly
def test_every_page_is_on_it(site: Path) -> None:
    """As HTML: no Markdown is left in tables and lists."""
    for page in PAGES:
        built = page.with_name("index.html") if page.name == "README.md" else page.with_suffix(".html")
        html = (site / built).read_text()
        text = re.sub(r"<pre.*?</pre>|<code.*?</code>|<!--.*?-->|<script.*?</script>", "", html, flags=re.DOTALL)
        assert "|---" not in text and "```" not in text, page
    assert not list(site.rglob("*.py")) and not list(site.rglob("*.toml"))


@nightly
def test_messages_have_pages_that_the_search_finds(site: Path) -> None:
    """The link to the rules leads there."""
    index = (site / "search" / "search_index.json").read_text()
    assert "Messages: refused in some models and calls" in index
    assert 'href="messages/refused.html"' in (site / "troubleshooting.html").read_text()


@nightly
def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    """No script, style, font, picture or counter."""
    loads = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc="(https?:)?//|<link[^>]*\shref="(https?:)?//""")
    for page in site.rglob("*.html"):
        loaded = [tag[0] for tag in loads.finditer(page.read_text()) if 'rel="canonical"' not in tag[0]]
        assert loaded == [], page
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text() and "@import" not in style.read_text(), style


@pytest.mark.parametrize(
    ("page", "link", "repo_url", "expected"),
    [
        ("kernels.md", "[a](../cp_plugin/run.py)", None, "a"),
        ("kernels.md", "[a](../cp_plugin/run.py)", "https://x/y/", "[a](https://x/y/blob/main/cp_plugin/run.py)"),
        ("methods/ring.md", "[a](../../cp_plugin/run.py)", None, "a"),
        ("methods/ring.md", "[a](../kernels.md)", None, "[a](../kernels.md)"),
        ("index.md", "```\n[a](../b.py)\n```", None, "```\n[a](../b.py)\n```"),
    ],
)
def test_links_out_of_the_pages(page: str, link: str, repo_url: str | None, expected: str) -> None:
    assert rewritten(link, page, repo_url) == expected
