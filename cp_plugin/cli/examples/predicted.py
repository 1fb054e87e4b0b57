"""What the planner predicts of a training: memory by part, bytes sent, time of an iteration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from cp_plugin.attention.setups import settled
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.megatron.planned.command import Planned
from cp_plugin.methods import registry as providers
from cp_plugin.planner.candidates import Candidate, as_flags, candidates
from cp_plugin.planner.explain import first_letter, sent_by_level
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.price import Priced, on, price
from cp_plugin.planner.training.iteration import utilisation
from cp_plugin.planner.training.model import LINEAR, Model
from cp_plugin.planner.training.parallel import Parallel, problem

Sent = Mapping[tuple[str, str, str], float]
"""(pass, axis, level) -> bytes of one rank in one iteration; of linear layers the axis is ``linear cp``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The planner's prediction for a training."""

    model: Model
    parallel: Parallel
    cluster: Cluster
    priced: Priced
    sent: Sent
    """Sent for attention by the busiest rank."""
    why: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory."""
        return self.priced.footprint.total <= self.cluster.device.memory_bytes

    @property
    def tokens_per_s(self) -> float:
        """Of all devices."""
        return self.priced.tokens_per_s * self.parallel.devices

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation."""
        return utilisation(self.model, self.parallel, self.cluster, self.priced.iteration.seconds)


def predict(planned: Planned, profile: str, per_node: int) -> Prediction:
    """Simulate attention, and predict the training from it.

    Raises:
        ValueError: for an unknown cluster, a provider that cannot do it, or a device without figures for it.
    """
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
    """The candidate that computes the layers of that letter."""
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
    """Megatron's default, its own ring; without context parallelism our ring on one rank, which is the same."""
    if its.size > 1:
        return candidates(its)["upstream p2p"][0]
    setup = settled(providers.get("ring"), its, options)
    return Candidate(name="upstream", setup=setup, flags="")


def _sent(priced: Priced, model: Model, parallel: Parallel) -> dict[tuple[str, str, str], float]:
    """One call's ledger, times a rank's layers of that kind, the micro-batches, and recomputation."""
    layers = parallel.layers(model, priced.iteration.stage)
    again = parallel.repeated(layers)
    selective = parallel.recompute == "selective" and "core_attn" in parallel.recompute_modules
    found: dict[tuple[str, str, str], float] = defaultdict(float)
    for letter, timeline in priced.timelines.items():
        its = [n for n in layers if model.attention_of(n) == letter]
        twice = sum(parallel.recompute_attention and (selective or n in again) for n in its)
        for (phase, axis, level), nbytes in sent_by_level(timeline).items():
            calls = len(its) + (twice if phase == "forward" else 0)
            name = f"linear {axis}" if letter == LINEAR else axis
            found[phase, name, level] += nbytes * calls * parallel.microbatches
    return dict(found)
