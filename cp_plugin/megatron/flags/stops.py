"""Why Megatron's validation of a command line stops, in one line: most of its assertions name no flag."""

from __future__ import annotations

import argparse
import os
import re
import traceback

KINDS = (AssertionError, ValueError, RuntimeError)
"""What the validation raises on purpose."""
_WORDS = 3  # characters of the shortest meaningful message
BARE = (ArithmeticError, LookupError, AttributeError)
"""Errors without a message, such as a division by a size of 0."""


def reason(error: BaseException, args: argparse.Namespace | None = None) -> str:
    """Megatron's message, or the line that stops; with ``args`` after the flags in that line, and their values."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said, line = " ".join(str(error).split()), (frame.line or "").rstrip("\\ ")
    bare = len(said) < _WORDS or isinstance(error, BARE)
    place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
    why = f"Megatron stops at: {line} ({place}): {said}".rstrip(": ") if bare else said
    if args is None and not bare:
        return said
    named = dict.fromkeys(re.findall(r"\bargs\.(\w+)", line))
    flags = ", ".join(_shown(name, getattr(args, name, None)) for name in named)
    return f"{flags}: {why}" if flags else why


def _shown(name: str, value: object) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is None or isinstance(value, bool) else f"{flag} {value}"
