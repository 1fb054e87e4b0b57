"""A model's attention divided in one way: what shapes share that differ only in pipeline, batch or recomputation."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from cp_plugin.core.problem import Problem
from cp_plugin.planner.asked import Asked
from cp_plugin.planner.candidates import Candidate, candidates, composition, linear_candidates
from cp_plugin.planner.machine.events import Seconds
from cp_plugin.planner.price import beside, computes, least, on, simulated
from cp_plugin.planner.trace.timeline import Timeline
from cp_plugin.planner.training.model import LINEAR
from cp_plugin.planner.training.parallel import Parallel, problem


@dataclass(kw_only=True)
class Division:
    """Candidates for the attention of a model, with their lower bounds and timelines, each made once."""

    asked: Asked
    problems: Mapping[str, Problem]
    """Letter of ``Model.attention_pattern`` -> one call."""
    stride: int
    """Devices between context-parallel ranks."""
    _timelines: dict[Hashable, Mapping[str, Timeline]] = field(default_factory=dict)

    @classmethod
    def each(cls, asked: Asked, shapes: Sequence[Parallel]) -> list[Self]:
        """The division of every shape, the same object for shapes that share one."""
        made: dict[Hashable, Self] = {}
        found = []
        for shape in shapes:
            problems = {
                letter: on(problem(asked.model, shape, letter), asked.cluster, shape.tensor)
                for letter in sorted(set(asked.model.attention_pattern))
            }
            key = shape.tensor, tuple(problems.items())
            if key not in made:
                made[key] = cls(asked=asked, problems=problems, stride=shape.tensor)
            found.append(made[key])
        return found

    @property
    def softmax(self) -> list[str]:
        """Letters of softmax layers."""
        return [letter for letter in self.problems if letter != LINEAR]

    @property
    def main(self) -> str:
        """The letter whose layers the candidates are for: softmax where the model has any."""
        return (self.softmax or [LINEAR])[0]

    @cached_property
    def alone(self) -> dict[str, Seconds]:
        """Letter -> kernels without communication."""
        return {letter: computes(its, self.asked.cluster) for letter, its in self.problems.items()}

    @cached_property
    def candidates(self) -> dict[str, list[tuple[Candidate, Seconds]]]:
        """Name -> candidates and their lower bounds.

        Softmax candidates that suit all kinds of softmax layers; linear ones where there is no softmax layer.
        """
        return {name: [(c, self.least(c)) for c in some] for name, some in self._candidates().items() if some}

    def _candidates(self) -> dict[str, list[Candidate]]:
        if not self.softmax:
            return {c.name: [c] for c in linear_candidates(self.problems[LINEAR])}
        first, *more = self.softmax
        asked = self.asked
        allowed = replace(asked.allowed, stock=asked.allowed.stock and LINEAR not in self.problems)
        found = candidates(self.problems[first], asked.fp8, allowed)
        for letter in more:
            others = candidates(self.problems[letter], asked.fp8, allowed)
            also = {c.flags for some in others.values() for c in some}
            found = {name: [c for c in some if c.flags in also] for name, some in found.items()}
        return found

    def least(self, candidate: Candidate) -> Seconds:
        """Lower bound on one call."""
        return least(candidate, self.asked.cluster, self.stride)

    def timelines(self, candidate: Candidate) -> Mapping[str, Timeline]:
        """Letter -> one call, simulated once for candidates that do the same."""
        key = candidate.upstream, composition(candidate.setup)
        if key not in self._timelines:
            others = {letter: its for letter, its in self.problems.items() if letter != self.main}
            each = {self.main: candidate, **beside(candidate, others)}
            self._timelines[key] = simulated(each, self.asked.cluster, self.stride)
        return self._timelines[key]
