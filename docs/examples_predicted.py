"""What the planner predicts for every variant of an example, at its default length.

All commands go through Megatron's own parser one after the other in one forked process: importing Megatron takes most
of the time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from cp_plugin.cli.examples.command import Changes, Command, command
from cp_plugin.cli.examples.config import Example
from cp_plugin.cli.examples.predicted import Prediction, predict
from cp_plugin.core.options import Options
from cp_plugin.megatron.planned.command import SECONDS, Planned, Refused, with_arguments
from cp_plugin.megatron.planned.sizes import from_args
from cp_plugin.testing.launch import run_ranks


def predictions(example: Example) -> dict[str, tuple[Command, Prediction]]:
    """Variant -> its command and what is predicted.

    Raises:
        ValueError: for what Megatron, the plugin or the planner refuses, with the variant.
    """
    commands = [command(example, variant) for variant in example.variants]
    return {
        one.experiment.variant: (one, predict(planned, one.experiment.cluster.profile, one.per_node))
        for one, planned in zip(commands, read(commands), strict=True)
    }


def against_ring(example: Example) -> list[tuple[Command, Prediction, Prediction | None]]:
    """The base at each of its lengths: as it is, and with the ring on contiguous tokens; None: it is linear attention.

    Raises:
        ValueError: as above.
    """
    ring = Changes(provider="ring", options=Options(layout="contiguous"))
    linear = "cp-linear-attention" in example.config.parallel
    lengths = example.config.lengths
    own = [command(example, seq_length=n) for n in lengths]
    other = [] if linear else [command(example, seq_length=n, changes=ring) for n in lengths]
    commands = [*own, *other]
    found = [
        predict(planned, one.experiment.cluster.profile, one.per_node)
        for one, planned in zip(commands, read(commands), strict=True)
    ]
    behind = found[len(own) :] or [None] * len(own)
    return list(zip(own, found[: len(own)], behind, strict=True))


def read(commands: Sequence[Command]) -> list[Planned]:
    """What Megatron's parser and validation, and the plugin's, make of these commands.

    Raises:
        ValueError: for the first that is refused.
    """
    found = read_flags([(one.flags, one.devices) for one in commands])
    for one, planned in zip(commands, found, strict=True):
        if isinstance(planned, Refused):
            raise ValueError(f"{one.experiment.name}, {one.experiment.variant}: {planned.message}")
    return found


def read_flags(jobs: Sequence[tuple[list[str], int]]) -> list[Planned | Refused]:
    """The same of flags, each with a number of devices."""
    (found,) = run_ranks(_read, 1, args=(jobs,), timeout=SECONDS)
    return found


def _read(jobs: Sequence[tuple[list[str], int]]) -> list[Planned | Refused]:
    """In the forked process."""
    found = []
    for flags, devices in jobs:
        os.environ["WORLD_SIZE"] = str(devices)
        found.append(with_arguments(flags, lambda args, settings: Planned(*from_args(args, settings), settings)))
    return found
