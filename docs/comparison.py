"""Tables comparing providers in Markdown: traffic and work balance."""

from __future__ import annotations

import markdown_tables as markdown

from cp_plugin.engine.common.text import show_bytes
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods import registry as providers
from cp_plugin.testing.traffic import HEADS, priced, typical
from cp_plugin.tools.draw.calls import record

SIZES = (4, 8, 16, 32, 64, 128)
_TITLES = {kind: f"{kind} {heads}/{kv_heads}" for kind, (heads, kv_heads) in HEADS.items()}
_REFUSED = "refused"


def ratio_table(name: str) -> str:
    """Compare bytes with a ring's by number of ranks."""
    rows = [(title, *(_ratio(name, size, kind) for size in SIZES)) for kind, title in _TITLES.items()]
    return markdown.table(("heads", *(f"{size} ranks" for size in SIZES)), rows)


def methods_table() -> str:
    """All providers: summary, balance, and bytes relative to a ring on 8 and 64 ranks."""
    rows = []
    for name in providers.names():
        first = providers.get(name).layouts[0]
        even = f"{record(name, 8, seq_length=8192).balance():.2f}"
        ratios = [_ratio(name, size, kind) for size in (8, 64) for kind in HEADS]
        rows.append((f"[{name}]({name}.md)", *ratios, even, first, providers.get(name).summary))
    titles = [f"{size}: {kind}" for size in (8, 64) for kind in HEADS]
    return markdown.table(("provider", *titles, "busiest rank over mean", "default layout", "what it is"), rows)


def short_table() -> str:
    """List all providers: page and summary."""
    names = [*providers.names(), "lasp2", "zeco"]
    rows = [(f"[`{name}`](methods/{name}.md)", providers.get(name).summary) for name in names]
    return markdown.table(("provider", "method"), rows)


def head_axis_table() -> str:
    """Compare providers with head axes of several sizes on 64 ranks."""
    axes = (1, 2, 4, 8)
    same: dict[tuple[str, ...], list[str]] = {}
    for name in providers.names():
        for kind, title in _TITLES.items():
            cells = [_ratio(name, 64, kind, head_parallel=n) for n in axes]
            if set(cells) != {_REFUSED}:
                same.setdefault((title, *cells), []).append(name)
    rows = [(", ".join(names), *cells) for cells, names in same.items()]
    return markdown.table(("provider", "heads", *(f"`--cp-head-parallel {n}`" for n in axes)), rows)


def states_table() -> str:
    """Linear attention on 64 ranks: bytes of the busiest rank by sequence length."""
    lengths = (2**15, 2**17, 2**20)
    tried = [(n, lay, "none", False) for n in providers.names("linear") for lay in providers.get(n).layouts]
    tried += [("lasp2", layout, "key", delta) for layout in providers.get("lasp2").layouts for delta in (False, True)]
    tried += [("lasp1", layout, "key", True) for layout in providers.get("lasp1").layouts]
    rows = []
    for name, layout, decay, delta in sorted(tried, key=lambda t: (t[0] != "lasp2", t)):
        sent = []
        for length in lengths:
            p = Problem(size=64, heads=32, kv_heads=32, seq_length=length, decay=decay, delta=delta)
            settled = providers.settle(name, p, Options(layout=layout))
            ranks = (settled.provider.traffic(p, settled.options, i) for i in range(p.size))
            sent.append(show_bytes(max(sum(formula.values()) for formula in ranks)))
        rows.append((name, layout, f"{decay}, delta rule" if delta else decay, *sent))
    return markdown.table(("method", "tokens", "decay", *(f"{n} tokens" for n in lengths)), rows)


def _ratio(name: str, size: int, kind: str, **options: int) -> str:
    ratio = priced(name, typical(size, kind), **options).ratio
    return _REFUSED if ratio is None else f"{ratio:.2f}x"
