"""Render the self-contained script of a command, which runs on every node."""

from __future__ import annotations

import shlex
from importlib.resources import files

from cp_plugin.cli.examples.command import Command, saving


def rendered(command: Command) -> str:
    """Return ``train.sh`` with the command's flags."""
    experiment = command.experiment
    sharded = command.value("use-megatron-fsdp") or command.value("use-torch-fsdp2")
    fields = {
        "title": experiment.config.title,
        "name": experiment.name,
        "variant": shlex.quote(experiment.variant),
        "nodes": str(experiment.cluster.nodes),
        "per_node": str(experiment.cluster.per_node),
        "flags": "\n".join(f"  {shlex.join(line)}" for line in command.lines),
        "saving": shlex.join(saving(command)),
        "connections": "8" if sharded else "1",
    }
    text = files("cp_plugin.cli.examples").joinpath("train.sh").read_text(encoding="utf-8")
    for field, value in fields.items():
        text = text.replace(f"@{field}@", value)
    return text
