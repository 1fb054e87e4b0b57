"""Raw measurements, to which nothing was fitted, with predictions from the packaged profiles.

A file of ``../measured`` is a source: collectives, attention kernels, whole trainings.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.hardware import Cluster
from evidence.measurements import Calls, Data, Messages, Rates, Row, SharedHeads, Trainings

MEASURED = Path(__file__).parents[1] / "measured"


class Source(Data):
    """A file of measurements."""

    title: str
    source: str
    how: str = ""
    """How it was measured, and what sizes and times mean."""
    left_out: tuple[str, ...] = ()
    not_predicted: str = ""
    """Why nothing is predicted."""
    cluster: str = ""
    """A packaged one."""
    override: Mapping[str, Any] = {}
    """Changes to it."""
    library: str = ""
    """Attention library, if not the profile's own."""
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """Of attention."""
    messages: tuple[Messages, ...] = ()
    rates: tuple[Rates, ...] = ()
    calls: tuple[Calls, ...] = ()
    trainings: tuple[Trainings, ...] = ()
    shared_heads: tuple[SharedHeads, ...] = ()

    @model_validator(mode="after")
    def _checked(self) -> Source:
        has = any((self.messages, self.rates, self.calls, self.trainings, self.shared_heads))
        if has == bool(self.not_predicted):
            raise ValueError("a source has measurements, or says in not_predicted why it has none")
        for name in {self.cluster, *(t.cluster for t in self.trainings)} - {""}:
            hardware.cluster(name)
        ranks = [m.ranks for m in (*self.messages, *self.shared_heads)] + [n for rate in self.rates for n in rate.ranks]
        if ranks and max(ranks) > (room := self._on("").per_node):
            raise ValueError(f"messages of {max(ranks)} ranks: {self.cluster} has {room} on a node")
        return self

    def rows(self, name: str) -> Iterator[Row]:
        for found in self.trainings:
            yield from found.rows(name, self._on(found.cluster))
        for group in (*self.messages, *self.rates, *self.shared_heads):
            yield from group.rows(name, self._on(""))
        for call in self.calls:
            yield from call.rows(name, self._on(""), self.dtype)

    def _on(self, cluster: str) -> Cluster:
        found = hardware.override(hardware.cluster(cluster or self.cluster), **self.override)
        return hardware.using(found, self.library) if self.library else found


def names() -> tuple[str, ...]:
    """Names of the sources."""
    return tuple(sorted(path.stem for path in MEASURED.glob("*.toml")))


@cache
def source(name: str) -> Source:
    """Load a source by name; ValueError as for ``load``."""
    return load(MEASURED / f"{name}.toml")


def load(path: Path) -> Source:
    """Load a source; ValueError with the file and each mistake."""
    try:
        return Source.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()]
        raise ValueError(f"{path.name}: " + "; ".join(lines)) from None
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def rows(name: str) -> list[Row]:
    """A source's measurements with predictions."""
    return list(source(name).rows(name))


@dataclass(frozen=True, slots=True)
class Errors:
    """Error statistics of some rows."""

    n: int
    middle: float
    """Median absolute error."""
    worst: float

    @classmethod
    def of(cls, found: list[Row]) -> Errors | None:
        """None without rows."""
        if not found:
            return None
        errors = [row.error for row in found]
        return cls(len(errors), median(map(abs, errors)), max(errors, key=abs))

    def __str__(self) -> str:
        return f"{100 * self.middle:.0f} % ({100 * self.worst:+.0f} %)"
