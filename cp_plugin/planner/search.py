"""Search for the fastest training: candidates in order of their lower bounds, until none can win."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from cp_plugin.engine.common.text import show_bytes
from cp_plugin.planner.candidates import DEFAULT, Candidate, candidates, linear_candidates, refusals, variants
from cp_plugin.planner.errors import KNOWN_ERROR, tie, typical_error
from cp_plugin.planner.price import (
    Priced,
    add_recomputation,
    computes,
    held,
    least,
    priced,
    problems_of,
    simulated,
    trained,
)
from cp_plugin.planner.query import Query
from cp_plugin.planner.training.footprint import Footprint, footprint
from cp_plugin.planner.training.iteration import iteration
from cp_plugin.planner.training.model import LINEAR
from cp_plugin.planner.training.parallel import Parallel, divided_alike, selections

_PATIENCE = 4000
"""Simulated events without improvement after which the rest of a method is skipped."""
_LONG = 600
"""Events of a long program, such as a large ring's, of which two without improvement are enough."""
WORTH = KNOWN_ERROR / 2
"""Potential gain for which another shape is tried where the two sides are compared."""
Progress = Callable[[str], None]
_HOPELESS = 1.5
"""Methods whose lower bound is this many times the best are not simulated."""


class Lost(NamedTuple):
    """A method that was not simulated."""

    name: str
    seconds: float
    """Lower bound of an iteration."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    query: Query
    methods: Sequence[Priced]
    """Each method's best candidate: those that tie, simplest first, then the others, fastest first. What does not fit
    the memory comes last."""
    tied: int
    """How many of these tie, the winner included: no other is faster by more than is typical of predictions."""
    lost: Sequence[Lost]
    cannot: Mapping[str, str]
    """Provider -> why it cannot run this at all."""
    tried: int
    """Number of candidates, variants included."""
    simulated: int

    @property
    def best(self) -> Priced:
        """The winner: the simplest of those that tie."""
        return self.methods[0]

    @property
    def fastest(self) -> float:
        """Seconds of the fastest of those that tie."""
        return min(p.iteration.seconds for p in self.methods[: self.tied])

    def beating(self, priced: Priced) -> Priced | None:
        """Find the one of those that tie most clearly faster than another method; None: that ties, too."""
        return find_faster(priced, self.methods[: self.tied])

    def fits(self, priced: Priced) -> bool:
        return self.query.fits(priced.footprint)


def answer(
    query: Query, *, hopeless: float = _HOPELESS, worth: float = WORTH, progress: Progress = lambda text: None
) -> Plan:
    """Find each method's best candidate in the best of the shapes: one shape for our methods, one for stock Megatron's.

    Of shapes that tie, those with fewest context-parallel ranks are tried first; others only where they may be faster
    by more than ``worth``. Shapes that differ in recomputation alone are one shape with a choice: each candidate takes
    the fastest that fits. Where nothing is allowed, ``methods`` is empty. ValueError if nothing fits the memory, with
    what would.

    Args:
        hopeless: methods whose lower bound is this many times the best of their side are not simulated.
        worth: potential gain for which another shape is tried; 0: the fastest shape is found.
        progress: called with a description of each candidate before it is priced.
    """
    chosen, every, fits = [], [], False
    ours, theirs = replace(query.allowed, stock=False), replace(query.allowed, refused="only stock Megatron's")
    for stock, allowed in enumerate((ours, theirs)):
        side = replace(query, allowed=allowed)
        choices = _choices(query, stock=bool(stock))
        fitting = [c for c in ([s for s in some if query.fits(footprint(query.model, s))] for some in choices) if c]
        fits = fits or bool(fitting)
        choices = fitting or choices
        searches = [_Search(side, some, hopeless, progress) for some in choices]
        searches = [search for search in searches if search.candidates] or searches[:1]
        best = _fastest(searches, worth) if fitting else None
        chosen.append(best or min(searches, key=lambda s: s.per_token))
        every += searches
    if not fits:
        raise ValueError(_what_would_fit(query))
    return _answer(query, chosen, every)


def _choices(query: Query, *, stock: bool) -> list[list[Parallel]]:
    """Each division of the model with its recomputations, as they are on this side."""
    divisions: dict[Parallel, list[Parallel]] = {}
    for shape in query.shapes:
        divisions.setdefault(divided_alike(shape), []).append(add_recomputation(shape, stock=stock))
    return [[*some, *(selections(query.model, some[0]) if query.free else ())] for some in divisions.values()]


def _answer(query: Query, searches: Sequence[_Search], every: Sequence[_Search]) -> Plan:
    """The methods of these searches, one for each side, out of ``every`` search."""
    for search in searches:
        if not search.priced:  # no shape was searched for the fastest
            list(search.best())
    methods = sorted((p for search in searches for p in search.priced.values()), key=searches[0].rank)
    able = [p for p in methods if query.fits(p.footprint) == query.fits(methods[0].footprint)]
    tied = tying(able)
    lost = [Lost(name, bound) for s in searches for name, bound in s.bounds.items() if name not in s.priced]
    return Plan(
        query=query,
        methods=[*sorted(tied, key=_simplicity), *(p for p in methods if p not in tied)],
        tied=len(tied),
        lost=sorted(lost, key=lambda one: one.seconds),
        cannot=refusals(searches[0].problem) if searches[0].main != LINEAR else {},
        tried=sum(s.tried for s in every),
        simulated=sum(s.simulated for s in every),
    )


def tying(some: Sequence[Priced]) -> list[Priced]:
    """Return those that none of them beats by more than the typical error; memory is not looked at."""
    return [p for p in some if find_faster(p, some) is None]


def simplest(some: Sequence[Priced]) -> Priced:
    """Return the simplest of those that tie."""
    return min(tying(some), key=_simplicity)


def find_faster(one: Priced, others: Iterable[Priced]) -> Priced | None:
    """Find the one of the others most clearly faster; None: ``one`` ties with all that are predicted faster."""

    def margin(other: Priced) -> float:
        error = typical_error(one.provider, other.provider)
        return one.iteration.seconds / other.iteration.seconds / (1 + error)

    clearest = max(others, key=margin)
    return clearest if margin(clearest) > 1 + 1e-9 else None


def _fastest(searches: Sequence[_Search], worth: float) -> _Search | None:
    """The search whose best candidate is the fastest that fits; None if nothing fits."""
    least = min(search.per_token for search in searches)
    best: tuple[_Search, Priced] | None = None
    for search in sorted(searches, key=lambda s: (0, s.context) if tie(s.per_token, least) else (1, s.per_token)):
        if best is not None and (1 + worth) * search.per_token >= 1 / best[1].tokens_per_s:
            continue
        for method in search.best():
            if search.query.fits(method.footprint) and (best is None or method.tokens_per_s > best[1].tokens_per_s):
                best = search, method
    return None if best is None else best[0]


class _Search:
    """Search over the candidates of one shape."""

    def __init__(self, query: Query, shapes: Sequence[Parallel], hopeless: float, progress: Progress) -> None:
        """shapes: the shape, with each recomputation to choose from."""
        self.query, self.shapes, self._hopeless, self._progress = query, shapes, hopeless, progress
        self.priced: dict[str, Priced] = {}
        """Method -> its best candidate."""
        self.bounds: dict[str, float] = {}
        self.tried = self.simulated = 0
        shape = shapes[0]
        self.context = shape.context
        self._problems = problems_of(query.model, shape, query.cluster)
        self._alone = {
            letter: computes(its, query.cluster, linear=letter == LINEAR) for letter, its in self._problems.items()
        }
        self.main, self.problem = next(iter(self._problems.items()))
        self._fastest = self._fastest_shape()
        seconds = iteration(query.model, self._fastest, query.cluster, self._alone).seconds
        self.per_token = seconds * shape.devices / (shape.global_batch * shape.seq_length)
        """Lower bound over all methods: seconds per token and device."""

    @cached_property
    def candidates(self) -> dict[str, list[Candidate]]:
        """Method -> candidates that suit all kinds of softmax layers; linear ones, which stock Megatron has not, where
        there is no softmax layer."""
        if self.main == LINEAR:
            return {} if self.query.allowed.refused else {c.name: [c] for c in linear_candidates(self.problem)}
        query, softmax = self.query, {letter: its for letter, its in self._problems.items() if letter != LINEAR}
        allowed = replace(query.allowed, stock=query.allowed.stock and LINEAR not in self._problems)
        first, *more = (candidates(its, query.fp8, allowed) for its in softmax.values())
        also = [{c.flags for some in others.values() for c in some} for others in more]
        suiting = {name: [c for c in some if all(c.flags in flags for flags in also)] for name, some in first.items()}
        return {name: some for name, some in suiting.items() if some}

    def best(self) -> Iterator[Priced]:
        """The best candidate of each method, most promising methods first."""
        ordered = {name: self._ordered(some) for name, some in self.candidates.items()}
        self.tried = sum(map(len, ordered.values()))
        best = math.inf
        for name, some in sorted(ordered.items(), key=lambda item: item[1][0][0]):
            self.bounds[name] = some[0][0]
            if some[0][0] > self._hopeless * best:
                continue
            priced = self._best_of(some)
            self.priced[name] = priced
            if self.query.fits(priced.footprint):
                best = min(best, priced.iteration.seconds)
            yield priced

    def _ordered(self, some: Sequence[Candidate]) -> list[tuple[float, Candidate]]:
        """Sort by lower bounds, lowest first; of equals the largest head axis, which exchanges least often."""
        bounds = [(self._bound(candidate), candidate) for candidate in some]
        return sorted(bounds, key=lambda pair: (pair[0], -(pair[1].setup.options.head_parallel or 1)))

    def _bound(self, candidate: Candidate) -> float:
        """Lower bound on an iteration."""
        every = {**self._alone, self.main: least(candidate, self.query.cluster, self._fastest.tensor)}
        return iteration(self.query.model, trained(candidate, self._fastest), self.query.cluster, every).seconds

    def _fastest_shape(self) -> Parallel:
        """Choose the recomputation that takes least time of those that fit without attention."""
        model, cluster = self.query.model, self.query.cluster
        shapes = [*self.shapes, *self._recompute_layers(lambda shape: footprint(model, shape))]
        return min(shapes, key=lambda shape: iteration(model, shape, cluster, self._alone).seconds)

    def _best_of(self, some: Sequence[tuple[float, Candidate]]) -> Priced:
        """The best candidate of one method, then of its variants."""
        best: Priced | None = None
        in_vain: list[int] = []
        for bound, candidate in some:
            if best is not None and self.query.fits(best.footprint) and _enough(in_vain, bound, best.iteration.seconds):
                break
            priced = self._price(candidate)
            in_vain.append(priced.events)
            if best is None or self.rank(priced) < self.rank(best):
                best, in_vain = priced, []
        assert best is not None
        near = variants(best.candidate, self.query.allowed)
        self.tried += len(near)
        others = [self._price(c) for c in near if self._bound(c) < best.iteration.seconds]
        return min((best, *others), key=self.rank)

    def _price(self, candidate: Candidate) -> Priced:
        self._progress(f"{candidate.name} {candidate.setup}")
        self.simulated += 1
        model, cluster = self.query.model, self.query.cluster
        timelines = simulated(candidate, self._problems, cluster, self._fastest.tensor)
        shapes = [*self.shapes, *self._recompute_layers(lambda shape: held(candidate, timelines, model, shape))]
        return min((priced(candidate, timelines, model, shape, cluster) for shape in shapes), key=self.rank)

    def _recompute_layers(self, needs: Callable[[Parallel], Footprint]) -> list[Parallel]:
        """Full recomputation of the fewest layers of each stage that fit; empty unless recomputation is open."""
        full = next((shape for shape in self.shapes if shape.recompute == "full"), None)
        if full is None or not self.query.free:
            return []
        some = range(1, -(-self.query.model.layers // full.pipeline))
        first = bisect_left(some, True, key=lambda n: self.query.fits(needs(replace(full, recompute_layers=n))))
        return [replace(full, recompute_layers=n) for n in some[first : first + 1]]

    def rank(self, priced: Priced) -> tuple[bool, float]:
        """Order by what fits, then by what is faster."""
        return not self.query.fits(priced.footprint), priced.iteration.seconds


def _simplicity(priced: Priced) -> tuple[bool, bool, int, float]:
    """Stock Megatron before ours, its default first; then fewer flags, and less time."""
    one = priced.candidate
    ours, other = not one.upstream, one.name != DEFAULT
    return ours, other, len(one.flags.split()), priced.iteration.seconds


def _enough(in_vain: Sequence[int], bound: float, best: float) -> bool:
    """Return True if a method need not be tried any more.

    Args:
        in_vain: events of each candidate simulated since the last improvement.
        bound: lower bound of the next candidate.
    """
    hardly = tie(bound, best) and len(in_vain) > 1
    return bound >= best or hardly or sum(in_vain) >= _PATIENCE or (len(in_vain) > 1 and in_vain[-1] >= _LONG)


def _what_would_fit(query: Query) -> str:
    """Message naming the shape that needs least memory."""
    needs = {shape: footprint(query.model, add_recomputation(shape, stock=True)) for shape in query.shapes}
    shape = min(needs, key=lambda s: needs[s].total)
    parts = ", ".join(f"{name} {show_bytes(n)}" for name, n in needs[shape].parts.items())
    advice = "more devices (--devices), a shorter --seq-length, a smaller model, or a device with more memory"
    if shape.recompute != "full":
        advice = f"--recompute-granularity full, {advice}"
    return (
        f"nothing fits: {query.model.name} with {shape.seq_length} tokens on {shape.devices} devices needs at least "
        f"{show_bytes(needs[shape].total)} on each ({parts}), with tensor {shape.tensor}, pipeline {shape.pipeline}, "
        f"context {shape.context}, recomputation {shape.recompute}; {query.cluster.device.name} has "
        f"{show_bytes(query.memory)}. Use {advice}"
    )
