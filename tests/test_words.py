"""Messages are English that a native would write."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from package_sources import SOURCES

FOREIGN = {
    "has no effect": r"(would|does|do) nothing (with|without)\b|would do nothing",
    "split (evenly) across": r"divide(s|d)? (the \w+ )?over\b",
    "training, or a training run": r"\b(a|an|each|every|this) training\b(?! (run|script|command|step))|\btrainings\b",
    "again": r"\banew\b",
    "in the same way": r"\balike\b",
    "next to": r"\bbeside\b(?!s)",
    "setting --flag": r"is switched on|are switched on",
    "terminating rank 3": r"is ended, since|says nothing",
    "forward or backward pass": r"\b(in|for|as) the (forward|backward)\b(?! (pass|of))",
    "forever": r"\bfor ever\b",
}
"""What to write -> what a translator writes."""


def told(source: str) -> Iterator[str]:
    """The texts of a module that may be shown: of three words or more, without docstrings and parts of f-strings."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    hidden = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    hidden |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden:
            text = node.value
        else:
            continue
        if text.count(" ") > 1:
            yield text


def foreign(text: str) -> list[str]:
    """What to write instead of each phrase found."""
    return [instead for instead, phrase in FOREIGN.items() if re.search(phrase, text)]


def test_no_message_is_translated() -> None:
    found = {text: better for source in SOURCES.values() for text in told(source) if (better := foreign(text))}
    assert found == {}
