"""The dry run: Megatron's parser, process groups of all ranks, and the planner's prediction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cp_plugin.attention.setups import settled
from cp_plugin.cli.examples.command import AXES, CONTEXT, Command, saving
from cp_plugin.cli.examples.groups import Summary, faults, summaries
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.megatron.planned import command as planned
from cp_plugin.megatron.planned.command import Planned
from cp_plugin.megatron.planned_groups import read_with_groups
from cp_plugin.methods import registry as providers
from cp_plugin.planner.candidates import Candidate, as_flags, candidates
from cp_plugin.planner.explain import first_letter, sent_by_level
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.price import Priced, on, price, trained
from cp_plugin.planner.training.iteration import utilisation
from cp_plugin.planner.training.model import LINEAR, Model
from cp_plugin.planner.training.parallel import Parallel, problem

Sent = Mapping[tuple[str, str, str], float]
"""(pass, axis, level) -> bytes of one rank in one iteration; of linear layers the axis is ``linear cp``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    model: Model
    parallel: Parallel
    cluster: Cluster
    priced: Priced
    sent: Sent
    """By the busiest rank, for attention."""
    why: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.priced.footprint.total <= self.cluster.device.memory_bytes

    @property
    def tokens_per_s(self) -> float:
        return self.priced.tokens_per_s * self.parallel.devices

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation."""
        return utilisation(self.model, self.parallel, self.cluster, self.priced.iteration.seconds)


def predict(planned: Planned, profile: str, per_node: int) -> Prediction:
    """Simulate attention and predict the training; ValueError for what the planner cannot price."""
    model, parallel = planned.model, planned.parallel
    cluster = hardware.cluster(profile)
    if per_node != cluster.per_node:
        cards = max(1, round(cluster.nics * per_node / cluster.per_node))
        cluster = hardware.override(cluster, per_node=per_node, nics=cards)
    each = {letter: _candidate(planned, cluster, letter) for letter in sorted(set(model.attention_pattern))}
    main = first_letter(model)
    others = {letter: one for letter, one in each.items() if letter != main}
    priced = price(each[main], others, model, parallel, cluster)
    return Prediction(
        model=model,
        parallel=parallel,
        cluster=cluster,
        priced=priced,
        sent=_sent(priced, model, parallel),
        why=tuple(reason for one in each.values() for reason in one.setup.why),
    )


def _candidate(planned: Planned, cluster: Cluster, letter: str) -> Candidate:
    """The candidate for the layers of a letter."""
    settings, parallel = planned.settings, planned.parallel
    its = on(problem(planned.model, parallel, letter), cluster, parallel.tensor)
    if letter == LINEAR:
        assert settings.linear is not None, "a model with linear layers"
        linear = settings.linear
        setup = settled(providers.get(linear.provider), its, linear.options)
    elif settings.softmax:
        setup = settled(providers.get(settings.provider), its, settings.options)
    else:
        return _upstream(its, settings.options)
    if setup.reason is not None:
        raise ValueError(f"{setup.provider.name} cannot run this model: {setup.reason}")
    return Candidate(name=setup.provider.name, setup=setup, flags=as_flags(setup))


def _upstream(its: Problem, options: Options) -> Candidate:
    """Megatron's own ring, its default; on one rank our ring, which is the same there."""
    if its.size > 1:
        return candidates(its)["upstream p2p"][0]
    setup = settled(providers.get("ring"), its, options)
    return Candidate(name="upstream", setup=setup, flags="")


def _sent(priced: Priced, model: Model, parallel: Parallel) -> dict[tuple[str, str, str], float]:
    """The bytes of one call times a rank's layers of that kind, micro-batches and recomputation."""
    layers = parallel.layers(model, priced.iteration.stage)
    again = parallel.repeated(layers)
    selective = parallel.recompute == "selective" and "core_attn" in parallel.recompute_modules
    repeats = trained(priced.candidate, parallel).recompute_attention
    found: dict[tuple[str, str, str], float] = defaultdict(float)
    for letter, timeline in priced.timelines.items():
        its = [n for n in layers if model.attention_of(n) == letter]
        twice = sum(repeats and (selective or n in again) for n in its)
        for (phase, axis, level), nbytes in sent_by_level(timeline).items():
            calls = len(its) + (twice if phase == "forward" else 0)
            name = f"linear {axis}" if letter == LINEAR else axis
            found[phase, name, level] += nbytes * calls * parallel.microbatches
    return dict(found)


NOT_CHECKED = (
    "Not checked, since a dry run uses no GPU: what GPU kernels, NCCL or Transformer Engine would refuse, and how much "
    "memory and time they take."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    command: Command
    prediction: Prediction
    groups: Sequence[Summary]
    faults: Sequence[str]
    """Of the process groups."""
    why: tuple[str, ...]
    """The provider's choices on the ranks, with reasons."""

    @property
    def ok(self) -> bool:
        return not self.faults and self.prediction.fits


def dry_run(command: Command) -> DryRun:
    """Check a command on all its ranks.

    Raises:
        ValueError: for what Megatron or the plugin refuses, in their words.
        RankError: if a rank cannot make its groups.
    """
    _refuse_auto(command)
    found, members = read_with_groups(full_flags(command), command.devices, command.per_node)
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
    """Parse and validate the command by Megatron; ValueError for a refusal."""
    _refuse_auto(command)
    return planned.read(full_flags(command), command.devices)


def full_flags(command: Command) -> list[str]:
    """All flags that a node's script passes to Megatron, with shell variables for paths."""
    data = ["--data-path", "$DATA_PREFIX", "--data-cache-path", "$DATA_CACHE"]
    checkpoints = ["--save", "$CHECKPOINTS", "--load", "$CHECKPOINTS", *saving(command), "--exit-signal-handler"]
    return [*command.flags, *data, *checkpoints]


def _refuse_auto(command: Command) -> None:
    if command.value("cp-provider") == "auto":
        raise ValueError("--provider auto: name a method; cp-plugin plan finds the fastest")
