"""The layers of the package, drawn and listed from the import contract in ``pyproject.toml`` that a linter holds."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
_ROW, _BOX, _GAP, _CHARACTER, _MARGIN = 30, 22, 8, 7.3, 12


def layers() -> list[list[str]]:
    """The modules of each layer, from the top; a layer imports only what is below it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    found = next(contract for contract in contracts if contract["type"] == "layers")["layers"]
    return [[name.strip(" ()").removeprefix("cp_plugin.") for name in layer.split("|")] for layer in found]


def drawing() -> str:
    """A row of boxes for each layer."""
    rows = layers()
    widths = [sum(_width(name) + _GAP for name in row) for row in rows]
    width, height = round(max(widths) + 2 * _MARGIN + 30), len(rows) * _ROW + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<title>Layers of cp_plugin: each imports only what is below it</title>",
        '<defs><marker id="end" markerWidth="8" markerHeight="8" refX="4" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<line x1="18" y1="{_MARGIN}" x2="18" y2="{height - _MARGIN - 4}" stroke="#555" marker-end="url(#end)"/>',
        '<g font-family="monospace" font-size="12" text-anchor="middle">',
    ]
    for number, row in enumerate(rows):
        x, y = 30.0 + _MARGIN, _MARGIN + number * _ROW
        for name in row:
            parts.append(
                f'<rect x="{x:.0f}" y="{y}" width="{_width(name):.0f}" height="{_BOX}" rx="3" fill="{_colour(name)}" '
                f'stroke="#555"/><text x="{x + _width(name) / 2:.0f}" y="{y + 15}" fill="#111">{name}</text>'
            )
            x += _width(name) + _GAP
    return "\n".join([*parts, "</g>", "</svg>", ""])


def table() -> str:
    """Every room of every layer and the rooms inside of it, with the first sentence of its docstring."""
    rows = []
    for name in (name for row in layers() for name in row):
        rows.append(f"| `{name}` | {_summary(name)} |")
        inside = sorted(path.parent.name for path in (ROOT / "cp_plugin" / name).glob("*/__init__.py"))
        rows += [f"| `{name}/{room}` | {_summary(f'{name}/{room}')} |" for room in inside]
    return "\n".join(["| from the top | what is there |", "|---|---|", *rows])


def _width(name: str) -> float:
    return len(name) * _CHARACTER + 16


def _colour(name: str) -> str:
    """Blue for what knows Megatron or Bridge, green for what knows no ranks, grey for the rest."""
    if name in ("megatron", "nemo", "run", "pretrain_gpt", "generate"):
        return "#cfe2ff"
    return "#d9f2d9" if name in ("core", "kernels", "linear") else "#eeeeee"


def _summary(name: str) -> str:
    path = ROOT / "cp_plugin" / name
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    first = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]
    return " ".join(first.split()).replace("|", "\\|").replace("``", "`")
