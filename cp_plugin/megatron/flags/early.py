"""Checks of a command line before Megatron is imported and before ranks are forked.

Names, values, and a number of ranks over which the model cannot be divided; how a provider's options fit together, the
ranks and the model is checked once Megatron has parsed its flags.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from cp_plugin.engine.common.names import not_one_of
from cp_plugin.megatron.flags import args
from cp_plugin.megatron.flags.linear_flags import attribute
from cp_plugin.testing.nproc import split_nproc

_SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
_OF_MEGATRON: dict[str, type] = {
    **dict.fromkeys(_SIZES, int),
    "--hybrid-layer-pattern": str,
    "--recompute-granularity": str,
    **{f"--linear-{name}": int for name in ("num-value-heads", "key-head-dim", "value-head-dim")},
}
"""Megatron's flags that ``args.settings_from`` reads; its default for all sizes of ranks is 1."""


def check(words: Sequence[str], ranks: int | None = None, start: str = "") -> None:
    """ValueError for misspelt flags, unknown names, unreadable values, conflicts of flags, and too few or many ranks.

    Args:
        ranks: started ranks; None: not known.
        start: a command that starts the right number, with ``{ranks}`` in place of it.
    """
    if {"-h", "--help"} & set(words):
        return
    args.refuse_yaml(words)
    parser = args.add_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    shorten_errors(parser)
    known = args.flags_of(parser)
    for flag, kind in _OF_MEGATRON.items():
        parser.add_argument(flag, type=kind, default=1 if kind is int else None)
    parser.add_argument("--fake-process-group", action="store_true")
    parsed, others = parser.parse_known_args(_with_values(words, known))
    refuse_misspelt([word for word in others if word.startswith("--cp")], known)
    args.settings_from(parsed)
    if ranks is not None and not parsed.fake_process_group:
        _check_ranks(parsed, ranks, start)


def _with_values(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The words, with a value such as ``-1x4`` joined to its flag: argparse would take it for a flag of its own."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in flags and re.match(r"-\d", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def shorten_errors(parser: argparse.ArgumentParser) -> None:
    """Let a parser raise its errors as ValueErrors: Megatron's would print the usage of hundreds of flags before."""
    unknown = "unrecognized arguments: "

    def error(message: str) -> NoReturn:
        if message.startswith(unknown):
            refuse_misspelt(message.removeprefix(unknown).split(), args.flags_of(parser))
        raise ValueError(plain_usage(message))

    parser.error = error  # type: ignore[method-assign]


def refuse_misspelt(words: Sequence[str], known: Sequence[str]) -> None:
    """ValueError for flags that are not known, but close to one that is."""
    wrong = []
    for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
        if near := get_close_matches(flag, known, n=1, cutoff=0.85):
            wrong.append(f"{flag}: no such flag; did you mean {near[0]}?")
    if wrong:
        raise ValueError(" | ".join(wrong))


def started_ranks(words: Sequence[str]) -> int:
    """The ranks that ``--nproc`` in front of a command line starts, or else that a launcher has started."""
    nproc, _ = split_nproc(list(words))
    return nproc or int(os.environ.get("WORLD_SIZE", "1"))


def _check_ranks(parsed: argparse.Namespace, ranks: int, start: str) -> None:
    sizes = {flag: getattr(parsed, attribute(flag)) for flag in _SIZES}
    total = math.prod(sizes.values())
    if total > 0 and ranks % total:
        factors = [f"{flag} {size}" for flag, size in sizes.items() if size != 1]
        product = f"{' x '.join(factors)} = {total}" if len(factors) > 1 else factors[0]
        raise ValueError(
            f"{product} needs {f'a multiple of {total}' if ranks > total else total} ranks, but {ranks} "
            f"{'was' if ranks == 1 else 'were'} started: use {start.format(ranks=total)}, or torchrun --nproc-per-node "
            f"{total} without --nproc"
        )


def reason(error: Exception) -> str:
    """Why the validation of the flags fails, in one line: the message, or else the line of code that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(str(error).split()).rstrip(".") or last.line
    return f"the flags are refused: {said} ({'/'.join(Path(last.filename).parts[-3:])}:{last.lineno})"


_NUMBERS = {"int": "a whole number", "float": "a number"}


def plain_usage(message: str) -> str:
    """argparse's errors in the words of all other refusals: the flag, its value, what to write; others as they are."""
    text = message.removeprefix("argument ")
    if match := re.fullmatch(r"(\S+): expected (?:one|at least one) argument", text):
        return f"{match[1]} is missing its value"
    if match := re.fullmatch(r"(\S+): invalid (int|float) value: '(.*)'", text):
        return f"{match[1]} {match[3]}: write {_NUMBERS[match[2]]}"
    if match := re.fullmatch(r"(\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)", text):
        return not_one_of(f"{match[1]} {match[2]}", match[2], re.findall(r"[^', ]+", match[3]))
    if match := re.fullmatch(r"unrecognized arguments: (.*)", text):
        flags = any(word.startswith("-") for word in match[1].split())
        return f"no such flags: {match[1]}" if flags else f"{match[1]}: belongs to no flag; flags begin with --"
    return text
