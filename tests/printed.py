"""The commands in the README and the pages: fenced shell blocks, and inline code that is a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLAGS = "FLAGS_OF_A_TRAINING"
"""The word that replaces ``<your Megatron flags>``."""
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^ *```$", re.DOTALL | re.MULTILINE)
_PLACEHOLDER = re.compile(r"<[^<>\n]*flags[^<>\n]*>")
_SHELL = ("bash", "sh", "console")
_PROGRAMS = ("cp-plugin", "python", "python3", "torchrun", "pip", "srun", "sbatch", "mkdocs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """A command as printed on a page."""

    page: str
    text: str
    """On one line, without its comment; or a whole script."""

    @property
    def script(self) -> bool:
        return self.text.startswith("#!")

    @property
    def words(self) -> list[str]:
        """Split as by a shell."""
        return shlex.split(self.text, comments=True)

    @property
    def options(self) -> list[str]:
        return [word.partition("=")[0] for word in self.words if word.startswith("--") and word != "--"]


def pages() -> list[Path]:
    """List all Markdown files; the README first."""
    patterns = (
        "README.md",
        "*.md",
        *(f"{folder}/**/*.md" for folder in ("docs", "examples", "patches", "ci", "tests")),
    )
    return list(dict.fromkeys(page for pattern in patterns for page in sorted(ROOT.glob(pattern))))


@cache
def fenced() -> list[Printed]:
    """Read all commands in fenced blocks, each once."""
    return _once(command for page in pages() for command in read_fences(page.read_text(), _name(page)))


@cache
def inline() -> list[Printed]:
    """Inline code that begins with a program or a script of this repository, each once."""
    return _once(command for page in pages() for command in _read_inline(page.read_text(), _name(page)))


def read_fences(markdown: str, page: str) -> Iterator[Printed]:
    """Read the commands of a page's fenced blocks."""
    for block in _FENCE.finditer(markdown):
        language, body = block["language"], _PLACEHOLDER.sub(FLAGS, block["body"])
        if language in _SHELL and body.startswith("#!"):
            yield Printed(page=page, text=body)
            continue
        body = re.sub(r"\\\n\s*", " ", body)
        if prompted := re.findall(r"^ *\$ (.*)", body, re.MULTILINE):  # the other lines are output
            body, language = "\n".join(prompted), language or _SHELL[0]
        if language in _SHELL or (not language and body.split(maxsplit=1)[:1] and body.split()[0] in _PROGRAMS):
            for line in body.splitlines():
                yield from (Printed(page=page, text=text) for text in _commands(line))


def _once(commands: Iterable[Printed]) -> list[Printed]:
    first: dict[str, Printed] = {}
    for command in commands:
        first.setdefault(command.text, command)
    return list(first.values())


def _commands(line: str) -> Iterator[str]:
    """Split a line into its commands, without comments and redirections."""
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), "&&"]:
        if word != "&&":
            words.append(word)
        elif words:
            yield shlex.join(words[: words.index(">")] if ">" in words else words)
            words = []


def _read_inline(markdown: str, page: str) -> Iterator[Printed]:
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", _FENCE.sub("", markdown)):
        text = _PLACEHOLDER.sub(FLAGS, " ".join(span.split()))
        first = text.partition(" ")[0]
        script = first.startswith(("ci/", "examples/")) and first.endswith((".sh", ".py"))
        if (first in _PROGRAMS or script) and "->" not in text:
            yield Printed(page=page, text=text)


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()
