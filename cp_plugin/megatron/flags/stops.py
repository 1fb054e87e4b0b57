"""Why Megatron stops before it trains, in one line: most of its assertions name no flag, and its crashes no cause."""

from __future__ import annotations

import argparse
import linecache
import os
import re
import sysconfig
import traceback
from types import FrameType

import torch.distributed as dist

CRASHES = (ArithmeticError, LookupError, AttributeError, TypeError)
"""What the validation raises by mistake, such as a division by a size of 0."""
_ON_PURPOSE = ("raise", "assert")
_WORDS = 3  # characters of the shortest meaningful message
_PASSING_ON = ("cp_plugin.megatron.patches.patching", "cp_plugin.megatron.cpu.cuda_surface")
"""Our modules that call what Megatron would call without them."""
WHOLE = "CP_PLUGIN_TRACEBACK"
"""Environment variable that asks for the traceback."""
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib"))


def reason(error: BaseException, args: argparse.Namespace | None = None, said: str | None = None) -> str:
    """The flags that the line that stops, or the nearest caller's, reads; that line if the message is not enough; both.

    args, said: where the flags' values are, if known; a summary of the message, for all of it.
    """
    frame, number = stopped(error) or [*traceback.walk_tb(error.__traceback__)][-1]
    said = " ".join((str(error) if said is None else said).split()).rstrip(".")
    line = linecache.getline(frame.f_code.co_filename, number).strip().rstrip("\\ ")
    bare = len(said) < _WORDS or isinstance(error, CRASHES) or not line.startswith(_ON_PURPOSE)
    parts = [flags_read(error, args, ("megatron.", "cp_plugin.megatron.")) if bare or args else "", said]
    if bare:
        numbers = {name: frame.f_locals.get(name) for name in re.findall(r"(?<![.\w])[a-z_]\w*", line)}
        values = [f"{name} = {value}" for name, value in numbers.items() if type(value) in (int, float)]
        parts.insert(1, f"stops at {line} with {', '.join(values)}" if values else f"stops at {line}")
    return f"{': '.join(filter(None, parts))} ({os.path.basename(frame.f_code.co_filename)}:{number})"


def flags_read(error: BaseException, args: object, package: str | tuple[str, ...]) -> str:
    """The flags, with values, in the innermost line of such modules that reads some: where it stops, or its caller."""
    for frame, number in reversed([*traceback.walk_tb(error.__traceback__)]):
        names = re.findall(r"\bargs\.(\w+)", linecache.getline(frame.f_code.co_filename, number))
        if names and frame.f_globals.get("__name__", "").startswith(package):
            return ", ".join(_shown(name, getattr(args, name, None) if args else True) for name in dict.fromkeys(names))
    return ""


def stopped(error: BaseException) -> tuple[FrameType, int] | None:
    """Megatron's frame, and its line, where an error was raised, or in a library below; None: other code raised it.

    None, too, for a collective, which fails with another rank.
    """
    if isinstance(error, dist.DistError) or re.match(r"\[[^]]*\.cc:\d+\]", str(error)):
        return None
    for frame, number in reversed([*traceback.walk_tb(error.__traceback__)]):
        owner = _owner(frame)
        if owner != "library":
            return (frame, number) if owner == "megatron" else None
    return None


def _owner(frame: FrameType) -> str:
    module, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
    if module.startswith("megatron."):
        return "megatron"
    if module == "torch.distributed.distributed_c10d":
        return "collective"
    return "library" if module.startswith(_PASSING_ON) or file.startswith(("<", *_LIBRARIES)) else "other"


def _shown(name: str, value: object) -> str:
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return f"{flag} (not given)"
    return flag if isinstance(value, bool) else f"{flag} {value}"
