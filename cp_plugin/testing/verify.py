"""``cp-plugin verify``: run providers on this machine's devices and compare with attention on one device.

    CPU                      forked Gloo ranks
    CUDA, a device per rank  forked NCCL ranks
    CUDA, fewer devices      ranks that are threads on one device (``comm/threads.py``)

Float64 and float32 have fixed limits. In half precision the limit of each tensor is twice the error of one call of the
same kernel on one device; with ``--fp8`` its inputs and results are rounded as in transit. (A method rounds some of
them, and a tensor again where parts of it are merged: 2.6 % each, e4m3's mean.) ``--gradient-dtype model`` adds the
roundings of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist

from cp_plugin.engine.attention import calls
from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.calls import Setup, options_of, settled_or_reason, setups
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Decay, Problem
from cp_plugin.engine.kernels import blocks
from cp_plugin.engine.linear import kernels
from cp_plugin.engine.methods import fp8
from cp_plugin.engine.methods.protocol import Kind, Provider
from cp_plugin.testing.launch import RankError, run_ranks
from cp_plugin.testing.oracle import TENSORS, Case, make_case, relative_errors, tensors
from cp_plugin.testing.ranks import join, refuse_too_large, with_progress

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest relative error (norm) of each tensor."""
HALF_FACTOR = 2.0
"""In half precision: the allowed multiple of one kernel call's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Distance of a setup from the oracle."""

    setup: Setup
    errors: Mapping[str, float] = field(default_factory=dict)
    """out, dq, dk, dv -> relative error."""
    limits: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    """Why there is no result, or what else is wrong; empty otherwise."""
    sent: tuple[int, ...] = ()
    """Bytes that each rank sends per decoded token and sequence; empty: nothing was decoded."""

    @property
    def worst(self) -> str:
        """The tensor closest to its limit, or furthest beyond it."""
        return max(self.errors, key=lambda name: self.errors[name] / self.limits[name])

    @property
    def ok(self) -> bool:
        """True if there is a result with every tensor within its limit."""
        return not self.failure and all(error <= self.limits[name] for name, error in self.errors.items())


def plan(chosen: Sequence[str | Provider], problems: Sequence[Problem], options: Options) -> list[Setup]:
    """Every provider (see ``setups``) on all its layouts, or the one asked for, for every problem.

    If neither providers nor options were chosen, also nested rings with both backwards, and a head axis. ValueError for
    an unknown provider, or options that do not fit it.
    """
    planned = []
    for setup in setups(chosen, problems[0], options):
        provider = setup.provider
        variants = [options_of(provider, options)]
        if not chosen and options == Options():
            variants += _unchosen_options(provider)
        for layout in provider.layouts if options.layout is None else (options.layout,):
            for variant in variants:
                placed = replace(variant, layout=layout)
                planned += [settled_or_reason(provider, p, placed) for p in _vary_decay(provider, problems)]
    return planned


def _vary_decay(provider: Provider, problems: Sequence[Problem]) -> list[Problem]:
    """The problems; for linear attention each with every supported decay, and under the delta rule if it has that."""
    if provider.kind == "softmax":
        return list(problems)
    known = {d for d in get_args(Decay) for p in problems if not provider.unsupported(replace(p, decay=d), Options())}
    varied = [replace(p, decay=decay) for p in problems for decay in get_args(Decay) if decay in known | {"none"}]
    under_delta = (replace(p, delta=True) for p in varied)
    return varied + [p for p in under_delta if provider.unsupported(p, Options()) is None]


class Check[C, T](NamedTuple):
    """What is compared: a call, or generation (``verify_decode``)."""

    make: Callable[[Problem, Kind], C]
    """The inputs of a setup, and the right answer."""
    run: Callable[[Setup, ContextParallel, C, torch.device], T]
    """On every rank."""
    judge: Callable[[Setup, list[T]], Result]
    """From what all ranks returned."""


def verify(
    planned: Sequence[Setup], device: str, *, threads: bool = False, check: Check[Any, Any] | None = None
) -> list[Result]:
    """Run the possible setups, with a progress bar; their results, in order. ValueError if a problem is too large for
    this machine, or the requested kernel cannot run it.

    Args:
        device: ``cpu`` or ``cuda``.
        threads: run ranks as threads on one device, even where there are devices for all.
        check: None: one call, forward and backward.
    """
    possible = [setup for setup in planned if setup.reason is None]
    if not possible:
        return []
    check, size = check or CALL, possible[0].problem.size
    runs = len(possible) if device == "cpu" else 1  # the oracle's, which is on the CPU
    seconds = max(refuse_too_large(p, runs, reference=True) for p in dict.fromkeys(s.problem for s in possible))
    one_device = threads or (device == "cuda" and torch.cuda.device_count() < size)
    if device == "cpu" or one_device:  # CUDA must not be touched before ranks that use it are forked
        for setup in possible:
            check_kernel(setup, torch.device(device))
    keys = list(dict.fromkeys((s.problem, s.provider.kind) for s in possible))
    cases = {key: check.make(*key) for key in with_progress(keys, "computing references")}

    def run(setup: Setup, cp: ContextParallel, where: torch.device) -> Any:
        return check.run(setup, cp, cases[setup.problem, setup.provider.kind], where)

    if one_device:
        outcomes = _run_threads(possible, device, run)
    else:
        outcomes = _run_processes(possible, device, run, 300 + 2 * seconds)
    return [
        Result(setup=setup, failure=outcome) if isinstance(outcome, str) else check.judge(setup, outcome)
        for setup, outcome in zip(possible, outcomes, strict=True)
    ]


def _call(setup: Setup, cp: ContextParallel, case: Case, device: torch.device) -> tuple[dict[str, float], ...]:
    """Return the errors and the limits of all tensors, on the first rank."""
    shards = calls.call_through_autograd(cp, case.inputs.sharded(cp, device), setup.problem)
    got = [cp.unshard(x) for x in shards]
    if cp.index > 0:
        return ()
    return relative_errors(got, case.want, tensors(setup.problem)), limits(setup, case, device)


CALL = Check(make_case, _call, lambda setup, ranks: Result(setup=setup, errors=ranks[0][0], limits=ranks[0][1]))


def limits(setup: Setup | None, case: Case, device: torch.device) -> dict[str, float]:
    """The largest allowed error of each tensor of a case.

    setup: None: another library, which is held to the kernel that ``auto`` chooses.
    """
    problem = case.problem
    if problem.dtype in LIMITS:
        return dict.fromkeys(tensors(problem), LIMITS[problem.dtype])
    options = Options() if setup is None else setup.options
    if setup is not None and setup.provider.kind == "linear":
        alone = ContextParallel(setup.provider, group=None, backend=options.backend)
        got = calls.call_through_autograd(alone, case.inputs.sharded(alone, device), replace(problem, size=1))
    else:
        sent = fp8.four_bits if options.fp8 is not None else torch.clone
        kernel = blocks.choose(options, problem, device).kernel
        inputs = tuple(sent(x.to(device)) for x in case.inputs[:4])
        got = tuple(map(sent, calls.call_kernel(kernel, inputs, problem.mask(), sent)))
    rounding = 0.0
    if setup is not None and setup.options.gradient_dtype == "model":
        # half an epsilon for each rank's part of a gradient; they are independent, so their sum grows with the root
        rounding = torch.finfo(setup.problem.dtype).eps / 2 * setup.problem.size**0.5
    errors = relative_errors(got, case.want, tensors(problem))
    allowed = {name: HALF_FACTOR * error + rounding * (name in TENSORS[1:4]) for name, error in errors.items()}
    if "dlog_decay" in allowed:  # never in half precision
        allowed["dlog_decay"] = LIMITS[torch.float32]
    return allowed


def _unchosen_options(provider: Provider) -> list[Options]:
    """Options that a provider does not choose by itself on one host."""
    if "intra_size" in provider.options:
        return [Options(intra_size=2, backward=b) for b in (("kv", "q") if "backward" in provider.options else (None,))]
    return [Options(head_parallel=2)] if "grid" in provider.options else []


def check_kernel(setup: Setup, device: torch.device) -> None:
    """ValueError if the requested kernel cannot run the setup there."""
    options, problem = setup.options, setup.problem
    if setup.provider.kind == "softmax":
        blocks.choose(options, problem, device)
    else:
        kernels.choose(options.backend, device, problem)


def _run_processes[T](
    planned: Sequence[Setup], device: str, run: Callable[[Setup, ContextParallel, torch.device], T], timeout: float
) -> list[list[T] | str]:
    """For each setup what ``run`` returns on every rank, or what stopped it: in one launch for all; if a rank fails,
    one per provider and layout, so that the others still get results."""

    def rank() -> list[T]:
        where, made, results = join(device), {}, []
        for setup in with_progress(planned, "verifying"):
            key = (setup.provider.name, setup.options)
            if key not in made:
                made[key] = ContextParallel(setup, group=dist.group.WORLD)
            results.append(run(setup, made[key], where))
        return results

    try:
        by_rank = run_ranks(rank, planned[0].problem.size, timeout=timeout)
    except RankError as error:
        groups = [list(group) for _, group in groupby(planned, lambda s: (s.provider.name, s.layout))]
        if len(groups) == 1:
            return [error.traceback.strip().splitlines()[-1]] * len(planned)
        return [outcome for group in groups for outcome in _run_processes(group, device, run, timeout)]
    return [list(results) for results in zip(*by_rank, strict=True)]


def _run_threads[T](
    planned: Sequence[Setup], device: str, run: Callable[[Setup, ContextParallel, torch.device], T]
) -> list[list[T] | str]:
    outcomes: list[list[T] | str] = []
    for setup in with_progress(planned, "verifying"):

        def rank(mesh: Mesh, setup: Setup = setup) -> T:
            return run(setup, ContextParallel(setup, mesh=mesh), torch.device(device))

        try:
            outcomes.append(run_threads(rank, setup.axes))
        except RuntimeError as error:
            outcomes.append(str(error))
    return outcomes
