"""How every command reads its words: by typer, but errors are one line, and ``--json`` may go without a value.

A program imports a command when it runs it: torch alone takes longer than printing the help.
"""

from __future__ import annotations

import ast
import errno
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, cast

import typer
from typer.core import TyperCommand, TyperGroup

from cp_plugin.tools import output

PROGRAM = "cp-plugin"
JSON = "--json"
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])  # click's, or that of the copy within typer


class _Main:
    """``main`` of a command and of the whole program: one line for an error of usage, and exit status 2."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **settings: Any) -> Any:
        """Run a command line; its prefix in messages is the program's name, however it was started."""
        settings["standalone_mode"] = False
        words = list(sys.argv[1:] if args is None else args)
        try:
            status = super().main(args, PROGRAM, **settings)  # type: ignore[misc]
            sys.stdout.flush()
        except _UsageError as error:
            output.error(_describe_error(error, words))
            status = 2
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            output.error(f"cannot write {error.filename or 'the output'}: {error.strerror}")
            sys.stdout = None  # type: ignore[assignment]  # its buffer would be written again at exit
            status = 1
        except typer.Abort:
            typer.echo("interrupted", err=True)
            status = 1
        sys.exit(status if isinstance(status, int) else 0)


class Command(_Main, TyperCommand):
    """A command whose ``--json`` may go without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give ``--json`` its value: the next word, unless that is an option."""
        last = args.index("--") if "--" in args else len(args)
        for i in [i for i, word in enumerate(args[:last]) if word == JSON]:
            if i + 1 >= last or (args[i + 1].startswith("-") and args[i + 1] != output.STDOUT):
                args = [*args[:i], f"{JSON}={output.STDOUT}", *args[i + 1 :]]
        return super().parse_args(ctx, args)


class Later(TyperCommand):
    """A command that is imported when it is run; the list of all shows its help, which is read from the source."""

    def __init__(self, name: str, module: str) -> None:
        path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
        body = ast.parse(path.read_text(encoding="utf-8")).body
        command = next(node for node in body if getattr(node, "name", "") == name)
        super().__init__(name, help=_help(ast.get_docstring(command)))  # type: ignore[arg-type]
        self.module = module

    def load(self) -> Any:
        """Import the command."""
        module = import_module(f"{__package__}.{self.module}")
        return typer.main.get_command(program_of(getattr(module, str(self.name))))

    def make_context(self, *args: Any, **settings: Any) -> Any:
        """Parse the words for the command itself."""
        return self.load().make_context(*args, **settings)


class Group(_Main, TyperGroup):
    """A program of the commands in ``modules``: of each name the module, below ``cp_plugin.tools``."""

    modules: ClassVar[Mapping[str, str]]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: Later(name, module) for name, module in self.modules.items()}  # type: ignore[assignment]


def context(**settings: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command these settings of its context."""

    def given(command: Callable[..., Any]) -> Callable[..., Any]:
        command.context_settings = settings  # type: ignore[attr-defined]
        return command

    return given


def new_app(**settings: Any) -> typer.Typer:
    """A program, in which ``-h`` is ``--help``."""
    return typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, **settings)


def program_of(command: Callable[..., Any]) -> typer.Typer:
    """A program of this command alone."""
    app = new_app(add_completion=False)
    settings = getattr(command, "context_settings", None)
    app.command(cls=Command, help=_help(command.__doc__), context_settings=settings)(command)
    return app


def _help(docstring: str | None) -> str:
    """A docstring for a terminal: a line for each paragraph, no mark-up."""
    paragraphs = inspect.cleandoc(docstring or "").replace("``", "").split("\n\n")
    return "\n\n".join(" ".join(text.split()) for text in paragraphs)


def _describe_error(error: Any, words: Sequence[str]) -> str:
    """An error of usage, with the refused value, which typer leaves out, or where the right one is found."""
    if type(error) is typer.BadParameter:
        flags = error.param.opts if error.param is not None else ()
        given = [f"{word} {value}" for word, value in pairwise(words) if word in flags]
        given += [word.replace("=", " ", 1) for word in words if word.partition("=")[0] in flags and "=" in word]
        message = str(error.message).removeprefix("Value error, ")
        return f"{', '.join(given)}: {message}" if given and not message.startswith("--") else message
    text = " ".join(error.format_message().split())
    where = f" {error.ctx.command_path} -h shows what it takes" if error.ctx is not None else ""
    return f"{text}{'' if text[-1] in '.?' else '.'}{where}"
