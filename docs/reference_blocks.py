"""Blocks of reference: the public classes from their docstrings, and what is patched in Megatron."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cp_plugin
from cp_plugin import huggingface, nemo

ROOT = Path(__file__).parent.parent
PUBLIC: dict[str, dict[str, tuple[str, ...]]] = {
    "cp_plugin": {
        "ContextParallel": (
            "attention",
            "linear_attention",
            "shard",
            "unshard",
            "positions",
            "without_fp8",
        ),
        "Tree": ("position_ids", "predictions", "sequences_per_token"),
    },
    "cp_plugin.huggingface": {
        "apply": (),
        "shard": (),
        "shard_tree": (),
        "Collator": (),
        "hidden_states": (),
        "log_probabilities": (),
        "undo": (),
    },
    "cp_plugin.nemo": {"apply": (), "activate": ()},
}
"""Module -> public class or function -> the methods that the page shows."""
_MODULES = {"cp_plugin": cp_plugin, "cp_plugin.huggingface": huggingface, "cp_plugin.nemo": nemo}
_SECTION = re.compile(r"^(Args|Returns|Raises|Shape):$")
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*)$")
_WHEN = {
    "Always": "START_UP",
    "With a provider": "PROVIDER",
    "With recomputation": "RECOMPUTE",
    "With `--cp-pad-sequence`": "PADDING",
    "With FP8 kernels": "SCALING",
    "With linear attention": "LINEAR",
    "With a hybrid model": "HYBRID",
    "With `--cp-linear-provider`": "DELTA_NET",
}
"""When a run replaces functions, and which: tables of ``cp_plugin.megatron.patches.hooks``."""
_PATCHES = """
import json
from cp_plugin.megatron.patches import hooks
print(json.dumps([[[one.target, one.reason] for one in getattr(hooks, table)] for table in %r]))
"""


def api() -> str:
    """All of ``PUBLIC``."""
    parts = []
    for module, names in PUBLIC.items():
        for name, methods in names.items():
            what = getattr(_MODULES[module], name)
            parts.append(f"## {module}.{name}\n\n{_described(f'{module}.{name}', what)}")
            parts += [f"### {name}.{one}\n\n{_described(f'{one}', getattr(what, one))}" for one in methods]
    return "\n\n".join(parts)


def _described(name: str, what: Any) -> str:
    """Signature and docstring of a class or function."""
    call: Callable[..., Any] = what.__init__ if inspect.isclass(what) else what
    parts = [f"```python\n{_signature(name, call)}\n```"]
    docs = [what, call] if inspect.isclass(what) and "__init__" in vars(what) else [what]
    fields = _fields(what) if inspect.isclass(what) else ""
    parts += [_markdown(text) for one in docs if (text := inspect.getdoc(one))]
    return "\n\n".join(filter(None, [*parts, fields]))


def _signature(name: str, call: Callable[..., Any]) -> str:
    """One line, or a line per parameter."""
    found = inspect.signature(call)
    words, keyword_only = [], False
    for p in (p for p in found.parameters.values() if p.name != "self"):
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            words, keyword_only = [*words, "*"], True
        words.append(re.sub(r"(: )'(.*?)'", r"\1\2", str(p)))
    back = "" if found.return_annotation in (inspect.Signature.empty, "None") else f" -> {found.return_annotation}"
    line = f"{name}({', '.join(words)}){back}"
    return line if len(line) <= 72 else "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){back}"])


def _fields(of: type) -> str:
    """The fields of a dataclass, with the texts behind them in its source."""
    names = getattr(of, "__dataclass_fields__", {})
    found = re.findall(r'^    (\w+): .*\n    """(.*?)"""$', inspect.getsource(of), re.MULTILINE | re.DOTALL)
    return "\n".join(f"- `{name}`: {' '.join(text.split())}" for name, text in found if name in names)


def _markdown(docstring: str) -> str:
    """A docstring's sections as headings, its entries as lists, and its names as code."""
    return "\n".join(_lines(re.sub(r"``(.+?)``", r"`\1`", docstring))).strip("\n")


def _lines(docstring: str) -> Iterator[str]:
    inside = ""
    for line in docstring.splitlines():
        if section := _SECTION.match(line):
            inside = section[1]
            yield from (f"**{inside}**", "")
        elif inside and (entry := _ENTRY.match(line)) and inside in ("Args", "Raises"):
            yield f"- `{entry[1]}`: {entry[2]}"
        elif inside and line.startswith("    "):
            yield f"  {line.strip()}" if inside in ("Args", "Raises") else line.strip()
        else:
            inside = inside if not line else ""
            yield line


def patched() -> str:
    """The functions of Megatron that a run replaces, and when; a process of its own imports Megatron."""
    command = [sys.executable, "-W", "ignore", "-c", _PATCHES % list(_WHEN.values())]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return "\n\n".join(
        "\n".join(
            [f"**{when}**\n", *(f"- `{target.removeprefix('megatron.')}`: {reason}" for target, reason in patches)]
        )
        for when, patches in zip(_WHEN, json.loads(printed.splitlines()[-1]), strict=True)
    )
