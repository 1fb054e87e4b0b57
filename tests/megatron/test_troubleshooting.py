"""The site has every rule of the plugin."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "docs"))

import messages


def test_the_pages_have_every_rule_once() -> None:
    rules = {rule.name: rule for of_group in messages.RULES.values() for rule in of_group}
    assert "".join(messages.pages().values()).count("\n| `") == len(rules)
