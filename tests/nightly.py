"""Which tests, and how many cases of each, a suite runs.

Three suites of the same tests: ``ci/test.sh`` for every change, ``ci/test.sh --all`` before a merge, ``ci/nightly.sh``
overnight. Large products of parameters are thinned to covering designs: every value, pair or triple of values occurs in
some case. ``ci/nightly.sh product`` runs the products whole, which takes hours; random configurations (``ci/fuzz.sh``)
sample them every night.
"""

from __future__ import annotations

import heapq
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations
from typing import Any

import pytest

PRODUCT = os.environ.get("CP_PLUGIN_PRODUCT") == "1"
NIGHT = PRODUCT or os.environ.get("CP_PLUGIN_NIGHTLY") == "1"
ALL = NIGHT or os.environ.get("CP_PLUGIN_ALL") == "1"
WHY = "too long for every change: ci/nightly.sh"
REDUNDANT = "cases without a new combination of values: ci/nightly.sh"
nightly = pytest.mark.skipif(not NIGHT, reason=WHY)
"""A longer form of a test that every change runs shorter; with ``CP_PLUGIN_NIGHTLY=1`` it runs."""
slow = pytest.mark.skipif(not ALL, reason="too long for every change: ci/test.sh --all")
"""A test that takes a good part of a minute; with ``CP_PLUGIN_ALL=1`` it runs."""
one_case = pytest.mark.covering(0)
"""Every change runs one case, ``--all`` every value of each parameter, a night every pair of values."""
each_value = pytest.mark.covering(1)
"""Every change and ``--all`` run the fewest cases with every value of each parameter, a night every pair of values."""
each_pair = pytest.mark.covering(2)
"""Every change and ``--all`` run the fewest cases with every pair of two parameters' values, a night every triple."""


def thin(items: list[pytest.Item]) -> dict[str, int]:
    """Take out the cases of marked tests that the suite has no time for; the number left out of each test."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and not PRODUCT:
            functions[item.nodeid.split("[")[0]].append(item)
    gone: set[pytest.Item] = set()
    left_out: dict[str, int] = {}
    for function, cases in functions.items():
        strength = max(cases[0].get_closest_marker("covering").args[0], int(ALL)) + int(NIGHT)
        kept = covering([values(case.callspec.params) for case in cases], strength)
        if redundant := [case for place, case in enumerate(cases) if place not in kept]:
            gone.update(redundant)
            left_out[function] = len(redundant)
    items[:] = [item for item in items if item not in gone]
    return left_out


def values(params: dict[str, Any]) -> dict[str, str]:
    """The value of each parameter; of a dataclass, the value of each field."""
    found = {}
    for name, value in params.items():
        if is_dataclass(value):
            found |= {f"{name}.{field.name}": repr(getattr(value, field.name)) for field in fields(value)}
        else:
            found[name] = repr(value)
    return found


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
