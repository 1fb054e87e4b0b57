"""``cp-plugin plan --explain``: one configuration in depth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cp_plugin.attention.setups import Setup, settled
from cp_plugin.cli import flags, packs
from cp_plugin.cli.tables import settings
from cp_plugin.common.text import in_seconds
from cp_plugin.core.options import Options
from cp_plugin.methods import registry as providers

if TYPE_CHECKING:
    from cp_plugin.planner.asked import Asked
    from cp_plugin.planner.explain import Explanation


def explain(asked: Asked, documents: str | None, provider: str | None, options: Options, *, every: bool) -> Explanation:
    """Explain the configuration of a question whose parallel sizes are given, with the least recomputation that fits.

    Args:
        documents: the text of ``--documents``.
        provider: None: the planner's choice.
        every: simulate every rank instead of three representative ones.

    Raises:
        ValueError: for a method that cannot compute it, and options without a method.
    """
    from cp_plugin.planner.explain import explain as look_into
    from cp_plugin.planner.training.footprint import footprint
    from cp_plugin.planner.training.parallel import RECOMPUTE

    if provider is None and options != Options():
        given = ", ".join(f"--{name.replace('_', '-')}" for name in providers.in_order(options))
        raise ValueError(f"{given}: a method's options need --provider NAME")
    shapes = sorted(asked.shapes, key=lambda shape: RECOMPUTE.index(shape.recompute))
    limit = asked.cluster.device.memory_bytes
    least = next((shape for shape in shapes if footprint(asked.model, shape).total <= limit), shapes[-1])
    asked = packs.packed(replace(asked, shapes=[least], free=False), documents)
    setup = _chosen(asked) if provider is None else _asked_for(asked, provider, options)
    return look_into(asked.model, asked.shapes[0], setup, asked.cluster, every=every)


def _chosen(asked: Asked) -> Setup:
    """The planner's choice among our methods."""
    from cp_plugin.planner.search import answer

    found = answer(asked)
    best = next((p for p in found.found if not p.candidate.upstream), found.best)
    why = f"the planner's choice among {found.tried} configurations; of methods that tie, the simplest (cp-plugin plan)"
    return replace(best.candidate.setup, why=(why, *best.candidate.setup.why))


def _asked_for(asked: Asked, provider: str, options: Options) -> Setup:
    from cp_plugin.planner.explain import first_letter
    from cp_plugin.planner.price import on
    from cp_plugin.planner.training.model import LINEAR
    from cp_plugin.planner.training.parallel import problem

    letter, parallel = first_letter(asked.model), asked.shapes[0]
    if provider not in providers.registry():
        flags.check_name("--provider", provider, providers.names("linear" if letter == LINEAR else "softmax"))
    its = on(problem(asked.model, parallel, letter), asked.cluster, parallel.tensor)
    return settled(providers.get(provider), its, options)


def draw(path: Path, found: Explanation) -> None:
    """Draw the timeline of an attention call."""
    from cp_plugin.cli.draw.gantt import draw_gantt

    setup = found.timeline.setup
    passes = {name: of.spans for name, of in found.passes.items()}
    title = (
        f"{found.model.name}, {setup.problem.seq_length:,} tokens on {found.parallel.devices} x "
        f"{found.timeline.cluster.name}; one attention call of {setup.provider.name}, {settings(setup)}: "
        f"{in_seconds(found.timeline.seconds)}, predicted"
    )
    draw_gantt(path, title, passes)
