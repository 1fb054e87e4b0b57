"""argparse's errors in the words of all other refusals: the flag, its value, what to write."""

from __future__ import annotations

import re

from cp_plugin.common.names import not_one_of

_NUMBERS = {"int": "a whole number", "float": "a number"}


def plain(message: str) -> str:
    """An error of argparse; others are returned as they are."""
    text = message.removeprefix("argument ")
    if found := re.fullmatch(r"(\S+): expected (?:one|at least one) argument", text):
        return f"{found[1]} is missing its value"
    if found := re.fullmatch(r"(\S+): invalid (int|float) value: '(.*)'", text):
        return f"{found[1]} {found[3]}: write {_NUMBERS[found[2]]}"
    if found := re.fullmatch(r"(\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)", text):
        return not_one_of(f"{found[1]} {found[2]}", found[2], re.findall(r"[^', ]+", found[3]))
    if found := re.fullmatch(r"unrecognized arguments: (.*)", text):
        flags = any(word.startswith("-") for word in found[1].split())
        return f"no such flags: {found[1]}" if flags else f"{found[1]}: belongs to no flag; flags begin with --"
    return text
