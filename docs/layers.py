"""The package's layers, drawn and listed from the import contract in ``pyproject.toml``."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
_ROW, _BOX, _GAP, _MARGIN = 30, 22, 8, 12


def layers() -> list[list[str]]:
    """The modules of each layer, from the top; a layer imports only what is below it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    found = next(contract for contract in contracts if contract["type"] == "layers")["layers"]
    return [[name.strip(" ()").removeprefix("cp_plugin.") for name in layer.split("|")] for layer in found]


def drawing() -> str:
    """An SVG with a row of boxes for each layer."""
    rows = layers()
    width = round(max(sum(_width(name) + _GAP for name in row) for row in rows) + 2 * _MARGIN + 30)
    height = len(rows) * _ROW + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<title>Layers of cp_plugin: each imports only what is below it</title>",
        '<defs><marker id="end" markerWidth="8" markerHeight="8" refX="4" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#888"/></marker></defs>',
        f'<line x1="18" y1="{_MARGIN}" x2="18" y2="{height - _MARGIN - 4}" stroke="#888" marker-end="url(#end)"/>',
        '<g font-family="monospace" font-size="12" text-anchor="middle">',
    ]
    for y, row in zip(range(_MARGIN, height, _ROW), rows, strict=False):
        x = 30.0 + _MARGIN
        for name in row:
            parts.append(
                f'<rect x="{x:.0f}" y="{y}" width="{_width(name):.0f}" height="{_BOX}" rx="3" fill="{_colour(name)}" '
                f'stroke="#888"/><text x="{x + _width(name) / 2:.0f}" y="{y + 15}" fill="#111">{name}</text>'
            )
            x += _width(name) + _GAP
    return "\n".join([*parts, "</g>", "</svg>", ""])


def table() -> str:
    """Every module of every layer and its subpackages, with the first sentence of its docstring."""
    lines = ["| module, from the top | contents |", "|---|---|"]
    for name in (name for row in layers() for name in row):
        inside = sorted(path.parent.name for path in (ROOT / "cp_plugin" / name).glob("*/__init__.py"))
        lines += [f"| `{module}` | {_summary(module)} |" for module in (name, *(f"{name}/{sub}" for sub in inside))]
    return "\n".join(lines)


def _width(name: str) -> float:
    return len(name) * 7.3 + 16


def _colour(name: str) -> str:
    """Blue: knows Megatron or Bridge. Green: knows no ranks. Grey: the rest."""
    if name in ("megatron", "nemo", "run", "pretrain_gpt", "generate"):
        return "#cfe2ff"
    return "#d9f2d9" if name in ("common", "core", "kernels", "linear") else "#eeeeee"


def _summary(module: str) -> str:
    path = ROOT / "cp_plugin" / module
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    first = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]
    return " ".join(first.split()).replace("|", "\\|").replace("``", "`")
