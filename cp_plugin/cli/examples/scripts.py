"""Render the self-contained script of an experiment, which runs on every node."""

from __future__ import annotations

import shlex
from importlib.resources import files

from cp_plugin.cli.examples.config import Experiment, words


def rendered(experiment: Experiment, seq_length: int | None = None) -> str:
    """Return ``train.sh`` with the experiment's flags."""
    flags = experiment.with_length(seq_length)
    fields = {
        "title": experiment.config.title,
        "name": experiment.name,
        "variant": shlex.quote(experiment.variant),
        "nodes": str(experiment.cluster.nodes),
        "per_node": str(experiment.cluster.per_node),
        "flags": "\n".join(f"  {shlex.join(line)}" for line in words(flags)),
        "connections": "8" if flags.get("use-megatron-fsdp") else "1",
    }
    text = files("cp_plugin.cli.examples").joinpath("train.sh").read_text(encoding="utf-8")
    for field, value in fields.items():
        text = text.replace(f"@{field}@", value)
    return text
