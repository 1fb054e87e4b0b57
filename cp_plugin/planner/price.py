"""Price of a candidate in a training run: its attention simulated, or bounded from below by closed formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cp_plugin.engine.core.dtypes import dtype_name
from cp_plugin.engine.core.problem import Problem
from cp_plugin.planner.candidates import Candidate, linear_candidates
from cp_plugin.planner.machine import kernel_time
from cp_plugin.planner.machine.events import Post, Seconds
from cp_plugin.planner.machine.hardware import CPU, Cluster
from cp_plugin.planner.machine.links import place
from cp_plugin.planner.packs import pairs
from cp_plugin.planner.trace.program import program
from cp_plugin.planner.trace.stock import stock_program
from cp_plugin.planner.trace.timeline import Ranks, Timeline, links_of, simulate
from cp_plugin.planner.training.footprint import Footprint, footprint
from cp_plugin.planner.training.iteration import Iteration, iteration
from cp_plugin.planner.training.model import LINEAR, Model
from cp_plugin.planner.training.parallel import Parallel, problem

_NARROWEST = 2 / 3
"""Lower bound on upstream's backward bytes over the formula's: keys, values, and gradients half as wide as ours."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """One candidate in one training."""

    candidate: Candidate
    parallel: Parallel
    timelines: Mapping[str, Timeline]
    """Attention letter of a layer -> one call; the candidate's own layers first."""
    iteration: Iteration
    footprint: Footprint
    repeats: float = 0.0
    """Seconds per iteration in which recomputation repeats attention: stock Megatron does, we keep its output."""

    @property
    def provider(self) -> str:
        """Our provider; for stock Megatron's methods the one that moves the same data."""
        return self.candidate.setup.provider.name

    @property
    def main(self) -> Timeline:
        """The call in the candidate's own layers."""
        return next(iter(self.timelines.values()))

    @property
    def tokens_per_s(self) -> float:
        """Per device."""
        return self.parallel.global_batch * self.parallel.seq_length / self.iteration.seconds / self.parallel.devices

    @property
    def events(self) -> int:
        """Number of simulated events."""
        programs = (p for t in self.timelines.values() for p in t.programs.values())
        return sum(len(p.forward) + len(p.backward) for p in programs)

    @property
    def waits_s(self) -> float:
        """Exposed communication of one attention call, of the rank with the most."""
        return max(self.main.exposed_s.values())

    @property
    def sent(self) -> int:
        """Bytes of one attention call, forward and backward, of the rank that sends most."""
        programs = self.main.programs.values()
        return max(sum(e.sent for e in (*p.forward, *p.backward) if isinstance(e, Post)) for p in programs)


def price(candidate: Candidate, model: Model, parallel: Parallel, cluster: Cluster, ranks: Ranks = "busiest") -> Priced:
    """Simulate a candidate for the model's first kind of attention (``problems_of``), and price it.

    ranks: simulated for the candidate; for layers of other kinds always the busiest.
    """
    timelines = simulated(candidate, problems_of(model, parallel, cluster), cluster, parallel.tensor, ranks)
    return priced(candidate, timelines, model, parallel, cluster)


def problems_of(model: Model, parallel: Parallel, cluster: Cluster) -> dict[str, Problem]:
    """Attention letter -> one call in its layers, placed on the cluster. The kind that candidates are for comes first:
    softmax, if the model has any."""
    letters = sorted(set(model.attention_pattern), key=lambda letter: (letter == LINEAR, letter))
    return {letter: place_on(problem(model, parallel, letter), cluster, parallel.tensor) for letter in letters}


def simulated(
    candidate: Candidate, problems: Mapping[str, Problem], cluster: Cluster, stride: int, ranks: Ranks = "busiest"
) -> dict[str, Timeline]:
    """Attention letter -> one call. The candidate is for layers of the first kind; those of other kinds run the same
    method on the same token layout, linear ones LASP-2.

    Args:
        stride: devices between context-parallel ranks: the tensor-parallel size.
        ranks: simulated for the first kind; for the others always the busiest.
    """
    tokens, timelines = candidate.setup.problem, {}
    for letter, its in problems.items():
        setup, first = candidate.setup, not timelines
        if letter == LINEAR and not first:
            setup = linear_candidates(its)[0].setup
        elif not first:
            alike = replace(its, seq_length=tokens.seq_length, bounds=tokens.bounds, placed=tokens.placed)
            setup = replace(setup, problem=alike)
        trace = stock_program if candidate.upstream and setup.provider.kind == "softmax" else program
        some = ranks if first else "busiest"
        timelines[letter] = simulate(setup, cluster=cluster, stride=stride, ranks=some, trace=trace)
    return timelines


def priced(
    candidate: Candidate, timelines: Mapping[str, Timeline], model: Model, parallel: Parallel, cluster: Cluster
) -> Priced:
    """Price a simulated candidate. Under recomputation upstream's methods repeat attention with its messages.

    timelines: of the calls in layers of each kind, the candidate's own first.
    """
    run = trained(candidate, parallel)
    seconds = {letter: t.seconds_of for letter, t in timelines.items()}
    takes = iteration(model, run, cluster, seconds)
    repeats = 0.0
    if run.recompute_attention:
        kept = iteration(model, replace(run, recompute_attention=False), cluster, seconds)
        repeats = takes.seconds - kept.seconds
    return Priced(
        candidate=candidate,
        parallel=parallel,
        timelines=timelines,
        iteration=takes,
        repeats=repeats,
        footprint=held(candidate, timelines, model, parallel),
    )


def held(candidate: Candidate, timelines: Mapping[str, Timeline], model: Model, parallel: Parallel) -> Footprint:
    """Memory of a simulated candidate."""
    peaks = [peak for t in timelines.values() for p in t.programs.values() for peak in p.peaks]
    communicators = sum(t.setup.communicators for t in timelines.values())
    return footprint(model, trained(candidate, parallel), peaks, communicators)


def trained(candidate: Candidate, parallel: Parallel) -> Parallel:
    """The shape as the candidate trains it: recomputation as on its side, documents padded by stock Megatron."""
    repeating = add_recomputation(parallel, stock=candidate.upstream)
    if not candidate.upstream or candidate.setup.problem.size == 1:
        return repeating
    return replace(repeating, seq_length=candidate.setup.problem.seq_length, documents=())


def add_recomputation(parallel: Parallel, *, stock: bool) -> Parallel:
    """The shape with what is recomputed: stock Megatron repeats attention, too, our methods only if asked to."""
    return replace(parallel, recompute_attention=stock or parallel.recompute_attention)


def least(candidate: Candidate, cluster: Cluster, stride: int) -> Seconds:
    """Lower bound on one attention call, from closed formulas alone."""
    setup, problem = candidate.setup, candidate.setup.problem
    links = links_of(setup, cluster, stride)
    busy: dict[tuple[str, str], float] = {}
    for (phase, axis), nbytes in setup.provider.traffic(problem, setup.options, problem.size - 1).items():
        narrower = _NARROWEST if candidate.upstream and phase == "backward" else 1
        level, seconds = links.least(axis, narrower * nbytes)
        busy[phase, level] = busy.get((phase, level), 0.0) + seconds
    computing = computes(problem, cluster, linear=setup.provider.kind == "linear")
    bounds = [
        max(own, *(s for (p, _), s in busy.items() if p == phase), 0.0)
        for phase, own in zip(("forward", "backward"), computing[:2], strict=True)
    ]
    return Seconds(*bounds)


def computes(problem: Problem, cluster: Cluster, *, linear: bool) -> Seconds:
    """Estimate seconds of an attention call's kernels alone, with perfectly balanced work; 0 for linear attention."""
    if linear:
        return Seconds(0.0, 0.0)
    n = problem.seq_length
    seen = n * n / 2 if problem.causal else n * n
    if problem.bounds or problem.window is not None:
        seen = pairs(problem)
    kernel = kernel_time.kernel_for(cluster.device, dtype_name(problem.dtype))
    products = 2 * seen * problem.heads * problem.batch / problem.size
    d, e = problem.head_dim, problem.v_head_dim
    return Seconds(
        products * (d + e) / kernel.forward.flops_per_s, products * (3 * d + 2 * e) / kernel.backward.flops_per_s
    )


def place_on(problem: Problem, cluster: Cluster, stride: int) -> Problem:
    """The problem with the hosts of its ranks and the network between them."""
    hosts = tuple(f"node{n}" for n in place(problem.size, cluster, stride))
    return problem.with_transport(hosts=hosts, network="gloo" if cluster.device.name == CPU else "nccl")
