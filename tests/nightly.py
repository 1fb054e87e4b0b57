"""Which tests, and how many cases of each, a suite runs.

Three suites of the same tests: ``ci/test.sh`` for every change, ``ci/test.sh --all`` before a merge, ``ci/nightly.sh``
overnight, which runs the rest (``--beyond-all``). Large products of parameters are thinned to covering designs: every
value, pair or triple of values occurs in some case. ``ci/nightly.sh product`` runs the products whole, which takes
hours; random configurations (``ci/fuzz.sh``) sample them every night.
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
ALL = NIGHT or os.environ.get("CP_PLUGIN_ALL") == "1"
WHY = "too long for every change: ci/nightly.sh"
REDUNDANT = "cases without a new combination of values: ci/nightly.sh"
IN_ALL = "run by ci/test.sh --all"
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
pairs_in_all = pytest.mark.covering(1, 2)
"""As ``each_value`` for every change, as ``each_pair`` in ``--all`` and at night.

Of several cases that would do the first is taken: put the value first that most cases should have.
"""


def thin(items: list[pytest.Item], beyond_all: bool = False) -> dict[tuple[str, str], int]:
    """Take out the cases of marked tests that the suite has no time for; the number left out, by test and reason.

    beyond_all: take out what ``ci/test.sh --all`` runs, too.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") and not PRODUCT:
            functions[item.nodeid.split("[")[0]].append(item)
    gone: dict[pytest.Item, tuple[str, str]] = {}
    for function, cases in functions.items():
        strength, described = covered(cases[0]), [values(case.callspec.params) for case in cases]
        kept = covering(described, strength + int(NIGHT))
        gone |= {case: (function, REDUNDANT) for place, case in enumerate(cases) if place not in kept}
        if beyond_all and not longer_at_night(cases[0]):
            gone |= {cases[place]: ("cases", IN_ALL) for place in kept & covering(described, strength)}
    if beyond_all:
        others = [item for item in items if not item.get_closest_marker("covering")]
        gone |= {item: ("tests", IN_ALL) for item in others if not longer_at_night(item)}
    items[:] = [item for item in items if item not in gone]
    return dict(Counter(gone.values()))  # a plain dict: pytest-xdist sends no other


def covered(case: pytest.Item) -> int:
    """How many parameters' values the cases that are run by day combine."""
    by_day, *in_all = case.get_closest_marker("covering").args
    return max(by_day, *in_all, 1) if ALL else by_day


def longer_at_night(item: pytest.Item) -> bool:
    """Whether it is a longer form, or in a module that reads ``NIGHT``."""
    return hasattr(item.module, "NIGHT") or any(
        mark.kwargs.get("reason") == WHY for mark in item.iter_markers("skipif")
    )


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
