"""The generated blocks of the pages, and the drawings. Everything comes from the code of the package."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import comparison
import flag_tables
import front_picture
import kernel_tables
import markdown_tables as markdown
import messages
import placement
import recorded_tables
import support
import wins_page
from evidence.regimes import CANONICAL, sentence

from cp_plugin.engine.common.text import show_option
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.linear.variants import variants
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.placement.documents import ALL
from cp_plugin.testing.traffic import priced
from cp_plugin.tools.draw.cli import draw_method

ROOT = Path(__file__).parent.parent
_SHOWN: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{name: (name, 4, {}) for name in providers.names()},
    "attention2d": ("attention2d", 4, {"grid": (2, 2)}),
    "burst": ("burst", 4, {"intra_size": 2}),
    "double_ring": ("double_ring", 4, {"intra_size": 2}),
    "usp": ("usp", 4, {"head_parallel": 2}),
    "ring-contiguous": ("ring", 4, {"layout": "contiguous"}),
    "head_axis": ("attention2d", 8, {"grid": (2, 2), "head_parallel": 2}),
}
"""Name of a drawing -> provider, ranks, options."""

DRAWINGS: dict[str, Callable[[Path], None]] = {
    **{
        f"methods/{name}.svg": partial(draw_method, provider=p, size=n, tokens=32, **o)
        for name, (p, n, o) in _SHOWN.items()
    },
    "methods/front.svg": front_picture.draw,
    "methods/documents.svg": partial(draw_method, provider="needed", bounds=front_picture.BOUNDS, layout="documents"),
}
"""Path in ``docs/images`` -> draw it to a path."""

_MORE = {
    "head_parallel": ", see [the head axis](head_axis.md)",
    "gradient_dtype": ", see [precision](../precision.md)",
}


@cache
def make(block: str) -> str:
    """The text of a block, by its name and arguments.

    Raises:
        ValueError: for an unknown block.
    """
    name, *arguments = block.split()
    if name not in _BLOCKS:
        raise ValueError(f"unknown block {block!r}: there are {', '.join(_BLOCKS)}")
    return _BLOCKS[name](*arguments).strip("\n")


def _source(path: str, *names: str) -> str:
    """Functions, classes or methods of a file, without their docstrings; or all of it."""
    source = (ROOT / path).read_text().strip()
    parts = [_without_docstring(source, name) for name in names] or [source]
    intro = "From" if names else "The whole file,"
    return f"{intro} [{path}](../../{path}):\n\n```python\n" + "\n\n\n".join(parts) + "\n```"


def _without_docstring(source: str, name: str) -> str:
    node: Any = ast.parse(source)
    for part in name.split("."):
        node = next(n for n in ast.walk(node) if getattr(n, "name", None) == part)
    lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
    if ast.get_docstring(node) is not None:
        start, end = node.body[0].lineno - node.lineno, node.body[0].end_lineno - node.lineno + 1
        del lines[start : end + (not lines[end].strip())]
    return textwrap.dedent("\n".join(lines))


def _sketch(path: str) -> str:
    """The drawing in a module's docstring: its first indented paragraphs."""
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    drawn = re.search(r"^    .*(?:\n+    .*)*", docstring, re.MULTILINE)
    return f"```\n{textwrap.dedent(drawn[0]) if drawn else ''}\n```"


def _drawing(name: str) -> str:
    provider, size, options = _SHOWN[name]
    chosen = " ".join(f"--{key.replace('_', '-')} {show_option(value)}" for key, value in options.items())
    command = f"cp-plugin draw --provider {provider} --plot {name}.svg --ranks {size} {chosen}".strip()
    return (
        f"![{provider} on {size} ranks: who holds which tokens, who computes which part of the attention matrix, and "
        f"the work of each step](../images/methods/{name}.svg)\n\n`{command}`"
    )


def _flags(name: str) -> str:
    provider = providers.get(name)
    layouts = f"{', '.join(provider.layouts)} (the first is the default)"
    rows = [("`--cp-layout`", layouts, "which tokens each rank holds")]
    for option in providers.registry().options.values():
        if option in provider.options or (option == "head_parallel" and providers.takes(provider, option)):
            words = ", ".join(f"`{word}`" for word in (option.unset, *option.choices))
            meaning = option.meaning + _MORE.get(option, "")
            rows.append((f"`{option.flag}`", words if option.choices else option.write, meaning))
    return markdown.table(("flag", "value", "meaning"), rows)


def _lengths(name: str) -> str:
    rules = {layout: ALL[layout].divisor(64) // 64 for layout in providers.get(name).layouts}
    lengths = ", ".join(f"{'P' if n == 1 else f'{n}P'} ({layout})" for layout, n in rules.items())
    return f"On P ranks the sequence length must be a multiple of {lengths}."


def _placed() -> str:
    """For four packs of each kind; ``tests/engine/placement/test_placement.py`` takes sixteen."""
    rows = []
    for r in placement.measured(4):
        sides = (([p.balance for p in of], r.bytes(of)) for of in (r.zigzag, r.placed))
        rows.append((r.kind, r.size, *(f"{mean(x):.2f} ({max(x):.2f})" for side in sides for x in side)))
    head = ("pack", "ranks", "zigzag: work, max over mean", "bytes over a ring's", "placed: work", "bytes")
    return markdown.table(head, rows)


def _variants() -> str:
    rows = [
        (f"`{v.name}`", v.summary, v.features, v.decay, "yes" if v.normalised else "no", v.norm)
        for v in variants().values()
    ]
    titles = ("name", "what it is", "features", "decay per", "divided by the sum of weights", "norm of outputs")
    return markdown.table(titles, rows)


def _check(name: str) -> str:
    usual = priced(name, Problem(size=64, heads=32, kv_heads=8)).setup.reason is None
    return (
        f"```bash\ncp-plugin verify --provider {name}\n"
        f"cp-plugin traffic --provider {name}{'' if usual else ' --ranks 8'}\n```"
    )


_BLOCKS: dict[str, Callable[..., str]] = {
    "source": _source,
    "sketch": _sketch,
    "drawing": _drawing,
    "placement": _placed,
    "flags": _flags,
    "lengths": _lengths,
    "check": _check,
    "ratios": comparison.ratio_table,
    "methods": comparison.methods_table,
    "head-axis": comparison.head_axis_table,
    "states": comparison.states_table,
    "variants": _variants,
    "support": support.table,
    "cuda-graphs": support.graphs_table,
    "versions": support.versions_table,
    "wins": wins_page.front,
    "canonical": lambda: sentence(CANONICAL),
    "kernel-order": kernel_tables.order_table,
    "memory": kernel_tables.memory_table,
    "budget": recorded_tables.budget,
    "edits": recorded_tables.edits,
    "faults": recorded_tables.faults,
    "flag-reference": flag_tables.flags_table,
    "commands": flag_tables.commands_table,
    "refused": messages.refused,
    "short": comparison.short_table,
}
