"""mkdocs hook: rewrites links that leave ``docs/``, adds pages of messages, and renders folded parts.

On a code host ``[moves.py](../cp_plugin/engine/methods/moves.py)`` leads to the file. The site has none: there it
leads into the public repository, if ``mkdocs.yml`` names one, and is plain text otherwise. Inside ``<details>`` a code
host reads Markdown, but mkdocs only if told to.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

import messages

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?!https?:|mailto:|#)[^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(?<!</span>)(?<!<pre>)<code>([^<]+)</code>")
_SHORT = 32
"""Characters that fit the line of a phone."""
_LONG_CELL = re.compile(r"<td>(?=(?:(?!</td>).){40})")
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages of messages."""
    from mkdocs.structure.files import File

    for name, text in messages.pages().items():
        files.append(File.generated(config, f"messages/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite a page's Markdown; the search puts the page on installing first."""
    if page.file.src_uri == "install.md":
        page.meta["search"] = {"boost": 4}
    return rewritten(markdown, page.file.src_uri, config["repo_url"])


def on_page_content(html: str, **_: Any) -> str:
    """Mark long cells, and short words of code, which are not broken at their hyphens."""

    def marked(match: re.Match[str]) -> str:
        words = (f'<span class="short">{word}</span>' if len(word) <= _SHORT else word for word in match[1].split())
        return f"<code>{' '.join(words)}</code>"

    return _CODE.sub(marked, _LONG_CELL.sub('<td class="long">', html))


def rewritten(markdown: str, page: str, repo_url: str | None) -> str:
    """The Markdown with the site's links and folded parts.

    Args:
        page: path of the page on the site.
        repo_url: address of the public repository, if there is one.
    """
    source, pages = f"docs/{page}", {"cp_plugin/megatron/rules": "messages/refused.md"}

    def replace(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in pages or (path.startswith("docs/") and not path.endswith(".py")):
            on_site = pages.get(path, path.removeprefix("docs/"))
            return f"[{text}]({posixpath.relpath(on_site, posixpath.dirname(page) or '.')}{anchor})"
        return text if not repo_url else f"[{text}]({repo_url.rstrip('/')}/blob/main/{path}{anchor})"

    def outside(part: str) -> str:
        return _LINK.sub(replace, part.replace("<details>", '<details markdown="1">'))

    return "".join(part if i % 2 else outside(part) for i, part in enumerate(_FENCE.split(markdown)))
