"""Differences between two trainings, and their limits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from training import Gap, Record, differences, worst

ROUNDING = 2.0**-23
"""One rounding of float32, in which loss and gradient norm are reported: their smallest limit."""
MARGIN = 2.0
"""Limit as a multiple of upstream's own gap."""


def allowed(gap: Gap) -> Gap:
    """The plugin's limit if this is upstream's gap."""
    return Gap(max(MARGIN * gap.loss, ROUNDING), max(MARGIN * gap.norm, ROUNDING), MARGIN * gap.grad)


def at_least(limit: Gap, other: Gap) -> Gap:
    """The limit, with loss and norm raised to ``other``'s."""
    return limit._replace(loss=max(limit.loss, other.loss), norm=max(limit.norm, other.norm))


def largest(seeds: Sequence[Gap]) -> Gap:
    """Upstream's gap over several seeds: loss and norm the largest, gradients of the first seed.

    A loss is one number: of two equally exact programs it may differ by nothing with one seed and by several roundings
    with the next. The gradient of a parameter is many numbers, so one seed is enough.
    """
    return seeds[0]._replace(loss=worst([gap.loss for gap in seeds]), norm=worst([gap.norm for gap in seeds]))


def cost(rounded: Sequence[Record], exact: Sequence[Record]) -> Gap:
    """Effect of a lower precision on loss and norm; 0 for the gradients, where it is no measure.

    Raises:
        ValueError: they are not comparable: different ranks or numbers of steps, or numbers that are not finite.
    """
    if [record.place for record in rounded] != [record.place for record in exact]:
        raise ValueError("not the same ranks in both precisions")
    pairs = list(zip(rounded, exact, strict=True))
    losses = [x for record, base in pairs for x in differences(record.losses, base.losses)]
    norms = [x for record, base in pairs for x in differences(record.norms, base.norms)]
    if not losses or not all(map(math.isfinite, losses + norms)):
        raise ValueError("no rank reported a loss, or one precision's loss or gradient norm is not finite")
    return Gap(worst(losses), worst(norms), 0.0)
