"""Differences between two trainings, and their limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from recording import Record

ROUNDING = 2.0**-23
"""One rounding of float32, in which loss and gradient norm are reported: their smallest limit."""
MARGIN = 2.0
"""Limit as a multiple of upstream's own gap."""


class Gap(NamedTuple):
    """Relative differences between a training with context parallelism and one without."""

    loss: float
    """Largest of all steps."""
    norm: float
    """Of the gradient norm, likewise."""
    grad: float
    """Norm of the difference over the norm, worst parameter on any rank, step 1."""
    where: str = ""
    """That parameter."""

    def allowed(self) -> Gap:
        """The plugin's limit if this is upstream's gap."""
        return Gap(max(MARGIN * self.loss, ROUNDING), max(MARGIN * self.norm, ROUNDING), MARGIN * self.grad)

    def at_least(self, other: Gap) -> Gap:
        """This limit, with loss and norm raised to ``other``'s."""
        return self._replace(loss=max(self.loss, other.loss), norm=max(self.norm, other.norm))

    def within(self, limit: Gap) -> bool:
        """NaN is within no limit."""
        return self.loss <= limit.loss and self.norm <= limit.norm and self.grad <= limit.grad


def largest(seeds: Sequence[Gap]) -> Gap:
    """Upstream's gap over several seeds: loss and norm the largest, gradients of the first seed.

    A loss is one number: of two equally exact programs it may differ by nothing with one seed and by several roundings
    with the next. The gradient of a parameter is many numbers, so one seed is enough.
    """
    return seeds[0]._replace(loss=_worst([gap.loss for gap in seeds]), norm=_worst([gap.norm for gap in seeds]))


def gap(got: Sequence[Record], want: Sequence[Record]) -> Gap:
    """Between every rank of ``got`` and the rank of ``want`` with the same tp, pp and dp rank.

    Raises:
        ValueError: they are not comparable: different initial weights, parameters or numbers of steps, or numbers that
            are not finite.
    """
    place = {_place(record): record for record in want}
    if len(place) != len(want):
        raise ValueError("two ranks without context parallelism have the same place")
    losses, norms, grads = [], [], [(0.0, "")]
    for record in got:
        base = place.get(_place(record))
        if base is None:
            raise ValueError(f"{record.coordinates}: no rank without context parallelism has this place")
        _check(record, base)
        losses += _differences(record.losses, base.losses)
        norms += _differences(record.norms, base.norms)
        for name, grad in base.grads.items():
            wide = grad.double()
            error, norm = (record.grads[name].double() - wide).norm().item(), wide.norm().item()
            grads.append((error / norm if norm else math.inf * error if error else 0.0, name))
    if not losses:
        raise ValueError("no rank reported a loss")
    worst, where = max(grads, key=lambda found: (math.isnan(found[0]), found[0]))
    return Gap(_worst(losses), _worst(norms), worst, where)


def cost(rounded: Sequence[Record], exact: Sequence[Record]) -> Gap:
    """Effect of a lower precision on loss and norm; 0 for the gradients, where it is no measure.

    Raises:
        ValueError: they are not comparable: different ranks or numbers of steps, or numbers that are not finite.
    """
    if [_place(record) for record in rounded] != [_place(record) for record in exact]:
        raise ValueError("not the same ranks in both precisions")
    pairs = list(zip(rounded, exact, strict=True))
    losses = [x for record, base in pairs for x in _differences(record.losses, base.losses)]
    norms = [x for record, base in pairs for x in _differences(record.norms, base.norms)]
    if not losses or not all(map(math.isfinite, losses + norms)):
        raise ValueError("no rank reported a loss, or one precision's loss or gradient norm is not finite")
    return Gap(_worst(losses), _worst(norms), 0.0)


def _place(record: Record) -> tuple[int, ...]:
    return tuple(record.coordinates[axis] for axis in ("tp", "pp", "dp"))


def _check(record: Record, base: Record) -> None:
    for name in ("weights", "grads"):
        if getattr(record, name).keys() != getattr(base, name).keys():
            raise ValueError(f"{record.coordinates}: not the parameters of the model on one rank")
    for name, weight in base.weights.items():
        if not torch.equal(record.weights[name], weight):
            raise ValueError(f"{name} on {record.coordinates}: not the same weight to begin with")
    if len(record.losses) != len(base.losses) or len(record.norms) != len(base.norms):
        raise ValueError(f"{record.coordinates}: {len(record.norms)} steps, not {len(base.norms)}")
    if not all(map(math.isfinite, (*base.losses, *base.norms))):
        raise ValueError("loss or gradient norm without context parallelism is not finite")


def relative(got: float, want: float) -> float:
    """The difference over the power of two below ``want``, so that one rounding has the same size for every value."""
    unit = math.ldexp(1.0, math.frexp(want)[1] - 1)
    return abs(got - want) / unit if want else math.inf * abs(got) if got else 0.0


def _differences(got: Sequence[float], want: Sequence[float]) -> list[float]:
    return [relative(a, b) for a, b in zip(got, want, strict=True)]


def _worst(values: Sequence[float]) -> float:
    return max(values, key=lambda x: (math.isnan(x), x))
