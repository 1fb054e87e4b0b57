"""The reference of the flags, from the parser itself, and of the commands, from the command line's own help."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import markdown_tables as markdown
import typer

from cp_plugin.cli.app import app
from cp_plugin.megatron.flags import linear_flags, option_flags
from cp_plugin.megatron.flags.args import add_arguments
from cp_plugin.methods import registry as providers

_OPTIONS = {option.flag: option for option in providers.registry().options.values()}
_SECTIONS = ("softmax", "linear", "run")


def flags_table(section: str) -> str:
    """The flags of softmax attention, of linear attention, or of the run.

    Raises:
        ValueError: if there is no such section.
    """
    if section not in _SECTIONS:
        raise ValueError(f"no section {section!r} of flags: there are {', '.join(_SECTIONS)}")
    titles = ("flag", "meaning", "default", *(("providers",) if section == "softmax" else ()))
    rows = [_row(action, section) for action in _actions() if _section(action) == section]
    return markdown.table(titles, rows)


def commands_table() -> str:
    """Every command of ``cp-plugin``, with the first sentence of its help."""
    group = typer.main.get_command(app)
    rows = []
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        rows.append((f"`cp-plugin {name}`", " ".join((command.help or "").split("\n\n")[0].split())))
    return markdown.table(("command", "what it does"), rows)


def _actions() -> Iterator[argparse.Action]:
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    yield from parser._actions


def _section(action: argparse.Action) -> str:
    flag = action.option_strings[0]
    if flag in linear_flags.FLAGS:
        return "linear"
    return "softmax" if flag in _OPTIONS or flag in ("--cp-provider", "--cp-cluster") else "run"


def _row(action: argparse.Action, section: str) -> list[str]:
    flag = action.option_strings[0]
    meaning, _, default = (action.help or "").partition("Default: ")
    if flag in _OPTIONS:
        meaning = _OPTIONS[flag].meaning
    if action.nargs == 0 and not default:
        default = "off"
    written = f"`{flag} {action.metavar}`" if action.nargs != 0 else f"`{flag}`"
    cells = [written, meaning.strip().rstrip(".;"), default.strip() or "none"]
    if section == "softmax":
        cells.append(_takers(flag))
    return [cell.replace("|", " or ") for cell in cells]


def _takers(flag: str) -> str:
    if flag not in _OPTIONS:
        return "all"
    found = option_flags.takers(_OPTIONS[flag])
    return "all" if found == providers.names() else ", ".join(f"`{name}`" for name in found)
