"""The rules of the plugin, for the site: what is refused, adjusted or warned about, why, and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import markdown_tables as markdown

from cp_plugin.megatron.rules import checks as rules
from cp_plugin.megatron.rules.rule import Rule
from cp_plugin.nemo import refusals as nemo

RULES: dict[str, tuple[Rule, ...]] = {**rules.RULES, "NeMo": (nemo.MODEL, *nemo.RULES, *nemo.ON_CPU)}
"""All rules, by what they look at."""
_FILLED = re.compile(r"{(?:[\w.]*\.)?(\w+)[^}]*}")
"""What a run fills in."""


def rules_table(kind: str, groups: Collection[str] = ()) -> str:
    """The rules of a kind, in Markdown, each under the first group that has it; of these groups, or of all."""
    rows = {
        rule.name: (_shown(rule), _words(rule.why), _words(rule.fix if rule.kind == "refuse" else rule.what))
        for group, rule in _first_of(kind)
        if not groups or group in groups
    }
    return markdown.table(("for example", "why", "fix" if kind == "refuse" else "what is done"), rows.values())


def refused() -> str:
    """The flags that are refused in all training runs, in a line, with an example of a refused value."""
    rules = (rule for group, rule in _first_of("refuse") if group == "all")
    return ", ".join(_shown(rule) for rule in rules if rule.name.startswith("--"))


def pages() -> dict[str, str]:
    """Return the name of a page of the site -> its Markdown."""
    intro = "The message begins with `--cp-provider NAME does not support` unless it is a sentence of its own."
    others = [group for group in RULES if group != "all"]
    texts = {
        "refused": ("Messages: what is refused", f"{intro}\n\n{rules_table('refuse', ('all',))}"),
        "refused-in-part": ("Messages: refused in some models and calls", rules_table("refuse", others)),
        "adjusted": ("Messages: adjusted, or warned about", f"{rules_table('adjust')}\n\n{rules_table('warn')}"),
    }
    return {name: f"# {title}\n\n{text}\n" for name, (title, text) in texts.items()}


def _first_of(kind: str) -> Iterator[tuple[str, Rule]]:
    """The rules of a kind, each once, with the first group that has it; ValueError if there are none."""
    seen: set[str] = set()
    for group, rule in ((group, rule) for group, of_group in RULES.items() for rule in of_group):
        if rule.kind == kind and rule.name not in seen:
            seen.add(rule.name)
            yield group, rule
    if not seen:
        raise ValueError(f"no rules of the kind {kind!r}")


def _shown(rule: Rule) -> str:
    """The flags of its example, or whatever else is refused."""
    return " or ".join(_code(_FILLED.sub(r"<\1>", line)) for line in rule.examples or [rule.what])


def _words(text: str) -> str:
    """A sentence, with flags as code, and names for what a run fills in."""
    return re.sub(r"--[a-z0-9][a-z0-9-]*", r"`\g<0>`", _FILLED.sub(r"&lt;\1>", text))


def _code(text: str) -> str:
    """Inline code in a table."""
    return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', '/')}`"
