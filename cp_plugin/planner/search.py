"""The best way to train a model on a cluster: candidates in order of what they cost at least, until none can win."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cp_plugin.core.problem import Fp8
from cp_plugin.core.text import in_bytes
from cp_plugin.planner.candidates import (
    ALL,
    Allowed,
    Candidate,
    candidates,
    composition,
    linear_candidates,
    refusals,
    variants,
)
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.price import Priced, beside, computes, least, on, price, trained
from cp_plugin.planner.training.footprint import footprint
from cp_plugin.planner.training.iteration import iteration
from cp_plugin.planner.training.model import LINEAR, Model
from cp_plugin.planner.training.parallel import Parallel, problem

_PATIENCE = 4000
"""Events (kernels and messages of the programs) that are simulated in vain before the rest of a method is given up."""
_LONG = 600
"""Events of a program, such as that of a large ring, from which on two in vain are enough."""
Progress = Callable[[str], None]
_HOPELESS = 1.5
"""A method that takes at least so many times as long as the best is not simulated: what it takes at least is shown."""
KNOWN_ERROR = 0.10
"""How far a predicted ratio of two methods is off: in one setting, half of the published pairs are within this of it
(``python ci/papers``). Methods whose iterations differ by no more are a tie, which the fewest bytes win."""
KNOWN = f"± {KNOWN_ERROR:.0%}"
"""What stands behind a ratio that was predicted."""


def tie(seconds: float, others: float) -> bool:
    """Whether predictions cannot tell the two apart."""
    return bool(max(seconds, others) <= (1 + KNOWN_ERROR) * min(seconds, others))


def over(seconds: float, fastest: float, *, alone: bool) -> str:
    """Beside the fastest: ``tie``, or how many times as long and how sure that is, such as ``1.24x ± 10%``.

    alone: nothing ties with the fastest.
    """
    if not tie(seconds, fastest):
        return f"{seconds / fastest:.2f}x {KNOWN}"
    return "1.00x" if alone else "tie"


class Lost(NamedTuple):
    """A method that is not simulated."""

    name: str
    seconds: float
    """What an iteration takes at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was found."""

    model: Model
    cluster: Cluster
    limit: float
    """Bytes of memory that a device has."""
    found: Sequence[Priced]
    """The best candidate of each method: those that tie with the fastest, fewest bytes first; then the others, fastest
    first. What does not fit the memory is behind what does."""
    tied: int
    """The first so many of these are a tie, with the winner."""
    lost: Sequence[Lost]
    cannot: Mapping[str, str]
    """Provider -> the reason why it cannot do this at all."""
    tried: int
    """Candidates, of which so many were simulated."""
    simulated: int

    @property
    def best(self) -> Priced:
        """The winner: of those that tie with the fastest, the one that sends fewest bytes."""
        return self.found[0]

    @property
    def fastest(self) -> float:
        """Seconds of the fastest of those that tie with the winner."""
        return min(priced.iteration.seconds for priced in self.found[: self.tied])

    def fits(self, priced: Priced) -> bool:
        """Whether its memory is there."""
        return priced.footprint.total <= self.limit


def plan(
    model: Model,
    shapes: Sequence[Parallel],
    cluster: Cluster,
    *,
    fp8: Sequence[Fp8 | None] = (None,),
    limit: float = 0,
    allowed: Allowed = ALL,
    hopeless: float = _HOPELESS,
    worth: float = KNOWN_ERROR,
    progress: Progress = lambda text: None,
) -> Plan:
    """Find the best candidate of every method, in the best of the shapes.

    Of shapes that cannot be told apart, those with fewest context-parallel ranks are tried first, and others only where
    they may be faster by more than ``worth``.

    Args:
        shapes: ways to divide the model over the devices.
        fp8: what may travel in FP8; None: nothing.
        limit: bytes of memory of a device; 0: all that the cluster's device has.
        allowed: what may be chosen. Where that is nothing, ``found`` is empty.
        hopeless: a method that takes at least so many times as long as the best is not simulated.
        worth: by how much faster another shape must perhaps be to be tried; 0: the fastest shape is found.
        progress: told what is being tried.

    Raises:
        ValueError: if nothing fits the memory: what would.
    """
    limit = limit or cluster.device.memory_bytes
    fitting = [shape for shape in shapes if footprint(model, shape).total <= limit]
    if not fitting:
        raise ValueError(_what_would_fit(model, shapes, cluster, limit))
    searches = [_Search(model, shape, cluster, fp8, limit, allowed, hopeless, progress) for shape in fitting]
    least = min(search.per_token for search in searches)
    best: tuple[_Search, Priced] | None = None
    for search in sorted(searches, key=lambda s: (0, s.shape.context) if tie(s.per_token, least) else (1, s.per_token)):
        if best is not None and (1 + worth) * search.per_token >= 1 / best[1].tokens_per_s:
            continue
        for found in search.best():
            fits = found.footprint.total <= limit
            if fits and (best is None or found.tokens_per_s > best[1].tokens_per_s):
                best = search, found
    search = best[0] if best is not None else min(searches, key=lambda s: s.per_token)
    return search.plan(sum(s.tried for s in searches), sum(s.simulated for s in searches))


@dataclass
class _Search:
    """All candidates of one shape."""

    model: Model
    shape: Parallel
    cluster: Cluster
    fp8: Sequence[Fp8 | None]
    limit: float
    allowed: Allowed
    hopeless: float
    progress: Progress

    def __post_init__(self) -> None:
        model, shape, cluster = self.model, self.shape, self.cluster
        self._letters = [letter for letter in sorted(set(model.attention_pattern)) if letter != LINEAR]
        self._main = (self._letters or [LINEAR])[0]
        self._problems = {
            letter: on(problem(model, shape, letter), cluster, shape.tensor) for letter in set(model.attention_pattern)
        }
        self._priced: dict[str, Priced] = {}
        self._bounds: dict[str, float] = {}
        self._seen: dict[tuple[object, ...], Priced] = {}
        self.tried = self.simulated = 0
        self._alone = {letter: computes(p, cluster) for letter, p in self._problems.items()}
        seconds = iteration(model, shape, cluster, self._alone).seconds
        self.per_token = seconds * shape.devices / (shape.global_batch * shape.seq_length)
        """Seconds per token and device that no method can undercut."""

    def best(self) -> Iterator[Priced]:
        """The best candidate of each method, most promising methods first."""
        ordered = {name: self._ordered(some) for name, some in self._candidates().items() if some}
        self.tried = sum(map(len, ordered.values()))
        best = math.inf
        for name, some in sorted(ordered.items(), key=lambda item: item[1][0][0]):
            self._bounds[name] = some[0][0]
            if some[0][0] > self.hopeless * best:
                continue
            found = self._best_of(name, some)
            self._priced[name] = found
            if self._fits(found):
                best = min(best, found.iteration.seconds)
            yield found

    def plan(self, tried: int, simulated: int) -> Plan:
        """What was found, once ``best`` has come to its end."""
        if not self._priced:
            list(self.best())
        found = sorted(self._priced.values(), key=self._rank)
        tied = sum(self._fits(p) == self._fits(found[0]) and self._tie(p, found[0]) for p in found)
        found[:tied] = sorted(found[:tied], key=lambda p: (p.sent, len(p.candidate.setup.options.chosen)))
        lost = [Lost(name, bound) for name, bound in self._bounds.items() if name not in self._priced]
        return Plan(
            model=self.model,
            cluster=self.cluster,
            limit=self.limit,
            found=found,
            tied=tied,
            lost=sorted(lost, key=lambda one: one.seconds),
            cannot=refusals(self._problems[self._letters[0]]) if self._letters else {},
            tried=max(tried, self.tried),
            simulated=max(simulated, self.simulated),
        )

    def _candidates(self) -> dict[str, list[Candidate]]:
        """Of softmax attention, for all its kinds of layers at once; of linear attention where there is no other."""
        if not self._letters:
            return {c.name: [c] for c in linear_candidates(self._problems[LINEAR])}
        first, *more = self._letters
        found = candidates(self._problems[first], self.fp8, self.allowed)
        for letter in more:
            others = candidates(self._problems[letter], self.fp8, self.allowed)
            also = {c.flags for some in others.values() for c in some}
            found = {name: [c for c in some if c.flags in also] for name, some in found.items()}
        return found

    def _ordered(self, some: Sequence[Candidate]) -> list[tuple[float, Candidate]]:
        """With what an iteration takes at least, cheapest first; of equals the one with most ranks that share heads,
        which exchanges least often."""
        bounds = [(self._bound(candidate), candidate) for candidate in some]
        return sorted(bounds, key=lambda pair: (pair[0], -(pair[1].setup.options.head_parallel or 1)))

    def _bound(self, candidate: Candidate) -> float:
        seconds = least(candidate, self.cluster, self.shape.tensor)
        every = {**self._alone, self._main: seconds}
        return iteration(self.model, trained(candidate, self.shape), self.cluster, every).seconds

    def _best_of(self, name: str, some: Sequence[tuple[float, Candidate]]) -> Priced:
        """Of one method: from the most promising on, until several in a row were no better or none can be; then with
        its other choices made otherwise."""
        best: Priced | None = None
        in_vain: list[int] = []
        for bound, candidate in some:
            if best is not None and self._fits(best) and _enough(in_vain, bound, best.iteration.seconds):
                break
            found = self._price(candidate)
            in_vain.append(found.events)
            if best is None or self._rank(found) < self._rank(best):
                best, in_vain = found, []
        assert best is not None
        others = [
            self._price(c) for c in variants(best.candidate, self.allowed) if self._bound(c) < best.iteration.seconds
        ]
        return min((best, *others), key=self._rank)

    def _price(self, candidate: Candidate) -> Priced:
        key = candidate.upstream, composition(candidate.setup)
        if key not in self._seen:
            self.progress(f"{candidate.name} {candidate.setup}")
            others = {letter: its for letter, its in self._problems.items() if letter != self._main}
            self._seen[key] = price(candidate, beside(candidate, others), self.model, self.shape, self.cluster)
            self.simulated += 1
        return replace(self._seen[key], candidate=candidate)

    def _rank(self, priced: Priced) -> tuple[bool, float]:
        """What fits first, then what is faster."""
        return not self._fits(priced), priced.iteration.seconds

    def _tie(self, priced: Priced, other: Priced) -> bool:
        return tie(priced.iteration.seconds, other.iteration.seconds)

    def _fits(self, priced: Priced) -> bool:
        return priced.footprint.total <= self.limit


def _enough(in_vain: Sequence[int], bound: float, best: float) -> bool:
    """Whether to try no more candidates, which take at least ``bound``, after so many events of those that were no
    better."""
    hardly = tie(bound, best) and len(in_vain) > 1
    return bound >= best or hardly or sum(in_vain) >= _PATIENCE or (len(in_vain) > 1 and in_vain[-1] >= _LONG)


def _what_would_fit(model: Model, shapes: Sequence[Parallel], cluster: Cluster, limit: float) -> str:
    """The shape that needs least memory, and how much that is."""
    needs = {shape: footprint(model, shape) for shape in shapes}
    shape = min(needs, key=lambda s: needs[s].total)
    parts = ", ".join(f"{name} {in_bytes(n)}" for name, n in needs[shape].parts.items())
    advice = "more devices (--devices), a shorter --seq-length, a smaller model, or a device with more memory"
    if shape.recompute != "full":
        advice = f"--recompute-granularity full, {advice}"
    return (
        f"nothing fits: {model.name} with {shape.seq_length} tokens on {shape.devices} devices needs at least "
        f"{in_bytes(needs[shape].total)} on each ({parts}), with tensor {shape.tensor}, pipeline {shape.pipeline}, "
        f"context {shape.context}, recomputation {shape.recompute}; {cluster.device.name} has {in_bytes(limit)}. Use "
        f"{advice}"
    )
