"""The ``cp-plugin`` command. It reads words by typer, but errors are one line.

A command is imported when it runs: torch alone takes longer than printing the help.
"""

from __future__ import annotations

import ast
import errno
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import typer
from typer.core import TyperCommand, TyperGroup

from cp_plugin import __version__
from cp_plugin.tools import output

PROGRAM = "cp-plugin"
_SETTINGS = {"help_option_names": ["-h", "--help"]}
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])  # click's, or that of the copy within typer


class Later(TyperCommand):
    """A command that is imported when it is run; the list of all shows its help, which is read from the source."""

    def __init__(self, name: str, module: str) -> None:
        path = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
        body = ast.parse(path.read_text(encoding="utf-8")).body
        super().__init__(name, help=next(ast.get_docstring(x) for x in body if getattr(x, "name", "") == name))  # type: ignore[arg-type]
        self.module = module

    def load(self) -> Any:
        """Import the command."""
        command = getattr(import_module(f"{__package__}.{self.module}"), str(self.name))
        alone = typer.Typer(add_completion=False, context_settings=_SETTINGS)
        alone.command()(command)
        return typer.main.get_command(alone)

    def make_context(self, *args: Any, **settings: Any) -> Any:
        """Parse the words for the command itself."""
        return self.load().make_context(*args, **settings)


class Program(TyperGroup):
    """``cp-plugin``: of each command the module, below ``cp_plugin.tools``."""

    modules: ClassVar = {
        "doctor": "doctor",
        "draw": "draw.cli",
        "traffic": "traffic",
        "verify": "verify",
        "bench": "bench.cli",
        "calibrate": "calibrate",
        "dataset": "dataset",
        "example": "examples.cli",
        "plan": "plan",
    }

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: Later(name, module) for name, module in self.modules.items()}  # type: ignore[assignment]

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **settings: Any) -> Any:
        """Run a command line. An error of usage is one line, and exit status 2; the program's name is always the same,
        however it was started."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            status = super().main(words, PROGRAM, **{**settings, "standalone_mode": False})
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


def _describe_error(error: Any, words: Sequence[str]) -> str:
    """An error of usage, with the refused value, which typer leaves out, or where the right one is found."""
    if type(error) is typer.BadParameter:
        flags = error.param.opts if error.param is not None else ()
        pairs = [*pairwise(words), *(word.split("=", 1) for word in words if "=" in word)]
        refused = [f"{flag} {value}" for flag, value in pairs if flag in flags]
        message = str(error.message).removeprefix("Value error, ")
        return f"{', '.join(refused)}: {message}" if refused and not message.startswith("--") else message
    text = " ".join(error.format_message().split())
    where = f" {error.ctx.command_path} -h shows what it takes" if error.ctx is not None else ""
    return f"{text}{'' if text[-1] in '.?' else '.'}{where}"


app = typer.Typer(
    cls=Program,
    context_settings=_SETTINGS,
    help="Context parallelism for Megatron-LM, NeMo, transformers and plain PyTorch.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
