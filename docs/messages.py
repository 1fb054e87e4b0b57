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
_FILLED = {
    "value": "",
    "instead": "",
    "mtp": "--mtp-num-layers N",
    "packed": "--sft",
    "states": "M in --hybrid-layer-pattern PATTERN",
    "given": "--moe-aux-loss-coeff X",
    "flag": "--seq-length",
    "--cuda-graph-impl flag": "--cuda-graph-modules",
    "recipe": "--fp8-recipe mxfp8",
    "sizes of the model given": "--num-layers 0",
    "capacity of experts given": "--moe-expert-capacity-factor X",
}
"""Value of all rules, or of the named one -> what it stands for."""


def rules_table(kind: str, groups: Collection[str] = ()) -> str:
    """The rules of a kind, in Markdown, each under the first group that has it; of these groups, or of all."""
    rows = {
        rule.name: (_code(_filled(rule, rule.what)), *(_words(_filled(rule, part)) for part in (rule.why, rule.fix)))
        for group, rule in _first_of(kind)
        if not groups or group in groups
    }
    return markdown.table(("message", "why", "fix"), rows.values())


def refused() -> str:
    """The flags that are refused in all trainings, in a line."""
    texts = dict.fromkeys(_filled(rule, rule.what) for group, rule in _first_of("refuse") if group == "all")
    return ", ".join(_code(text) for text in texts if re.fullmatch(r"--[\w-]+", text))


def pages() -> dict[str, str]:
    """Name of a page of the site -> its Markdown."""
    intro = "The message begins with `--cp-provider NAME does not support` unless it is a sentence of its own."
    others = [group for group in RULES if group != "all"]
    found = {
        "refused": ("Messages: what is refused", f"{intro}\n\n{rules_table('refuse', ('all',))}"),
        "refused-in-part": ("Messages: refused in some models and calls", rules_table("refuse", others)),
        "adjusted": ("Messages: adjusted, or warned about", f"{rules_table('adjust')}\n\n{rules_table('warn')}"),
    }
    return {name: f"# {title}\n\n{text}\n" for name, (title, text) in found.items()}


def _first_of(kind: str) -> Iterator[tuple[str, Rule]]:
    """The rules of a kind, each once, with the first group that has it; ValueError if there are none."""
    seen: set[str] = set()
    for group, rule in ((group, rule) for group, of_group in RULES.items() for rule in of_group):
        if rule.kind == kind and rule.name not in seen:
            seen.add(rule.name)
            yield group, rule
    if not seen:
        raise ValueError(f"no rules of the kind {kind!r}")


def _filled(rule: Rule, part: str) -> str:
    """A text of a rule with examples of what a run fills in."""
    named = {key.rpartition(" ")[2]: text for key, text in _FILLED.items() if key.startswith(f"{rule.name} ")}
    return re.sub(r"{(\w+)[^}]*}", lambda found: (_FILLED | named).get(found[1], f"<{found[1]}>"), part)


def _words(text: str) -> str:
    """A sentence, with flags as code."""
    return re.sub(r"--[a-z0-9][a-z0-9-]*", r"`\g<0>`", text.replace("<", "&lt;"))


def _code(text: str) -> str:
    """Inline code in a table."""
    return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', '/')}`"
