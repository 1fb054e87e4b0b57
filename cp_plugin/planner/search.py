"""Search for the fastest training: candidates in order of their lower bounds, until none can win."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cp_plugin.common.text import in_bytes
from cp_plugin.core.problem import Fp8
from cp_plugin.planner.candidates import ALL, Allowed, Candidate, refusals, variants
from cp_plugin.planner.division import Division
from cp_plugin.planner.machine.events import Seconds
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.price import Priced, priced, trained
from cp_plugin.planner.training.footprint import footprint
from cp_plugin.planner.training.iteration import iteration
from cp_plugin.planner.training.model import Model
from cp_plugin.planner.training.parallel import Parallel

_PATIENCE = 4000
"""Simulated events without improvement after which the rest of a method is skipped."""
_LONG = 600
"""Events of a long program, such as a large ring's, of which two without improvement are enough."""
Progress = Callable[[str], None]
_HOPELESS = 1.5
"""Methods whose lower bound is this many times the best are not simulated."""
KNOWN_ERROR = 0.10
"""Median error of a predicted ratio of two methods over the published pairs (``python ci/papers``). Methods within it
are a tie, which the fewest bytes win."""
KNOWN = f"± {KNOWN_ERROR:.0%}"


def tie(seconds: float, others: float) -> bool:
    """Whether predictions cannot tell the two apart."""
    return bool(max(seconds, others) <= (1 + KNOWN_ERROR) * min(seconds, others))


def over(seconds: float, fastest: float, *, alone: bool) -> str:
    """The ratio to the fastest with its error, such as ``1.24x ± 10%``, or ``tie``.

    Args:
        alone: nothing ties with the fastest.
    """
    if not tie(seconds, fastest):
        return f"{seconds / fastest:.2f}x {KNOWN}"
    return "1.00x" if alone else "tie"


class Lost(NamedTuple):
    """A method that was not simulated."""

    name: str
    seconds: float
    """Lower bound of an iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    model: Model
    cluster: Cluster
    limit: float
    """Bytes of device memory."""
    found: Sequence[Priced]
    """Each method's best candidate: those that tie with the fastest, fewest bytes first, then the others, fastest
    first. What does not fit the memory comes last."""
    tied: int
    """How many of these tie, the winner included."""
    lost: Sequence[Lost]
    cannot: Mapping[str, str]
    """Provider -> why it cannot run this at all."""
    tried: int
    """Number of candidates, variants included."""
    simulated: int

    @property
    def best(self) -> Priced:
        """The winner: of those that tie with the fastest, the one that sends fewest bytes."""
        return self.found[0]

    @property
    def fastest(self) -> float:
        """Seconds of the fastest of those that tie."""
        return min(priced.iteration.seconds for priced in self.found[: self.tied])

    def fits(self, priced: Priced) -> bool:
        return priced.footprint.total <= self.limit


def plan(
    model: Model,
    shapes: Sequence[Parallel],
    cluster: Cluster,
    *,
    reserve: Sequence[Parallel] = (),
    fp8: Sequence[Fp8 | None] = (None,),
    limit: float = 0,
    allowed: Allowed = ALL,
    hopeless: float = _HOPELESS,
    worth: float = KNOWN_ERROR,
    progress: Progress = lambda text: None,
) -> Plan:
    """Find each method's best candidate in the best of the shapes.

    Of shapes that tie, those with fewest context-parallel ranks are tried first; others only where they may be faster
    by more than ``worth``.

    Args:
        shapes: divisions of the model over the devices.
        reserve: others, for where nothing of the shapes fits the memory together with its attention.
        fp8: payload formats to consider; None: the model's dtype.
        limit: bytes of device memory; 0: all of it.
        allowed: restrictions. Where nothing satisfies them, ``found`` is empty.
        hopeless: methods whose lower bound is this many times the best are not simulated.
        worth: potential gain for which another shape is tried; 0: the fastest shape is found.
        progress: called with a description of each candidate before it is priced.

    Raises:
        ValueError: if nothing fits the memory: what would.
    """
    limit = limit or cluster.device.memory_bytes
    fitting = [shape for shape in shapes if footprint(model, shape).total <= limit]
    if not fitting:
        raise ValueError(_what_would_fit(model, shapes, cluster, limit))
    best: _Search | None = None
    searches: list[_Search] = []
    for some in (fitting, reserve):
        if some and best is None:
            divided = zip(some, Division.each(model, some, cluster, fp8, allowed), strict=True)
            here = [_Search(model, shape, division, limit, hopeless, progress) for shape, division in divided]
            best, searches = _fastest(here, worth), [*searches, *here]
    best = best or min(searches, key=lambda s: s.per_token)
    return best.plan(sum(s.tried for s in searches), sum(s.simulated for s in searches))


def _fastest(searches: Sequence[_Search], worth: float) -> _Search | None:
    """The search whose best candidate is the fastest that fits; None if nothing fits."""
    least = min(search.per_token for search in searches)
    best: tuple[_Search, Priced] | None = None
    for search in sorted(searches, key=lambda s: (0, s.shape.context) if tie(s.per_token, least) else (1, s.per_token)):
        if best is not None and (1 + worth) * search.per_token >= 1 / best[1].tokens_per_s:
            continue
        for found in search.best():
            if search.fits(found) and (best is None or found.tokens_per_s > best[1].tokens_per_s):
                best = search, found
    return None if best is None else best[0]


@dataclass
class _Search:
    """Search over the candidates of one shape."""

    model: Model
    shape: Parallel
    division: Division
    limit: float
    hopeless: float
    progress: Progress

    def __post_init__(self) -> None:
        self._priced: dict[str, Priced] = {}
        self._bounds: dict[str, float] = {}
        self._seen: dict[int, Priced] = {}
        self.tried = self.simulated = 0
        model, shape, division = self.model, self.shape, self.division
        seconds = iteration(model, shape, division.cluster, division.alone).seconds
        self.per_token = seconds * shape.devices / (shape.global_batch * shape.seq_length)
        """Lower bound over all methods: seconds per token and device."""

    def best(self) -> Iterator[Priced]:
        """The best candidate of each method, most promising methods first."""
        ordered = {name: self._ordered(some) for name, some in self.division.candidates.items()}
        self.tried = sum(map(len, ordered.values()))
        best = math.inf
        for name, some in sorted(ordered.items(), key=lambda item: item[1][0][0]):
            self._bounds[name] = some[0][0]
            if some[0][0] > self.hopeless * best:
                continue
            found = self._best_of(some)
            self._priced[name] = found
            if self.fits(found):
                best = min(best, found.iteration.seconds)
            yield found

    def plan(self, tried: int, simulated: int) -> Plan:
        """The result, after ``best`` is exhausted."""
        division = self.division
        if not self._priced:
            list(self.best())
        found = sorted(self._priced.values(), key=self._rank)
        tied = sum(
            self.fits(p) == self.fits(found[0]) and tie(p.iteration.seconds, found[0].iteration.seconds) for p in found
        )
        found[:tied] = sorted(found[:tied], key=lambda p: (p.sent, len(p.candidate.setup.options.chosen)))
        lost = [Lost(name, bound) for name, bound in self._bounds.items() if name not in self._priced]
        return Plan(
            model=self.model,
            cluster=division.cluster,
            limit=self.limit,
            found=found,
            tied=tied,
            lost=sorted(lost, key=lambda one: one.seconds),
            cannot=refusals(division.problems[division.main]) if division.softmax else {},
            tried=max(tried, self.tried),
            simulated=max(simulated, self.simulated),
        )

    def _ordered(self, some: Sequence[tuple[Candidate, Seconds]]) -> list[tuple[float, Candidate]]:
        """With lower bounds, lowest first; of equals the largest head axis, which exchanges least often."""
        bounds = [(self._bound(candidate, seconds), candidate) for candidate, seconds in some]
        return sorted(bounds, key=lambda pair: (pair[0], -(pair[1].setup.options.head_parallel or 1)))

    def _bound(self, candidate: Candidate, seconds: Seconds) -> float:
        """Lower bound on an iteration, given that on an attention call."""
        every = {**self.division.alone, self.division.main: seconds}
        return iteration(self.model, trained(candidate, self.shape), self.division.cluster, every).seconds

    def _best_of(self, some: Sequence[tuple[float, Candidate]]) -> Priced:
        """The best candidate of one method, then of its variants."""
        best: Priced | None = None
        in_vain: list[int] = []
        for bound, candidate in some:
            if best is not None and self.fits(best) and _enough(in_vain, bound, best.iteration.seconds):
                break
            found = self._price(candidate)
            in_vain.append(found.events)
            if best is None or self._rank(found) < self._rank(best):
                best, in_vain = found, []
        assert best is not None
        near = variants(best.candidate, self.division.allowed)
        self.tried += len(near)
        bounds = ((self._bound(c, self.division.least(c)), c) for c in near)
        others = [self._price(c) for bound, c in bounds if bound < best.iteration.seconds]
        return min((best, *others), key=self._rank)

    def _price(self, candidate: Candidate) -> Priced:
        self.progress(f"{candidate.name} {candidate.setup}")
        timelines = self.division.timelines(candidate)
        key = id(timelines)
        if key not in self._seen:
            self._seen[key] = priced(candidate, timelines, self.model, self.shape, self.division.cluster)
            self.simulated += 1
        return replace(self._seen[key], candidate=candidate)

    def _rank(self, priced: Priced) -> tuple[bool, float]:
        """What fits first, then what is faster."""
        return not self.fits(priced), priced.iteration.seconds

    def fits(self, priced: Priced) -> bool:
        return priced.footprint.total <= self.limit


def _enough(in_vain: Sequence[int], bound: float, best: float) -> bool:
    """Whether to stop trying a method.

    Args:
        in_vain: events of each candidate simulated since the last improvement.
        bound: lower bound of the next candidate.
    """
    hardly = tie(bound, best) and len(in_vain) > 1
    return bound >= best or hardly or sum(in_vain) >= _PATIENCE or (len(in_vain) > 1 and in_vain[-1] >= _LONG)


def _what_would_fit(model: Model, shapes: Sequence[Parallel], cluster: Cluster, limit: float) -> str:
    """Message naming the shape that needs least memory."""
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
