"""How a source differs from those that were compared: a unified diff without the text of Megatron.

Of every known source there is a short hash of each line (``fingerprints``), as ``ast.unparse`` writes it. So lines that
are new can be shown, and lines that are gone can be counted.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

_LENGTH = 5  # of a line's hash
_CONTEXT = 2
_LONGEST = 40  # lines of a diff


def hashes(node: ast.AST) -> str:
    """The hashes of a definition's lines, as one text."""
    return "".join(_hash(line) for line in _lines(node))


def from_nearest(target: str, node: ast.AST, known: Mapping[str, Mapping[str, Any]]) -> str:
    """A diff of a definition against the known source that is most like it; empty if there is none.

    Args:
        known: fingerprint -> its versions, and the hashes of its lines.
    """
    lines = _lines(node)
    here = [_hash(line) for line in lines]
    compared = [
        (SequenceMatcher(None, _split(one["lines"]), here, False), one) for one in known.values() if one["lines"]
    ]
    if not compared:
        return ""
    matcher, nearest = max(compared, key=lambda pair: pair[0].ratio())
    version = nearest["versions"][-1]
    shown = [f"--- megatron-core {version}", f"+++ {target}"]
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        shown.append(f"@@ line {group[0][3] + 1} of {len(lines)} @@")
        for tag, a, b, c, d in group:
            if tag == "equal":
                shown += [f"  {line}" for line in lines[c:d]]
                continue
            if b > a:
                shown.append(f"- ({b - a} line{'s' * (b - a > 1)} of megatron-core {version})")
            shown += [f"+ {line}" for line in lines[c:d]]
    more = len(shown) - _LONGEST
    return "\n".join(shown[:_LONGEST] + ([f"... and {more} more lines"] if more > 0 else []))


def _lines(node: ast.AST) -> list[str]:
    for inner in ast.walk(node):
        match inner:
            case ast.FunctionDef(body=[ast.Expr(value=ast.Constant(value=str())), *rest]) if rest:
                inner.body = rest
            case ast.ClassDef(body=[ast.Expr(value=ast.Constant(value=str())), *rest]) if rest:
                inner.body = rest
    return ast.unparse(node).splitlines()


def _hash(line: str) -> str:
    return hashlib.sha256(line.strip().encode()).hexdigest()[:_LENGTH]


def _split(hashes: str) -> list[str]:
    return [hashes[i : i + _LENGTH] for i in range(0, len(hashes), _LENGTH)]
