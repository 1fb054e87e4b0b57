"""The dry run: the whole command through Megatron's parser, its process groups on all ranks, and what to expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cp_plugin.cli.examples.command import AXES, CONTEXT, Command, saving
from cp_plugin.cli.examples.groups import Summary, faults, summaries
from cp_plugin.cli.examples.predicted import Prediction, predict
from cp_plugin.megatron.planned import command as planned
from cp_plugin.megatron.planned.command import Planned
from cp_plugin.megatron.planned_groups import Member, read_with_groups

NOT_CHECKED = (
    "A dry run launches no GPU kernel, opens no NCCL connection and imports no Transformer Engine: what these refuse, "
    "need or take is not checked."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The findings."""

    command: Command
    prediction: Prediction
    groups: Sequence[Summary]
    faults: Sequence[str]
    """What is wrong with the process groups; empty: nothing."""
    why: tuple[str, ...]
    """What the provider chose on the ranks, and why."""

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against starting it."""
        return not self.faults and self.prediction.fits


def dry_run(command: Command) -> DryRun:
    """Check a command on all its ranks.

    Raises:
        ValueError: for what Megatron or the plugin refuses, in their words.
        RankError: if a rank cannot make its groups.
    """
    flags = full_flags(command)
    _refuse_auto(command)
    found, members = read_with_groups(flags, command.devices, command.per_node)
    return judged(command, found, members)


def judged(command: Command, found: Planned, members: Sequence[Member]) -> DryRun:
    """The findings for parsed flags and the groups that the ranks made of them."""
    tensor, pipeline = (command.size(axis) for axis in AXES)
    sizes = {"tp": tensor, "cp": command.size(CONTEXT), "dp": command.data_parallel, "pp": pipeline}
    return DryRun(
        command=command,
        prediction=predict(found, command.experiment.cluster.profile, command.per_node),
        groups=summaries(members, command.per_node),
        faults=faults(members, sizes),
        why=members[0].why,
    )


def parsed(command: Command) -> Planned:
    """The command through Megatron's parser and validation only; ValueError for what is refused."""
    _refuse_auto(command)
    return planned.read(full_flags(command), command.devices)


def full_flags(command: Command) -> list[str]:
    """All flags that a node's script passes to Megatron; paths as the names of their shell variables."""
    data = ["--data-path", "$DATA_PREFIX", "--data-cache-path", "$DATA_CACHE"]
    checkpoints = ["--save", "$CHECKPOINTS", "--load", "$CHECKPOINTS", *saving(command), "--exit-signal-handler"]
    return [*command.flags, *data, *checkpoints]


def _refuse_auto(command: Command) -> None:
    if command.value("cp-provider") == "auto":
        raise ValueError("--provider auto: name a method; cp-plugin plan finds the fastest")
