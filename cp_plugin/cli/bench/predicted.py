"""What the planner says that a method takes, beside what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cp_plugin.attention.setups import Setup
from cp_plugin.cli.bench.masks import Case
from cp_plugin.cli.bench.results import CaseResult
from cp_plugin.cli.bench.run import Plan
from cp_plugin.planner import hardware
from cp_plugin.planner.hardware import Cluster
from cp_plugin.planner.timeline import simulate

ALL_RANKS = 16
"""Up to so many are simulated all; of more, the first, the middle and the last."""


def load_cluster(text: str) -> Cluster:
    """A packaged cluster by its name, or one in a file, which has a suffix or a folder.

    Raises:
        ValueError: if there is none, or the file describes none.
    """
    path = Path(text)
    try:
        return hardware.load(path) if path.suffix or len(path.parts) > 1 else hardware.cluster(text)
    except ValueError as error:
        raise ValueError(f"--cluster {text}: {error}") from None


def predicted(setup: Setup, case: Case, cluster: Cluster) -> float:
    """Seconds of a forward and backward on that cluster.

    Raises:
        ValueError: for a cluster whose profile lacks figures that this needs.
    """
    ranks = "all" if case.problem.size <= ALL_RANKS else "few"
    try:
        return simulate(setup, setup.problem, cluster=cluster, ranks=ranks, documents=case.bounds).seconds
    except ValueError as error:
        raise ValueError(f"--cluster {cluster.name}: {error}") from None


def predictions(plans: Sequence[Plan], cluster: Cluster) -> list[list[float | None]]:
    """Of everyone in every plan; None for peers, and for who cannot take part.

    Raises:
        ValueError: as ``predicted`` does.
    """
    return [
        [
            None if one.setup is None or one.reason is not None else predicted(one.setup, plan.case, cluster)
            for one in plan.planned
        ]
        for plan in plans
    ]


def with_predictions(results: Sequence[CaseResult], found: Sequence[Sequence[float | None]]) -> list[CaseResult]:
    """The same with predictions beside what was measured."""
    return [
        replace(
            result,
            measured=[replace(m, predicted=seconds) for m, seconds in zip(result.measured, of_case, strict=True)],
        )
        for result, of_case in zip(results, found, strict=True)
    ]
