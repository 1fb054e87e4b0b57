"""The messages of the troubleshooting page: texts read out of the code, causes and fixes from ``messages.toml``.

A message is an f-string in a source file. Its constant words stand on the page as they are; what a run fills in is
written as ``<name>``, or as ``...``.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
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
"""What a filled-in expression is, where its name does not say it. By its end."""
_ANYTHING = "(?s:.*)"
"""What stands for a filled-in expression in a pattern."""
LISTED = {
    "dataset": (
        "megatron/dataset/*.py",
        "cli/dataset.py",
        "megatron/models/tokenizers.py",
        "megatron/models/vocabulary.py",
    ),
    "checkpoints": ("megatron/startup/saved_files.py",),
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
    "transformers": ("huggingface.py",),
}
"""Files whose messages say cause and fix themselves; the page lists them as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A text that stands in the code."""

    file: str
    """In ``cp_plugin/``."""
    text: str
    """With ``<name>`` and ``...`` where a run fills something in."""
    pattern: re.Pattern[str]
    """What a run prints matches this."""
    raised: bool
    """Whether it is written where it is raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the page says about a message; of an internal one, why it says nothing."""

    has: str
    """A part of its text; no other text of the package has it."""
    file: str = ""
    """Where it is; empty: anywhere, where ``has`` is enough to find it by."""
    why: str
    do: str = ""
    example: str = ""
    """Flags that bring it about, behind those of a small model on four ranks; a test tries them."""

    def message(self) -> Message:
        """The text in the code.

        Raises:
            ValueError: if none, or several, have it, or if so little of it is constant that other messages match it.
        """
        files = [self.file] if self.file else _files()
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
    """The messages of a chapter, in Markdown.

    Raises:
        ValueError: if there is no such chapter.
    """
    if chapter not in chapters():
        raise ValueError(f"no chapter {chapter!r} in messages.toml: there are {', '.join(chapters())}")
    rows = [(_code(entry.message().text), entry.why, entry.do) for entry in chapters()[chapter]]
    return markdown.table(("message", "cause", "what to do"), rows)


def listed(group: str) -> str:
    """The messages of a group of ``LISTED``, in Markdown.

    Raises:
        ValueError: if there is no such group.
    """
    if group not in LISTED:
        raise ValueError(f"no group {group!r} of messages: there are {', '.join(LISTED)}")
    texts = dict.fromkeys(m.text for file in files_of(group) for m in messages(file) if m.raised)
    return "\n".join(f"- {_code(text)}" for text in texts)


def files_of(group: str) -> list[str]:
    """The files of a group, in ``cp_plugin/``."""
    return [path.relative_to(PACKAGE).as_posix() for pattern in LISTED[group] for path in sorted(PACKAGE.glob(pattern))]


RULES: dict[str, tuple[Rule, ...]] = {**rules.RULES, "NeMo": (nemo.MODEL, *nemo.RULES, *nemo.ON_CPU)}
"""All rules, by what they look at."""


def rules_table(kind: str) -> str:
    """The rules of a kind, in Markdown: each once, where it looks first.

    Raises:
        ValueError: if there is no such kind.
    """
    if kind not in {rule.kind for of_group in RULES.values() for rule in of_group}:
        raise ValueError(f"no rules of the kind {kind!r}")
    rows: dict[str, tuple[str, ...]] = {}
    for group, of_group in RULES.items():
        for rule in of_group:
            if rule.kind == kind:
                rows.setdefault(rule.name, _row(rule, group))
    return markdown.table(("message", "of", "why", "instead"), rows.values())


def uncovered(files: list[str]) -> list[str]:
    """The texts that are raised in these files and that no entry is about."""
    entries = [*(entry for chapter in chapters().values() for entry in chapter), *internal()]
    covered = {(m.file, m.text) for m in (entry.message() for entry in entries)}
    return [f"{file}: {m.text}" for file in files for m in messages(file) if m.raised and (file, m.text) not in covered]


@cache
def _files() -> tuple[str, ...]:
    return tuple(path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py")))


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads((DOCS / "messages.toml").read_text())


@cache
def messages(file: str) -> tuple[Message, ...]:
    """All texts of a source file that could be messages: strings of several words that are no docstrings."""
    tree = ast.parse((PACKAGE / file).read_text())
    return tuple(m for m in _messages(tree, file) if " " in m.text)


def _messages(tree: ast.AST, file: str) -> Iterator[Message]:
    raised = {
        id(node.exc.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
    }
    inner = {id(n) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for n in node.values}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in inner | docstrings or not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        if isinstance(node, ast.JoinedStr) or isinstance(node.value, str):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(_shown(part) for part in parts)
            pattern = "".join(re.escape(_shown(p)) if isinstance(p, ast.Constant) else _ANYTHING for p in parts)
            yield Message(file=file, text=text, pattern=re.compile(pattern), raised=id(node) in raised)


def _shown(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    value = part.value
    code = ast.unparse(value)
    for end, written in _WRITTEN.items():
        if code == end or code.endswith(f".{end}"):
            return written
    if isinstance(value, ast.IfExp) and isinstance(value.body, ast.Constant):
        return str(value.body.value)
    if isinstance(value, ast.Name):
        return f"<{value.id.strip('_')}>"
    return f"<{value.attr}>" if isinstance(value, ast.Attribute) else "..."


def _code(text: str) -> str:
    """Inline code in a table."""
    return f"`{' '.join(text.split()).replace('`', chr(39)).replace('|', '/')}`"


_FILLED = {
    "value": "",
    "instead": "",
    "mtp": "--mtp-num-layers N",
    "packed": "--sft",
    "states": "M in --hybrid-layer-pattern PATTERN",
    "given": "--moe-aux-loss-coeff X",
    "flag": "--seq-length",
    "recipe": "--fp8-recipe mxfp8",
}
"""What stands in the place of a rule's values, where their names do not say it."""


def _row(rule: Rule, group: str) -> tuple[str, ...]:
    what, why, fix = (
        re.sub(r"{(\w+)[^}]*}", lambda found: _FILLED.get(found[1], f"<{found[1]}>"), part)
        for part in (rule.what, rule.why, rule.fix)
    )
    why = why.replace("<", "&lt;")
    return _code(what), group, _flags_as_code(why), _flags_as_code(fix.replace("<", "&lt;"))


def _flags_as_code(text: str) -> str:
    return re.sub(r"--[a-z0-9][a-z0-9-]*", lambda found: f"`{found[0]}`", text)
