"""Refusals: errors whose message is all that a user needs.

A ValueError, ModuleNotFoundError or FileNotFoundError that this package raises itself names what was given, why it does
not work, and what to do. It ends a program with that message alone; every other error keeps its traceback.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from opcode import opmap
from pathlib import Path
from types import TracebackType

from cp_plugin.engine.common.text import wrap_for_terminal

STATUS = 2
"""Exit status after a refusal."""
KINDS = (ValueError, ModuleNotFoundError, FileNotFoundError)
_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
_PATIENCE_S = 10.0


def message_of(error: BaseException | None) -> str | None:
    """The message of a refusal with its notes; None for any other error."""
    if not isinstance(error, KINDS) or error.__traceback__ is None:
        return None
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    ours = code.co_filename.startswith(_PACKAGE) and code.co_code[last.tb_lasti] == opmap["RAISE_VARARGS"]
    return "\n".join([str(error), *getattr(error, "__notes__", ())]) if ours else None


def say(message: str) -> None:
    """Print a refusal to stderr, once per node.

    Ranks usually refuse the same. The first rank of a node speaks at once; another waits, and speaks only if its
    launcher, which stops all ranks once one has failed, lets it live that long.
    """
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) != "0":
        time.sleep(_PATIENCE_S)
    print(wrap_for_terminal(f"cp_plugin: {message}", sys.stderr), file=sys.stderr, flush=True)


def exit_status(main: Callable[[], int]) -> int:
    """Return what ``main`` returns; if it ends in a refusal, print that and return ``STATUS``."""
    try:
        return main()
    except KINDS as error:
        if (message := message_of(error)) is None:
            raise
        say(message)
        return STATUS


def print_uncaught() -> None:
    """Make an uncaught refusal end this process with its message alone; idempotent."""
    before = sys.excepthook
    if getattr(before, "__module__", None) == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (message := message_of(error)) is None:
            before(kind, error, trace)
        else:
            say(message)

    sys.excepthook = hook


@contextlib.contextmanager
def output_held() -> Iterator[None]:
    """Print what is written to ``sys.stdout`` at the end of the ``with`` block, unless that ends in a refusal."""
    held = io.StringIO()
    try:
        with contextlib.redirect_stdout(held):
            yield
    except BaseException as error:
        if message_of(error) is None:
            sys.stdout.write(held.getvalue())
        raise
    sys.stdout.write(held.getvalue())
