"""Losses and gradient norms of trainings without context parallelism, as they were once: does stock still give them?

``goldens.json``: the model, parallelism, mask and precision -> device and megatron-core version -> the numbers of every
step. They are a second line of defence: a fault that changes CP 1 and CP n alike would not show in the comparison.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparing import relative
from recording import Record

FILE = Path(__file__).with_name("goldens.json")
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Relative. Another processor adds up in another order: after three steps 1e-6 in float32; and 2^-8 is one rounding."""
Numbers = dict[str, list[float]]


class Goldens:
    """The file, and what is found beside it."""

    def __init__(self, file: Path, machine: str) -> None:
        """machine: ``cpu, megatron-core 0.19.2``."""
        self._file, self._machine = file, machine
        self._stored: dict[str, dict[str, Numbers]] = json.loads(file.read_text()) if file.exists() else {}
        self._found: dict[str, Numbers] = {}

    def compare(self, key: str, precision: str, records: Sequence[Record]) -> str:
        """``equal``, ``none``, or what is further off than the tolerance."""
        numbers = self._found[key] = _numbers(records)
        stored = self._stored.get(key, {}).get(self._machine)
        if stored is None:
            return "none"
        if {name: len(values) for name, values in stored.items()} != {n: len(v) for n, v in numbers.items()}:
            return "other steps"
        worst, name, step = max(
            (relative(got, want), name, step)
            for name in stored
            for step, (got, want) in enumerate(zip(numbers[name], stored[name], strict=True), 1)
        )
        if not worst <= TOLERANCE[precision]:
            return f"{name} of step {step} is {numbers[name][step - 1]:.9g}, was {stored[name][step - 1]:.9g}"
        return "equal"

    def difference(self) -> list[tuple[str, str, str, float]]:
        """What ``update`` would change: key, as it is stored, as it is now, largest relative difference."""
        rows = []
        for key, numbers in self._found.items():
            stored = self._stored.get(key, {}).get(self._machine)
            if stored != numbers:
                rows.append((key, _shown(stored), _shown(numbers), _largest(stored, numbers)))
        return rows

    def update(self) -> None:
        """Write what was found into the file."""
        for key, numbers in self._found.items():
            self._stored.setdefault(key, {})[self._machine] = numbers
        self._file.write_text(_lines(self._stored))


def _lines(stored: Mapping[str, Any]) -> str:
    """JSON with one line for each training."""
    rows = (f"{json.dumps(key)}: {json.dumps(stored[key], sort_keys=True)}" for key in sorted(stored))
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _numbers(records: Sequence[Record]) -> Numbers:
    """Of one rank that reports losses: they are those of all. Raises ValueError if none does."""
    one = next((record for record in records if record.losses), None)
    if one is None:
        raise ValueError("no rank without context parallelism reported a loss")
    return {"losses": one.losses, "norms": one.norms}


def _shown(numbers: Mapping[str, Any] | None) -> str:
    if numbers is None:
        return "none"
    return "; ".join(f"{name} {' '.join(f'{x:.9g}' for x in values)}" for name, values in numbers.items())


def _largest(stored: Numbers | None, numbers: Numbers) -> float:
    if stored is None or any(len(stored[name]) != len(values) for name, values in numbers.items()):
        return float("inf")
    return max(relative(got, want) for n in numbers for got, want in zip(numbers[n], stored[n], strict=True))
