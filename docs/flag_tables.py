"""Tables of the flags, from the parser, and of the commands, from their help."""

from __future__ import annotations

import argparse

import markdown_tables as markdown
import typer

from cp_plugin.engine.methods import registry as providers
from cp_plugin.megatron.flags import linear_flags, option_flags
from cp_plugin.megatron.flags.args import add_arguments
from cp_plugin.tools.app import app

_OPTIONS = {option.flag: option for option in providers.registry().options.values()}


def flags_table(section: str) -> str:
    """The flags of ``softmax`` attention, of ``linear`` attention, or of the ``run``."""
    if section not in ("softmax", "linear", "run"):
        raise ValueError(f"no section {section!r} of flags: there are softmax, linear, run")
    actions = add_arguments(argparse.ArgumentParser(add_help=False))._actions
    rows = [_row(action, section) for action in actions if _section(action.option_strings[0]) == section]
    return markdown.table(("flag", "meaning", "default", *(("providers",) if section == "softmax" else ())), rows)


def commands_table() -> str:
    """Every command of ``cp-plugin``, with the first paragraph of its help."""
    commands = sorted(typer.main.get_command(app).commands.items())  # type: ignore[attr-defined]
    rows = [(f"`cp-plugin {name}`", " ".join((one.help or "").split("\n\n")[0].split())) for name, one in commands]
    return markdown.table(("command", "what it does"), rows)


def _section(flag: str) -> str:
    if flag in linear_flags.FLAGS:
        return "linear"
    return "softmax" if flag in _OPTIONS or flag in ("--cp-provider", "--cp-cluster") else "run"


def _row(action: argparse.Action, section: str) -> list[str]:
    flag = action.option_strings[0]
    meaning, _, default = (action.help or "").partition("Default: ")
    if flag in _OPTIONS:
        meaning = _OPTIONS[flag].meaning
    switch = action.nargs == 0
    default = default.strip() or ("off" if switch else "none")
    cells = [f"`{flag}`" if switch else f"`{flag} {action.metavar}`", meaning.strip().rstrip(".;"), default]
    if section == "softmax":
        names = option_flags.takers(_OPTIONS[flag]) if flag in _OPTIONS else providers.names()
        cells.append("all" if names == providers.names() else ", ".join(f"`{name}`" for name in names))
    return [cell.replace("|", " or ") for cell in cells]
