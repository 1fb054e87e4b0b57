"""How far predictions are typically off.

Medians of the error of a predicted ratio of two methods' times, over the published pairs in the same setting, with
nothing fitted (``plan --reproduce all``, ``docs/papers.md``), rounded up. Half of all ratios are off by more: no bound.
"""

from __future__ import annotations

from collections.abc import Iterable

KNOWN_ERROR = 0.10
"""Over all pairs."""
OWN = {"attention2d": 0.28, "ring": 0.13, "striped": 0.13, "burst": 0.12}
"""Provider -> over the pairs that it is in, where that is more."""
SECONDS = 0.25
"""Of an absolute time."""


def typical_error(*providers: str) -> float:
    """Return the error of a ratio of these providers' times: that of the one predicted worst."""
    return max(OWN.get(name, KNOWN_ERROR) for name in providers)


def tie(seconds: float, others: float, error: float = KNOWN_ERROR) -> bool:
    """Return True if predictions cannot tell the two apart: they differ by less than is typical of predictions."""
    return bool(max(seconds, others) <= (1 + error) * min(seconds, others))


def describe(providers: Iterable[str]) -> str:
    """``typical error 10 %; attention2d 28 %``: of all, and of those of the providers that are predicted worse."""
    own = {name: OWN[name] for name in providers if name in OWN}
    worse = sorted(own, key=lambda name: -own[name])
    return "; ".join([f"typical error {_percent(KNOWN_ERROR)}", *(f"{name} {_percent(own[name])}" for name in worse)])


def legend(providers: Iterable[str]) -> str:
    """Return how far predictions are off, for below a table or above a single one."""
    return f"{describe(providers)} (medians, of predicted ratios; of predicted seconds {_percent(SECONDS)})"


def off_by(*providers: str) -> str:
    """``typical error 28 %``: of a ratio of these providers' times."""
    return f"typical error {_percent(typical_error(*providers))}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
