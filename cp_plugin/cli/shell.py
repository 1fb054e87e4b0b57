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
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, cast, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo, OptionInfo

from cp_plugin.cli import output
from cp_plugin.common.names import did_you_mean, not_one_of

PROGRAM = "cp-plugin"
JSON = "--json"
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_SHORT = 24
"""Columns of a placeholder; choices that take more are listed in the help text."""
_HELP = {
    "-h": "show this help",
    "--help": "show this help",
    "--install-completion": "install completion for this shell",
    "--show-completion": "print the completion for this shell, to copy or to adapt",
}
"""Of options that typer adds, in the style of all others."""
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])  # click's, or that of the copy within typer


class Wrong(typer.BadParameter):
    """A value that an option does not take; the message is complete."""


class _Main:
    """``main`` of a command and of the whole program: one line for an error of usage, and exit status 2."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters; that a switch takes no value, and which Python type an argument has, is noise in the help."""
        found = super().get_params(ctx)  # type: ignore[misc]
        for param in found:
            if param.opts[0] in _HELP:
                param.help = _HELP[param.opts[0]]
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
            output.error(_in_one_line(error))
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
        if any(JSON in param.opts for param in self.params):
            for i in [i for i, word in enumerate(args[:last]) if word == JSON]:
                if i + 1 >= last or (args[i + 1].startswith("-") and args[i + 1] != output.STDOUT):
                    args = [*args[:i], f"{JSON}={output.STDOUT}", *args[i + 1 :]]
        return super().parse_args(ctx, args)


class Later(Mapping[str, Any]):
    """Commands by name, each imported when it is looked up; modules: of each name, below ``cp_plugin.cli``."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self.modules = modules

    def __getitem__(self, name: str) -> Any:
        module = import_module(f"{__package__}.{self.modules[name]}")
        alone = new_app(add_completion=False)
        register(alone, getattr(module, name))
        return typer.main.get_command(alone)

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)


class Group(_Main, TyperGroup):
    """A program of the commands in ``modules``."""

    modules: ClassVar[Mapping[str, str]]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Later(self.modules)  # type: ignore[assignment]

    def list_commands(self, ctx: Any) -> list[str]:
        """The names."""
        return list(self.modules)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What a list of all commands shows of one."""
        return _listed(cmd_name, self.modules[cmd_name]) if cmd_name in self.modules else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that is run."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and self.commands[command.name], rest


def _listed(name: str, module: str) -> TyperCommand:
    """A command's name and help, from its source."""
    path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    command = next(node for node in body if getattr(node, "name", "") == name)
    return TyperCommand(name, help=_help(ast.get_docstring(command)))  # type: ignore[arg-type]


def context(**settings: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command these settings of its context."""

    def given(command: Callable[..., Any]) -> Callable[..., Any]:
        command.context_settings = settings  # type: ignore[attr-defined]
        return command

    return given


def register(app: typer.Typer, command: Callable[..., Any]) -> None:
    """Add a command to the program."""
    settings = getattr(command, "context_settings", None)
    app.command(cls=Command, help=_help(command.__doc__), context_settings=settings)(_plain(command))


def new_app(**settings: Any) -> typer.Typer:
    """A program, in which ``-h`` is ``--help``."""
    return typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, **settings)


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
    annotation = parameter.annotation
    if annotation is typer.Context:
        return parameter
    of, info = annotation, None
    if get_origin(annotation) is Annotated:
        of, info = annotation.__origin__, next(iter(annotation.__metadata__))
    item = _item(of)
    info = copy.copy(info) if isinstance(info, ArgumentInfo | OptionInfo) else typer.Option()  # commands share them
    if isinstance(info, ArgumentInfo):
        info.metavar = info.metavar or parameter.name.upper()
        return parameter.replace(annotation=Annotated[of, info])
    words = (info.default, *(info.param_decls or ()), f"--{parameter.name.replace('_', '-')}")
    flag = next(word for word in words if isinstance(word, str) and word.startswith("--"))
    if item is not bool:
        _read_by(info, flag, item)
        info.metavar = info.metavar or _placeholder(item)
    elif "/" not in flag:
        info.show_default = False
    return parameter.replace(annotation=Annotated[of, info])


def _item(annotation: Any) -> Any:
    """The type of one value: that of ``list[int] | None`` is int."""
    inside = [_item(one) for one in get_args(annotation) if one is not NoneType]
    return inside[0] if inside else annotation


def _placeholder(item: Any) -> str:
    if issubclass(item, StrEnum):
        listed = f"[{'|'.join(item)}]"
        return listed if len(listed) <= _SHORT else "NAME"
    return {int: "N", float: "X", Path: "FILE"}.get(item, "TEXT")


def _read_by(info: OptionInfo, flag: str, item: Any) -> None:
    """Let a value be read here, so that a wrong one is refused as all else is."""
    least, most = info.min, info.max
    info.min = info.max = None
    if issubclass(item, StrEnum):
        if len(f"[{'|'.join(item)}]") > _SHORT:
            info.help = "; ".join(filter(None, (", ".join(item), info.help)))
        info.parser = lambda text: _one_of(flag, text, item)
    elif issubclass(item, int | float):
        info.parser = lambda text: _number(flag, text, item, least, most)
    elif flag == JSON:
        info.parser = _json_file


def _one_of(flag: str, text: str, known: type[StrEnum]) -> StrEnum:
    if text not in list(known):
        raise Wrong(not_one_of(f"{flag} {text}", text, known))
    return known(text)


def _number(flag: str, text: Any, kind: type[int | float], least: float | None, most: float | None) -> int | float:
    try:
        found = kind(text)
    except ValueError:
        found = None
    if (
        found is None
        or not str(text).isascii()
        or (least is not None and not found >= least)
        or (most is not None and found > most)
    ):
        what = "a whole number" if kind is int else "a number"
        limits = f" from {least:g} to {most:g}" if least is not None and most is not None else ""
        limits = limits or ("" if least is None else f", {least:g} or more")
        raise Wrong(f"{flag} {text}: write {what}{limits}")
    return found


def _json_file(text: Any) -> Path:
    try:
        return output.json_file(Path(text))
    except ValueError as error:
        raise Wrong(str(error)) from None


def _in_one_line(error: Any) -> str:
    """An error of usage, as all others are: the option, what is wrong, what to write."""
    if isinstance(error, Wrong):
        return str(error.message)
    ctx, param = error.ctx, getattr(error, "param", None)
    path = ctx.command_path if ctx is not None else PROGRAM
    if param is not None and type(error).__name__ == "MissingParameter":
        name = param.opts[0] if param.param_type_name == "option" else param.metavar
        return f"{name} is missing: {param.help}"
    if (name := getattr(error, "option_name", None)) is not None and type(error).__name__ == "NoSuchOption":
        known = [option for one in ctx.command.get_params(ctx) for option in one.opts]
        return f"{name}: no such option{did_you_mean(name, known) or '.'} {path} -h lists all"
    if found := re.match(r"No such command '(.*?)'", error.format_message()):
        return f"{found[1]}: no such command{did_you_mean(found[1], ctx.command.commands) or '.'} {path} -h lists all"
    if name is not None:
        return f"{name} is missing its value"
    text = error.format_message().rstrip(".")
    if extra := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", text):
        return f"{extra[1]}: unexpected argument. {path} -h shows what it takes"
    return f"{text[:1].lower()}{text[1:]}. {path} -h shows what it takes"
