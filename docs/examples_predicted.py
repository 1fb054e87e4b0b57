"""The planner's predictions for the variants and lengths of an example.

All commands go through Megatron's own parser in one forked process, since importing Megatron takes most of the time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from cp_plugin.cli.examples.command import Changes, Command, command
from cp_plugin.cli.examples.config import Example
from cp_plugin.cli.examples.dry_run import Prediction, predict
from cp_plugin.core.options import Options
from cp_plugin.megatron.planned.command import SECONDS, Planned, Refused, with_arguments
from cp_plugin.megatron.planned.sizes import from_args
from cp_plugin.testing.launch import run_ranks


def predictions(example: Example) -> dict[str, tuple[Command, Prediction]]:
    """Variant -> its command and prediction at its default length."""
    commands = [command(example, variant) for variant in example.variants]
    return {one.experiment.variant: (one, found) for one, found in zip(commands, _predict(commands), strict=True)}


def against_ring(example: Example) -> list[tuple[Command, Prediction, Prediction | None]]:
    """The base at each of its lengths, as it is and as a contiguous ring (None for linear attention)."""
    ring = Changes(provider="ring", options=Options(layout="contiguous"))
    lengths = example.config.lengths
    own = [command(example, seq_length=n) for n in lengths]
    if "cp-linear-attention" in example.config.parallel:
        return [(one, found, None) for one, found in zip(own, _predict(own), strict=True)]
    found = _predict([*own, *(command(example, seq_length=n, changes=ring) for n in lengths)])
    return list(zip(own, found[: len(own)], found[len(own) :], strict=True))


def read_flags(jobs: Sequence[tuple[list[str], int]]) -> list[Planned | Refused]:
    """What the parsers and checks of Megatron and the plugin make of flags, each with a number of devices."""
    (found,) = run_ranks(_read, 1, args=(jobs,), timeout=SECONDS)
    return found


def _predict(commands: Sequence[Command]) -> list[Prediction]:
    """
    Raises:
        ValueError: for the first command that Megatron, the plugin or the planner refuses.
    """
    predicted = []
    for one, planned in zip(commands, read_flags([(one.flags, one.devices) for one in commands]), strict=True):
        if isinstance(planned, Refused):
            raise ValueError(f"{one.experiment.name}, {one.experiment.variant}: {planned.message}")
        predicted.append(predict(planned, one.experiment.cluster.profile, one.per_node))
    return predicted


def _read(jobs: Sequence[tuple[list[str], int]]) -> list[Planned | Refused]:
    """In the forked process."""
    found = []
    for flags, devices in jobs:
        os.environ["WORLD_SIZE"] = str(devices)
        found.append(with_arguments(flags, lambda args, settings: Planned(*from_args(args, settings), settings)))
    return found
