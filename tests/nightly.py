"""Which tests, and how many cases of each, a suite runs.

Two suites of the same tests: by day (``ci/test.sh``), and all of it at night (``ci/nightly.sh``). Large products of
parameters are thinned to covering designs: every value, pair or triple of values occurs in some case. ``ci/nightly.sh
product`` runs the products whole, which takes hours; random configurations (``ci/fuzz.sh``) sample them every night.
"""

from __future__ import annotations

import heapq
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations
from typing import Any

import pytest

PRODUCT = os.environ.get("CP_PLUGIN_PRODUCT") == "1"
NIGHT = PRODUCT or os.environ.get("CP_PLUGIN_NIGHTLY") == "1"
WHY = "too long for every change: ci/nightly.sh"
REDUNDANT = "cases without a new combination of values: ci/nightly.sh"
nightly = pytest.mark.skipif(not NIGHT, reason=WHY)
"""A test that takes a good part of a minute, or a longer form of one that every change runs shorter."""
one_case = pytest.mark.covering(0, 2)
"""By day one case; at night the fewest with every pair of two parameters' values."""
each_value = pytest.mark.covering(1, 2)
"""By day the fewest cases with every value of each parameter, at night with every pair.

Of several cases that would do the first is taken: put the value first that most cases should have.
"""
pairs_at_night = pytest.mark.covering(1, 3)
"""By day each value, at night every triple."""
each_pair = pytest.mark.covering(2, 3)
"""By day every pair, at night every triple."""


def thin(items: list[pytest.Item]) -> dict[tuple[str, str], int]:
    """Take out the cases of marked tests that the suite has no time for; the number left out, by test and reason."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and not PRODUCT:
            functions[item.nodeid.split("[")[0]].append(item)
    gone: dict[pytest.Item, tuple[str, str]] = {}
    for function, cases in functions.items():
        by_day, by_night = cases[0].get_closest_marker("covering").args
        kept = covering([values(case.callspec.params) for case in cases], by_night if NIGHT else by_day)
        gone |= {case: (function, REDUNDANT) for place, case in enumerate(cases) if place not in kept}
    items[:] = [item for item in items if item not in gone]
    return dict(Counter(gone.values()))  # a plain dict: pytest-xdist sends no other


def values(params: dict[str, Any]) -> dict[str, str]:
    """The value of each parameter; of a dataclass, the value of each field."""
    by_name = {}
    for name, value in params.items():
        if is_dataclass(value):
            by_name |= {f"{name}.{field.name}": repr(getattr(value, field.name)) for field in fields(value)}
        else:
            by_name[name] = repr(value)
    return by_name


def covering(cases: Sequence[dict[str, str]], strength: int) -> set[int]:
    """Indices of few cases in which every combination of ``strength`` parameters' values that any case has occurs.

    Greedy: the case that adds most comes first. What a case adds only shrinks, so the largest count on a heap is taken
    once it has been found to be current.

    cases: the values of each, by parameter.
    """
    combined = [set(combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    open_, kept = set().union(*combined), set()
    heap = [(-len(each), place) for place, each in enumerate(combined)]
    heapq.heapify(heap)
    while open_:
        _, place = heap[0]
        adds = len(combined[place] & open_)
        heapq.heapreplace(heap, (-adds, place))
        if heap[0] == (-adds, place):
            kept.add(place)
            open_ -= combined[place]
    return kept
