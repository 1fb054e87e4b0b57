"""The self-contained scripts of an example: ``train.sh`` on every node, and ``train.sbatch`` around it under Slurm.

Their text is in ``templates``; here stands what of it depends on the example.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files

from cp_plugin.cli.examples.command import Changes, Command, saving
from cp_plugin.cli.examples.config import Example
from cp_plugin.cli.examples.sizes import usable

SECTIONS = ("model", "parallel", "training", "data", "logging", "saving", "more")
"""The bash arrays of flags, in their order."""
SCRIPTS = ("sh", "sbatch")
_WIDTH = 110


def rendered(
    example: Example,
    what: str,
    variant: str | None = None,
    seq_length: int | None = None,
    changes: Changes | None = None,
) -> str:
    """``sh`` or ``sbatch`` for this choice; without a variant, for all, of which the base is the default.

    Raises:
        ValueError: as ``command`` does, of any of the variants.
    """
    chosen = [example.experiment(variant).variant] if variant is not None else example.variants
    commands = {name: usable(example, name, seq_length if name == chosen[0] else None, changes) for name in chosen}
    if what == "sbatch":
        return train_sbatch(commands, example.name)
    lengths = {
        name: [c.seq_length, *(n for n in c.experiment.lengths if n != c.seq_length)] for name, c in commands.items()
    }
    return train_sh(commands, example.name, lengths)


def train_sh(commands: Mapping[str, Command], name: str, lengths: Mapping[str, Sequence[int]]) -> str:
    """The script for these variants, of which the first is the default, as is the first of each one's lengths."""
    first = next(iter(commands.values()))
    fields = {
        "title": first.experiment.config.title,
        "name": name,
        "variants": ", ".join(commands),
        "default": next(iter(commands)),
        "nodes": str(first.nodes),
        "per_node": str(first.per_node),
        "shared": _arrays(_shared(commands)),
        "cases": "\n".join(
            _case(variant, command, commands, lengths[variant]) for variant, command in commands.items()
        ),
        "connections": _connections(commands),
        "positions": "" if "max-position-embeddings" in _given(first) else ' --max-position-embeddings "$seq_length"',
    }
    return _filled("train.sh", fields)


def train_sbatch(commands: Mapping[str, Command], name: str) -> str:
    """The Slurm job for the first of these."""
    first = next(iter(commands.values()))
    fields = {
        "title": first.experiment.config.title,
        "name": name,
        "nodes": str(first.nodes),
        "per_node": str(first.per_node),
        "cpus": str(8 * first.per_node),
    }
    return _filled("train.sbatch", fields)


def _filled(template: str, fields: Mapping[str, str]) -> str:
    text = files("cp_plugin.cli.examples").joinpath("templates", template).read_text(encoding="utf-8")
    for field, value in fields.items():
        text = text.replace(f"@{field}@", value)
    return text


def _given(command: Command) -> set[str]:
    return {flag for some in command.sections.values() for flag in some}


def _sections(command: Command) -> dict[str, list[str]]:
    """Section -> a line for each flag."""
    lines = {**command.lines, "saving": [saving(command)]}
    return {section: [shlex.join(words) for words in lines.get(section, []) if words] for section in SECTIONS}


def _shared(commands: Mapping[str, Command]) -> dict[str, list[str]]:
    """The sections that are the same in all variants."""
    every = [_sections(command) for command in commands.values()]
    return {name: lines for name, lines in every[0].items() if all(other.get(name) == lines for other in every)}


def _case(variant: str, command: Command, commands: Mapping[str, Command], lengths: Sequence[int]) -> str:
    own = {name: lines for name, lines in _sections(command).items() if name not in _shared(commands)}
    body = [
        f"nodes={command.nodes} per_node={command.per_node}",
        f"lengths=({' '.join(map(str, lengths))})",
        *_arrays(own).splitlines(),
    ]
    return "\n".join([f"  {shlex.quote(variant)})", *(f"    {line}" for line in body), "    ;;"])


def _arrays(sections: Mapping[str, Sequence[str]]) -> str:
    """Bash arrays, with as many flags on a line as there is room for."""
    found = []
    for name, lines in sections.items():
        found.append(f"{name}=(")
        row = ""
        for line in lines:
            if row and len(row) + len(line) + 1 > _WIDTH:
                found.append(f"  {row}")
                row = ""
            row = f"{row} {line}".strip()
        found += [f"  {row}"] * bool(row) + [")"]
    return "\n".join(found)


def _connections(commands: Mapping[str, Command]) -> str:
    """What Megatron demands of ``CUDA_DEVICE_MAX_CONNECTIONS``, for and against."""
    sharded = {
        variant: bool(c.value("use-megatron-fsdp") or c.value("use-torch-fsdp2")) for variant, c in commands.items()
    }
    if len(set(sharded.values())) == 1:
        return f"connections={8 if any(sharded.values()) else 1}"
    names = " | ".join(shlex.quote(variant) for variant, yes in sharded.items() if yes)
    return f"case $variant in\n  {names}) connections=8 ;;\n  *) connections=1 ;;\nesac"
