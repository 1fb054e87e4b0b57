"""The record of ``ci/cluster/seen.py`` matches the current code. Needs no cluster."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

_CLUSTER = Path(__file__).parent.parent / "ci" / "cluster"
sys.path.insert(0, str(_CLUSTER))

import alone  # noqa: E402
import seen  # noqa: E402
from scenarios import SCENARIOS  # noqa: E402

_RECORD = json.loads(seen.RECORD.read_text())


@pytest.mark.parametrize("name", ["chat16", "window16"])
def test_the_record_has_the_bytes_that_are_counted_here(name: str) -> None:
    """The record has the least and the most that a real rank sent."""
    scenario = SCENARIOS[name]
    counted = {str(e): alone.sent(e, scenario.problem(), scenario.bounds()) for e in scenario.entries()}
    for part in (_RECORD[name], _RECORD[f"{name}-fast"]):
        assert {m["entry"]: tuple(m["booked"]) for m in part["measured"]} == {
            run: (min(of_ranks), max(of_ranks)) for run, of_ranks in counted.items()
        }


@pytest.mark.parametrize("name", seen.TABLES)
def test_the_record_is_of_the_scenario_and_meets_its_targets(name: str) -> None:
    part, scenario = _RECORD[name], SCENARIOS[name]
    assert part["ok"] and len(part["targets"]) == len(scenario.targets) == len(scenario.runs) - 1
    assert all(target["met"] and target["ratio"] >= target["at_least"] for target in part["targets"])
    assert part["scenario"] == json.loads(json.dumps(asdict(scenario))), "measured with other sizes"


def test_the_record_of_kernel_times_meets_its_target() -> None:
    found = _RECORD["balance"]["packs"]
    assert [(pack["kind"], pack["seed"]) for pack in found] == [(k, n) for k in seen.KINDS for n in range(seen.PACKS)]
    assert all(list(pack["seconds"]) == list(seen.RUNS) for pack in found)
    assert all(len(seconds) == seen.RANKS for pack in found for seconds in pack["seconds"].values())
    assert all(seen.shorter(found, kind) >= seen.SHORTER for kind in seen.KINDS)


def test_bytes_at_full_size_are_those_of_the_record() -> None:
    assert list(_RECORD["bytes"]) == list(seen.FULL)
    assert seen.full_size_bytes("code") == _RECORD["bytes"]["code"]
