"""Measures pages and pictures of the site in headless Chromium, which needs no driver: the pages report by themselves.

One page of ours loads all others in a frame, at each width and in each colour scheme, and Chromium prints the result.
"""

from __future__ import annotations

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MEASURE = """
<iframe id="frame" style="border: 0"></iframe><pre id="found"></pre>
<script>
const frame = document.getElementById("frame"), found = [];
const load = (page, width) => new Promise(done => {
  frame.style.width = width + "px"; frame.style.height = "900px"; frame.onload = done; frame.src = page;
});
async function smallest(image) {  // words of an SVG: their least size, and what leaves it
  const text = await (await fetch(image.src)).text(), holder = document.createElement("div");
  holder.innerHTML = text.slice(text.indexOf("<svg")); document.body.append(holder);
  const svg = holder.querySelector("svg"), box = svg.viewBox.baseVal, scale = image.clientWidth / box.width;
  const frame = svg.getBoundingClientRect(), cut = [];
  let least = Infinity;
  for (const word of svg.querySelectorAll("text")) {
    const place = word.getBoundingClientRect();
    const shown = parseFloat(getComputedStyle(word).fontSize) * scale;
    if (!word.textContent.trim()) continue;
    least = Math.min(least, shown);
    const across = Math.max(frame.left - place.left, place.right - frame.right);
    if (Math.max(across, frame.top - place.top, place.bottom - frame.bottom) > 2) cut.push(word.textContent);
  }
  holder.remove();
  return {image: image.getAttribute("src"), least, cut};
}
async function measure(page, width, scheme) {
  await load(page, width);
  const view = frame.contentDocument, body = view.body;
  body.setAttribute("data-md-color-scheme", scheme);
  await new Promise(done => setTimeout(done, 30));
  const wide = view.documentElement.scrollWidth - width;
  const scrolls = part => part.closest("table")?.parentElement.matches(".md-typeset__table, .md-typeset__scrollwrap");
  const every = [...view.querySelectorAll(".md-content :is(table, pre, img, p)")];
  const parts = every.filter(part => !part.closest("pre *"));
  const wider = parts.filter(part => part.getBoundingClientRect().right > width + 1 && !scrolls(part));
  const outside = wider.map(part => part.outerHTML.slice(0, 80));
  const split = [...view.querySelectorAll("td code, th code")].filter(
    code => code.getClientRects().length > 1).map(code => code.textContent);
  const paper = getComputedStyle(body).backgroundColor;
  const pictures = [];
  const images = view.querySelectorAll(".md-content img[src$='.svg']");
  for (const image of images) pictures.push(await smallest(image));
  found.push({page, width, scheme, wide, outside, split, paper, pictures});
}
(async () => {
  for (const width of WIDTHS) for (const scheme of SCHEMES)
    for (const page of PAGES) await measure(page, width, scheme);
  document.getElementById("found").textContent = JSON.stringify(found); frame.remove();
  document.title = "measured";
})();
</script>
"""


def program() -> str | None:
    """Chromium, if it is installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def measured(
    site: Path, pages: Sequence[str], widths: Sequence[int], schemes: Sequence[str], folder: Path
) -> list[dict[str, Any]]:
    """What is too wide, split, cut or small, for each page, width and scheme.

    Args:
        site: the built site, into which a page for measuring is written.
        folder: an empty one, for Chromium.

    Raises:
        RuntimeError: if Chromium prints nothing.
    """
    asked = {"WIDTHS": widths, "SCHEMES": schemes, "PAGES": [f"/{page}" for page in pages]}
    constants = "".join(f"const {name} = {json.dumps(list(value))};" for name, value in asked.items())
    (site / "measure.html").write_text(f"<script>{constants}</script>{_MEASURE}")
    with _served(site) as address:
        command = [program() or PROGRAMS[0], "--headless", "--disable-gpu", "--no-sandbox", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}", "--window-size=1600,1200", "--virtual-time-budget=100000000"]
        done = subprocess.run(
            [*command, "--dump-dom", f"{address}/measure.html"], capture_output=True, text=True, timeout=500
        )
    printed = re.search(r'<pre id="found">(\[.*?\])</pre>', done.stdout, re.DOTALL)
    if printed is None:
        raise RuntimeError(f"Chromium measured nothing: {done.stderr[-2000:]}")
    found: list[dict[str, Any]] = json.loads(html.unescape(printed[1]))
    return found


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """The address of a folder, while it is served."""

    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Not printed."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def troubles(one: dict[str, Any], smallest: float) -> list[str]:
    """What is wrong with a measured page, in words; words of pictures have at least ``smallest`` pixels."""
    where = f"{one['page']} at {one['width']} px, {one['scheme']}"
    found = [f"{where}: the page is too wide by {one['wide']} px"] if one["wide"] > 0 else []
    found += [f"{where}: too wide: {part}" for part in one["outside"]]
    found += [f"{where}: split: {code}" for code in one["split"]]
    for picture in one["pictures"]:
        if picture["least"] is not None and picture["least"] < smallest:
            found.append(f"{where}: {picture['image']}: words of {picture['least']:.1f} px are too small")
        found += [f"{where}: {picture['image']}: cut: {words}" for words in picture["cut"]]
    return found
