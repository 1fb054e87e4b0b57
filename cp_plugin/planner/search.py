"""Search for the fastest training: candidates in order of their lower bounds, until none can win."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cp_plugin.common.text import in_bytes
from cp_plugin.core.problem import Fp8
from cp_plugin.planner.candidates import ALL, DEFAULT, Allowed, Candidate, refusals, variants
from cp_plugin.planner.division import Division
from cp_plugin.planner.errors import KNOWN_ERROR, beating, tie
from cp_plugin.planner.machine.events import Seconds
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.price import Priced, priced, trained
from cp_plugin.planner.training.footprint import footprint
from cp_plugin.planner.training.iteration import iteration
from cp_plugin.planner.training.model import Model
from cp_plugin.planner.training.parallel import Parallel, kept

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    model: Model
    cluster: Cluster
    limit: float
    """Bytes of device memory."""
    found: Sequence[Priced]
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
        return self.found[0]

    @property
    def fastest(self) -> float:
        """Seconds of the fastest of those that tie."""
        return min(p.iteration.seconds for p in self.found[: self.tied])

    def beating(self, priced: Priced) -> Priced | None:
        """Of those that tie the one most clearly faster than another method; None: that ties, too."""
        return _beating(priced, self.found[: self.tied])

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
    apart: bool = False,
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
        apart: stock Megatron's methods have a best shape of their own, and every method may also recompute ``KEPT``
            alone, with which stock keeps attention's output, too.
        progress: called with a description of each candidate before it is priced.

    Raises:
        ValueError: if nothing fits the memory: what would.
    """
    limit = limit or cluster.device.memory_bytes
    fitting = [shape for shape in shapes if footprint(model, shape).total <= limit]
    if not fitting:
        raise ValueError(_what_would_fit(model, shapes, cluster, limit))
    chosen, every = [], []
    for side in _sides(allowed) if apart else [allowed]:
        best: _Search | None = None
        searches: list[_Search] = []
        for some in (fitting, reserve):
            if some and best is None:
                divided = zip(some, Division.each(model, some, cluster, fp8, side), strict=True)
                here = [
                    _Search(model, kept(shape) if apart else [shape], division, limit, hopeless, progress)
                    for shape, division in divided
                ]
                best, searches = _fastest(here, worth), [*searches, *here]
        chosen.append(best or min(searches, key=lambda s: s.per_token))
        every += searches
    return _answer(chosen, sum(s.tried for s in every), sum(s.simulated for s in every))


def _sides(allowed: Allowed) -> list[Allowed]:
    """Our methods, and stock Megatron's."""
    suits = allowed.suits
    return [
        replace(allowed, suits=lambda c: not c.upstream and suits(c)),
        replace(allowed, suits=lambda c: c.upstream and suits(c)),
    ]


def _answer(searches: Sequence[_Search], tried: int, simulated: int) -> Plan:
    """The methods of these searches, one search for each side or one for all."""
    for search in searches:
        search.finish()
    rank, division, limit = searches[0].rank, searches[0].division, searches[0].limit
    found = sorted((p for search in searches for p in search.priced.values()), key=rank)
    able = [p for p in found if (p.footprint.total <= limit) == (found[0].footprint.total <= limit)]
    tying = [p for p in able if _beating(p, able) is None]
    found = [*sorted(tying, key=_simplicity), *(p for p in found if p not in tying)]
    lost = [Lost(name, bound) for s in searches for name, bound in s.bounds.items() if name not in s.priced]
    return Plan(
        model=searches[0].model,
        cluster=division.cluster,
        limit=limit,
        found=found,
        tied=len(tying),
        lost=sorted(lost, key=lambda one: one.seconds),
        cannot=refusals(division.problems[division.main]) if division.softmax else {},
        tried=max(tried, sum(s.tried for s in searches)),
        simulated=max(simulated, sum(s.simulated for s in searches)),
    )


def simplest(some: Sequence[Priced]) -> Priced:
    """Of those that tie; memory is not looked at."""
    return min((p for p in some if _beating(p, some) is None), key=_simplicity)


def _beating(priced: Priced, others: Iterable[Priced]) -> Priced | None:
    return beating(priced, others, lambda p: p.iteration.seconds, lambda p: p.provider)


def _fastest(searches: Sequence[_Search], worth: float) -> _Search | None:
    """The search whose best candidate is the fastest that fits; None if nothing fits."""
    least = min(search.per_token for search in searches)
    best: tuple[_Search, Priced] | None = None
    for search in sorted(searches, key=lambda s: (0, s.context) if tie(s.per_token, least) else (1, s.per_token)):
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
    shapes: Sequence[Parallel]
    """The shape, with each recomputation to choose from."""
    division: Division
    limit: float
    hopeless: float
    progress: Progress

    def __post_init__(self) -> None:
        self.priced: dict[str, Priced] = {}
        """Method -> its best candidate."""
        self.bounds: dict[str, float] = {}
        self._seen: dict[int, Priced] = {}
        self.tried = self.simulated = 0
        model, division, shape = self.model, self.division, self.shapes[0]
        self.context = shape.context
        seconds = min(iteration(model, some, division.cluster, division.alone).seconds for some in self.shapes)
        self.per_token = seconds * shape.devices / (shape.global_batch * shape.seq_length)
        """Lower bound over all methods: seconds per token and device."""

    def best(self) -> Iterator[Priced]:
        """The best candidate of each method, most promising methods first."""
        ordered = {name: self._ordered(some) for name, some in self.division.candidates.items()}
        self.tried = sum(map(len, ordered.values()))
        best = math.inf
        for name, some in sorted(ordered.items(), key=lambda item: item[1][0][0]):
            self.bounds[name] = some[0][0]
            if some[0][0] > self.hopeless * best:
                continue
            found = self._best_of(some)
            self.priced[name] = found
            if self.fits(found):
                best = min(best, found.iteration.seconds)
            yield found

    def finish(self) -> None:
        """Price every method, unless ``best`` was exhausted."""
        if not self.priced:
            list(self.best())

    def _ordered(self, some: Sequence[tuple[Candidate, Seconds]]) -> list[tuple[float, Candidate]]:
        """With lower bounds, lowest first; of equals the largest head axis, which exchanges least often."""
        bounds = [(self._bound(candidate, seconds), candidate) for candidate, seconds in some]
        return sorted(bounds, key=lambda pair: (pair[0], -(pair[1].setup.options.head_parallel or 1)))

    def _bound(self, candidate: Candidate, seconds: Seconds) -> float:
        """Lower bound on an iteration, given that on an attention call."""
        every = {**self.division.alone, self.division.main: seconds}
        cluster = self.division.cluster
        return min(iteration(self.model, trained(candidate, s), cluster, every).seconds for s in self.shapes)

    def _best_of(self, some: Sequence[tuple[float, Candidate]]) -> Priced:
        """The best candidate of one method, then of its variants."""
        best: Priced | None = None
        in_vain: list[int] = []
        for bound, candidate in some:
            if best is not None and self.fits(best) and _enough(in_vain, bound, best.iteration.seconds):
                break
            found = self._price(candidate)
            in_vain.append(found.events)
            if best is None or self.rank(found) < self.rank(best):
                best, in_vain = found, []
        assert best is not None
        near = variants(best.candidate, self.division.allowed)
        self.tried += len(near)
        bounds = ((self._bound(c, self.division.least(c)), c) for c in near)
        others = [self._price(c) for bound, c in bounds if bound < best.iteration.seconds]
        return min((best, *others), key=self.rank)

    def _price(self, candidate: Candidate) -> Priced:
        self.progress(f"{candidate.name} {candidate.setup}")
        timelines = self.division.timelines(candidate)
        key = id(timelines)
        if key not in self._seen:
            cluster = self.division.cluster
            every = (priced(candidate, timelines, self.model, shape, cluster) for shape in self.shapes)
            self._seen[key] = min(every, key=self.rank)
            self.simulated += 1
        return replace(self._seen[key], candidate=candidate)

    def rank(self, priced: Priced) -> tuple[bool, float]:
        """What fits first, then what is faster."""
        return not self.fits(priced), priced.iteration.seconds

    def fits(self, priced: Priced) -> bool:
        return priced.footprint.total <= self.limit


def _simplicity(priced: Priced) -> tuple[bool, bool, int, float]:
    """Stock Megatron before ours, its default first; then fewer flags, and less time."""
    one = priced.candidate
    ours, other = not one.upstream, one.name != DEFAULT
    return ours, other, len(one.flags.split()), priced.iteration.seconds


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
