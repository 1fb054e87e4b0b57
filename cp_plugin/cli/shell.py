"""How every command reads its words: placeholders, ``--json [FILE]``, and errors in one line.

typer's own help shows ``<int range> [x>=1]`` and ``<bool>``, its errors are boxes, and an option's value is never
optional. ``register`` gives a command what typer lacks, from the annotations that it has anyway. A program imports a
command when it runs it: torch alone takes longer than printing the help.
"""

from __future__ import annotations

import ast
import copy
import errno
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, cast, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo, OptionInfo

from cp_plugin.cli import output
from cp_plugin.common.names import one_of

PROGRAM = "cp-plugin"
JSON = "--json"
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_SHORT = 24
"""Columns of a placeholder; choices that take more are listed in the help text."""
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])  # click's, or that of the copy within typer


class _Main:
    """``main`` of a command and of the whole program: one line for an error of usage, and exit status 2."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters; that a switch takes no value, and which Python type an argument has, is noise in the help."""
        found = super().get_params(ctx)  # type: ignore[misc]
        for param in found:
            if param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: None
            elif param.is_flag:
                param.metavar = ""
        return found

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **settings: Any) -> Any:
        """Run a command line; its prefix in messages is the program's name, however it was started."""
        settings["standalone_mode"] = False
        try:
            status = super().main(args, PROGRAM, **settings)  # type: ignore[misc]
            sys.stdout.flush()
        except _UsageError as error:
            output.error(_describe_error(error))
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
    """A program of the commands in ``modules``: of each name the module, below ``cp_plugin.cli``."""

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
    app.command(cls=Command, help=_help(command.__doc__), context_settings=settings)(_plain(command))
    return app


def _help(docstring: str | None) -> str:
    """A docstring for a terminal: a line for each paragraph, no mark-up."""
    paragraphs = inspect.cleandoc(docstring or "").replace("``", "").split("\n\n")
    return "\n\n".join(" ".join(text.split()) for text in paragraphs)


def _plain(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with placeholders and checks of its own in place of typer's."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [_parameter(one) for one in signature.parameters.values()]

    def called(**arguments: Any) -> Any:
        return command(**arguments)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return called


def _parameter(parameter: inspect.Parameter) -> inspect.Parameter:
    if parameter.annotation is typer.Context:
        return parameter
    of, info = get_args(parameter.annotation)
    info, item = copy.copy(info), _item(of)  # commands share the first
    if isinstance(info, ArgumentInfo):
        info.metavar = info.metavar or parameter.name.upper()
    elif item is bool:
        info.show_default = "/" in str(info.default)
    else:
        words = (info.default, *(info.param_decls or ()), f"--{parameter.name.replace('_', '-')}")
        flag = next(word for word in words if isinstance(word, str) and word.startswith("--"))
        _read_by(info, flag, item)
    return parameter.replace(annotation=Annotated[of, info])


def _item(annotation: Any) -> Any:
    """The type of one value: that of ``list[int] | None`` is int."""
    inside = [_item(one) for one in get_args(annotation) if one is not NoneType]
    return inside[0] if inside else annotation


def _read_by(info: OptionInfo, flag: str, item: Any) -> None:
    """Give an option its placeholder, and let its value be read here, so that a wrong one is refused as all else is."""
    parse = info.parser
    placeholder = {int: "N", float: "X", Path: "FILE"}.get(item, "TEXT")
    if issubclass(item, StrEnum):
        parse = partial(_one_of, flag, item)
        placeholder = f"[{'|'.join(item)}]"
        if len(placeholder) > _SHORT:
            info.help, placeholder = f"{', '.join(item)}; {info.help}", "NAME"
    elif issubclass(item, int | float):
        parse = partial(_number, flag, item, info.min, info.max)
        info.min = info.max = None
    info.metavar = info.metavar or placeholder
    if parse is not None:
        info.parser = partial(_read, parse)


def _read(parse: Callable[[Any], Any], text: Any) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _one_of(flag: str, known: type[StrEnum], text: str) -> StrEnum:
    one_of(flag, text, known)
    return known(text)


def _number(flag: str, kind: type[int | float], least: float | None, most: float | None, text: Any) -> int | float:
    with suppress(ValueError):
        found = kind(text)
        if str(text).isascii() and (least is None or found >= least) and (most is None or found <= most):
            return found
    what = "a whole number" if kind is int else "a number"
    limits = "" if least is None else f", {least:g} or more" if most is None else f" from {least:g} to {most:g}"
    raise ValueError(f"{flag} {text}: write {what}{limits}")


def _describe_error(error: Any) -> str:
    """An error of usage: ours as it is, typer's with the command whose help says what is right."""
    if type(error) is typer.BadParameter:
        return str(error.message)
    text = " ".join(error.format_message().split())
    where = f" {error.ctx.command_path} -h shows what it takes" if error.ctx is not None else ""
    return f"{text}{'' if text[-1] in '.?' else '.'}{where}"
