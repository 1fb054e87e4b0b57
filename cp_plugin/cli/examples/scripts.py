"""Render the self-contained scripts of a command: ``train.sh`` for every node, and ``train.sbatch`` for Slurm."""

from __future__ import annotations

import shlex
from importlib.resources import files

from cp_plugin.cli.examples.command import Command, saving

SCRIPTS = ("sh", "sbatch")


def rendered(command: Command, what: str) -> str:
    """``sh`` or ``sbatch`` for this command."""
    experiment = command.experiment
    sharded = command.value("use-megatron-fsdp") or command.value("use-torch-fsdp2")
    fields = {
        "title": experiment.config.title,
        "name": experiment.name,
        "variant": shlex.quote(experiment.variant),
        "nodes": str(command.nodes),
        "per_node": str(command.per_node),
        "cpus": str(8 * command.per_node),
        "flags": "\n".join(f"  {shlex.join(line)}" for line in command.lines),
        "saving": shlex.join(saving(command)),
        "connections": "8" if sharded else "1",
    }
    text = files("cp_plugin.cli.examples").joinpath("templates", f"train.{what}").read_text(encoding="utf-8")
    for field, value in fields.items():
        text = text.replace(f"@{field}@", value)
    return text
