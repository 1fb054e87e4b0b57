"""The messages of the plugin, for the site: texts from the code, causes and fixes from ``messages.toml``.

A message is an f-string in a source file. Its constant words are shown as they are; what a run fills in is shown as
``<name>``, or as ``...``.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import markdown_tables as markdown

from cp_plugin.megatron.rules import table as rules
from cp_plugin.megatron.rules.rule import Rule
from cp_plugin.nemo import refusals as nemo

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "cp_plugin"
RULES: dict[str, tuple[Rule, ...]] = {**rules.RULES, "NeMo": (nemo.MODEL, *nemo.RULES, *nemo.ON_CPU)}
"""All rules, by what they look at."""
LISTED = {
    "dataset": ("megatron/dataset.py", "megatron/models/indexed.py", "cli/dataset.py"),
    "examples": ("cli/examples/*.py",),
    "generation": (
        "cli/generate.py",
        "inference/*.py",
        "megatron/inference/decoding*.py",
        "megatron/inference/saved_model.py",
        "megatron/models/text.py",
        "megatron/models/loading.py",
    ),
    "nemo": ("nemo/*.py",),
    "transformers": ("huggingface/*.py",),
}
"""Files whose messages state cause and fix themselves; the page only lists them."""
_WRITTEN = {
    "settings.asked": "--cp-provider NAME",
    "settings.instead": "use --cp-provider upstream",
    "settings().asked": "--cp-provider NAME",
    "settings().instead": "use --cp-provider upstream",
    "AUTO": "auto",
    "UPSTREAM": "upstream",
    "_ASKED": "--cp-provider auto",
    "CLUSTER": "--cp-cluster",
    "_RECIPE": "--fp8-recipe",
    "LINEAR": "L",
    "SOFTMAX": "N",
}
"""End of a filled-in expression -> what it stands for."""
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
_TITLES = {
    "flags": "invalid flags",
    "sizes": "sizes that do not fit",
    "models": "models",
    "start": "at start-up",
    "auto": "the planner",
    "kernels": "kernels, FP8, quantisation",
    "commands": "commands",
}
"""Chapter -> what it is about."""
_ANYTHING = "(?s:.*)"
"""Matches a filled-in expression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A text in the code."""

    file: str
    """In ``cp_plugin/``."""
    text: str
    """With ``<name>`` and ``...`` for what a run fills in."""
    pattern: re.Pattern[str]
    """Matches what a run prints."""
    raised: bool
    """Whether a ``raise`` statement contains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Cause and fix of a message; for an internal one, why the page leaves it out."""

    has: str
    """A part of its text that no other text of the package, or of ``file``, has."""
    file: str = ""
    why: str
    do: str = ""
    example: str = ""
    """Flags that trigger it, appended to those of a small model on four ranks."""

    def message(self) -> Message:
        """The text in the code.

        Raises:
            ValueError: if no or several texts match, or if the text is so general that other messages match it.
        """
        files = [self.file] if self.file else _files("**/*.py")
        found = {(file, m.text): m for file in files for m in messages(file) if self.has in m.text}
        if len(found) != 1:
            where = self.file or " ".join(sorted({file for file, _ in found})) or "no file"
            raise ValueError(f"messages.toml: {len(found)} texts of {where} have {self.has!r}")
        (message,) = found.values()
        if len(re.findall("[a-z]{2,}", message.pattern.pattern.replace(_ANYTHING, ""))) < 2:
            raise ValueError(f"{message.file}: {message.text!r} fits too many messages: give it words of its own")
        return message


@cache
def chapters() -> dict[str, list[Entry]]:
    """Chapter -> its entries, as in ``messages.toml``."""
    return {name: [Entry(**entry) for entry in entries] for name, entries in _read()["chapter"].items()}


def internal() -> list[Entry]:
    """The texts that the page leaves out."""
    return [Entry(**entry) for entry in _read()["internal"]]


def table(chapter: str) -> str:
    """The messages of a chapter, in Markdown."""
    if chapter not in chapters():
        raise ValueError(f"no chapter {chapter!r} in messages.toml: there are {', '.join(chapters())}")
    rows = [(_code(entry.message().text), entry.why, entry.do) for entry in chapters()[chapter]]
    return markdown.table(("message", "cause", "fix"), rows)


def listed(group: str) -> str:
    """The messages of a group of ``LISTED``, in Markdown."""
    if group not in LISTED:
        raise ValueError(f"no group {group!r} of messages: there are {', '.join(LISTED)}")
    texts = dict.fromkeys(m.text for file in files_of(group) for m in messages(file) if m.raised)
    return "\n".join(f"- {_code(text)}" for text in texts)


def files_of(group: str) -> list[str]:
    """The files of a group, in ``cp_plugin/``."""
    return [file for pattern in LISTED[group] for file in _files(pattern)]


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
    """Name of a page of the site -> its Markdown: all messages, causes and fixes."""
    found = {name: (f"Messages: {title}", table(name)) for name, title in _TITLES.items()}
    intro = "The message begins with `--cp-provider NAME does not support` unless it is a sentence of its own."
    found["refused"] = ("Messages: what is refused", f"{intro}\n\n{rules_table('refuse', ('all',))}")
    others = [group for group in RULES if group != "all"]
    found["refused-in-part"] = ("Messages: refused in some models and calls", rules_table("refuse", others))
    changes = "\n\n".join([rules_table("adjust"), rules_table("warn")])
    found["adjusted"] = ("Messages: adjusted, or warned about", changes)
    lists = "\n\n".join(f"## {group}\n\n{listed(group)}" for group in LISTED)
    found["others"] = ("Messages that state cause and fix themselves", lists)
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


def uncovered(files: list[str]) -> list[str]:
    """The texts raised in these files that have no entry."""
    entries = [*(entry for chapter in chapters().values() for entry in chapter), *internal()]
    covered = {(m.file, m.text) for m in (entry.message() for entry in entries)}
    return [f"{file}: {m.text}" for file in files for m in messages(file) if m.raised and (file, m.text) not in covered]


@cache
def messages(file: str) -> tuple[Message, ...]:
    """The possible messages of a source file: strings of several words, except docstrings."""
    return tuple(m for m in _messages(ast.parse((PACKAGE / file).read_text()), file) if " " in m.text)


def _messages(tree: ast.AST, file: str) -> Iterator[Message]:
    raised = {
        id(node.exc.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
    }
    skipped = {id(n) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for n in node.values}
    skipped |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        if text and id(node) not in skipped:
            parts: list[Any] = node.values if isinstance(node, ast.JoinedStr) else [node]
            pattern = "".join(re.escape(_shown(p)) if isinstance(p, ast.Constant) else _ANYTHING for p in parts)
            shown = "".join(map(_shown, parts))
            yield Message(file=file, text=shown, pattern=re.compile(pattern), raised=id(node) in raised)


def _shown(part: ast.Constant | ast.FormattedValue) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    code = ast.unparse(part.value)
    for end, written in _WRITTEN.items():
        if code == end or code.endswith(f".{end}"):
            return written
    match part.value:
        case ast.Call(func=ast.Name(id="spelled"), args=[option, *values]):
            return " or ".join(_option(option, value) for value in values) or _option(option)
        case ast.Call(func=ast.Name(id="spelled_ranks")):
            return "--context-parallel-size <size>"
        case ast.IfExp(body=ast.Constant(value=value)):
            return str(value)
        case ast.Name(id=name):
            return f"<{name.strip('_')}>"
        case ast.Attribute(attr=name):
            return f"<{name}>"
    return "..."


def _option(option: ast.expr, value: ast.expr | None = None) -> str:
    """An option that a message spells, as a flag: ``--cp-layout zigzag``, or ``--cp-head-parallel <ranks>``."""
    name = str(option.value) if isinstance(option, ast.Constant) else ast.unparse(option).rpartition(".")[2].lower()
    flag = f"--cp-{name.replace('_', '-')}" if name not in ("self", "option") else "<flag>"
    if value is None:
        return flag
    if isinstance(value, ast.Constant):
        return f"{flag} {value.value}"
    return f"{flag} <{ast.unparse(value).rpartition('.')[2] if isinstance(value, ast.Name | ast.Attribute) else name}>"


def _code(text: str) -> str:
    """Inline code in a table."""
    return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', '/')}`"


@cache
def _files(pattern: str) -> tuple[str, ...]:
    return tuple(path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.glob(pattern)))


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads((DOCS / "messages.toml").read_text())
