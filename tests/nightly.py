"""What a night has time for, and not every change.

Three suites of the same tests: ``ci/test.sh`` for every change, ``ci/test.sh --all`` before a merge, ``ci/nightly.sh``.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import pytest

NIGHT = os.environ.get("CP_PLUGIN_NIGHTLY") == "1"
ALL = NIGHT or os.environ.get("CP_PLUGIN_ALL") == "1"
WHY = "too long for every change: ci/nightly.sh"
nightly = pytest.mark.skipif(not NIGHT, reason=WHY)
"""A longer form of a test that every change runs shorter; with ``CP_PLUGIN_NIGHTLY=1`` it runs."""
slow = pytest.mark.skipif(not ALL, reason="too long for every change: ci/test.sh --all")
"""A test that takes a good part of a minute; with ``CP_PLUGIN_ALL=1`` it runs."""
one_case = pytest.mark.covering(0)
"""Every change runs one case, ``--all`` each value of each parameter, a night the product."""
each_value = pytest.mark.covering(1)
"""Every change runs the fewest cases in which each value of each parameter occurs, a night the product."""
each_pair = pytest.mark.covering(2)
"""Every change runs the fewest cases in which each pair of two parameters' values occurs, a night the product."""


def thin(items: list[pytest.Item]) -> dict[str, int]:
    """Take out, except by night, the cases of tests marked so that cover nothing new: how many of each test."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and not NIGHT:
            functions[item.nodeid.split("[")[0]].append(item)
    redundant: dict[str, list[pytest.Item]] = {}
    for function, cases in functions.items():
        strength = max(cases[0].get_closest_marker("covering").args[0], int(ALL))
        kept = covering([{k: repr(v) for k, v in case.callspec.params.items()} for case in cases], strength)
        redundant[function] = [case for place, case in enumerate(cases) if place not in kept]
    gone = {case for cases in redundant.values() for case in cases}
    items[:] = [item for item in items if item not in gone]
    return {function: len(cases) for function, cases in redundant.items() if cases}


def covering(cases: Sequence[dict[str, str]], strength: int) -> set[int]:
    """The places of few cases that have every combination of ``strength`` parameters' values that any case has.

    cases: the values of each, by parameter. Greedy: the case that adds most comes first.
    """
    combined = [set(combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    open_, kept = set().union(*combined), set()
    while open_:
        best = max(range(len(cases)), key=lambda place: len(combined[place] & open_))
        kept.add(best)
        open_ -= combined[best]
    return kept
