"""Stored losses and gradient norms of trainings without context parallelism.

``goldens.json``: model, parallelism, mask and precision -> device and megatron-core version -> the numbers of every
step. They reveal a fault that changes CP 1 and CP n alike, which the comparison of both would not show.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from training import Record, relative

FILE = Path(__file__).with_name("goldens.json")
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Relative. Processors add in different orders: after three steps 1e-6 in float32; one rounding of bfloat16 is 2^-8."""
Numbers = dict[str, list[float]]


class Goldens:
    """The file, and the numbers of this run."""

    def __init__(self, file: Path, machine: str) -> None:
        """machine: ``cpu, megatron-core 0.19.2``."""
        self._file, self._machine = file, machine
        self._stored: dict[str, dict[str, Numbers]] = json.loads(file.read_text()) if file.exists() else {}
        self._found: dict[str, Numbers] = {}

    def compare(self, key: str, precision: str, records: Sequence[Record]) -> str:
        """``equal``, ``none``, or what exceeds the tolerance."""
        one = next((record for record in records if record.losses), None)  # its losses are those of all ranks
        if one is None:
            raise ValueError("no rank without context parallelism reported a loss")
        numbers = self._found[key] = {"losses": one.losses, "norms": one.norms}
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

    def update(self) -> None:
        """Write the numbers of this run into the file, one line per training."""
        for key, numbers in self._found.items():
            self._stored.setdefault(key, {})[self._machine] = numbers
        rows = (f"{json.dumps(key)}: {json.dumps(self._stored[key], sort_keys=True)}" for key in sorted(self._stored))
        self._file.write_text("{\n" + ",\n".join(rows) + "\n}\n")
