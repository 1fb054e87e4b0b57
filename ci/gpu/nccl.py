"""Every provider on every layout over process groups, through autograd, against attention in float64.

NCCL is initialised as by Megatron, without ``device_id``, and the context-parallel groups are all ranks, and two groups
side by side (neighbours, as with pipeline parallelism; every other rank, as with tensor parallelism); again with
CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron requires. Each case creates its groups and is the first to use them.

Every provider comes once, then every layout, then the rest. Where NCCL lets no ranks share a GPU, they are threads.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from cases import cannot, provider
from record import NotRun, Step, Verdict, judge, worst
from torch import Tensor
from workers import CASE_S, device, first_words, run_on_ranks

from cp_plugin import Options, Problem
from cp_plugin.engine.attention import calls
from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.calls import Setup, settled_or_reason
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.protocol import Kind
from cp_plugin.testing import verify
from cp_plugin.testing.oracle import Case, make_case, make_inputs, relative_errors, tensors

RANKS = 4
PROBLEM = Problem(size=RANKS, heads=8, kv_heads=4, head_dim=64, v_head_dim=64, seq_length=512, dtype=torch.bfloat16)
_elsewhere: dict[tuple[Problem, Kind], tuple[BaseProcess, Path]] = {}
TINY = Problem(size=RANKS, heads=8, kv_heads=4, head_dim=8, v_head_dim=8, seq_length=32, dtype=torch.float32)


class Groups(NamedTuple):
    """Context-parallel groups."""

    name: str
    ranks: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.ranks[0])


class Run(NamedTuple):
    """One case."""

    groups: Groups
    setup: Setup

    @property
    def parts(self) -> tuple[str, ...]:
        return (provider(self.setup.provider.name),)

    def __str__(self) -> str:
        setup = self.setup
        rule = ", the delta rule" if setup.problem.delta else ""
        decay = f", a decay of each {setup.problem.decay}{rule}" if setup.provider.kind == "linear" else ""
        mask = "" if setup.problem.causal else ", full"
        choices = f", {setup}" if str(setup) else ""
        return f"{setup.provider.name} on {setup.layout}{choices}{decay}{mask}"


def nccl(step: Step) -> None:
    problem = TINY if step.smoke else PROBLEM
    world = max(RANKS, min(8, step.devices))
    step.note(ranks=world, ranks_share_a_gpu=0 < step.devices < world)
    whole, *beside = ([run for run in plan(g, problem, smoke=step.smoke) if can(step, run)] for g in groups(world))
    tiers = order(whole, [run for runs in beside for run in runs])
    linear = [run for run in whole if run.setup.provider.kind == "linear"]
    warming = None if step.smoke or find_spec("fla") is None else start(warm, first_of_each(linear, Run.__str__))
    with tempfile.TemporaryDirectory() as folder:
        compute_answers(linear, folder)
        ok, detail = first_words(step, world)
        step.note(refused=detail.get("reason", ""))
        step.add(f"over {step.library}", f"{world} ranks say their first words", ok, detail)
        if ok:
            check_on_groups(step, tiers, world, warming)
        elif ok is None and 0 < step.devices < world:
            title = f"ranks as threads, not over {step.library}"
            for run in (run for tier in tiers for run in tier if run in whole):
                name = f"{run.groups.name}: {run}"
                step.attempt(title, name, partial(call_on_threads, run, compare_to_answer), run.parts)


def check_on_groups(step: Step, tiers: list[list[Run]], world: int, warming: BaseProcess | None) -> None:
    """All tiers; linear attention waits for its kernels to be autotuned while there is something else to do."""
    softmax, linear, layouts, *rest = tiers
    env, title = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, f"over {step.library}"
    check(step, title, softmax, world, env)
    still = warming is not None and warming.is_alive()
    for tier in (layouts, linear, *rest) if still else (linear, layouts, *rest):
        if tier is linear and warming is not None:
            warming.join(max(0.0, step.left / 2))
        check(step, title, tier, world, env)
    env, title = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, f"over {step.library}, CUDA_DEVICE_MAX_CONNECTIONS=1"
    again = [run for tier in tiers for run in tier if run.groups.size == world]
    check(step, title, again[: 2 if step.smoke else None], world, env)


def groups(world: int) -> tuple[Groups, Groups, Groups]:
    """All ranks, and two divisions into two groups."""
    ranks, half = tuple(range(world)), world // 2
    return (
        Groups(f"CP {world}", (ranks,)),
        Groups(f"2 x CP {half}, neighbours", (ranks[:half], ranks[half:])),
        Groups(f"2 x CP {half}, every other", (ranks[::2], ranks[1::2])),
    )


def plan(groups: Groups, problem: Problem, *, smoke: bool) -> list[Run]:
    """Every provider on every layout and with all its options, causal and full; one combination each for groups side by
    side."""
    size = groups.size
    divided, rows = replace(problem, size=size), 2 if size % 2 == 0 < size // 2 else 1
    square, grid = providers.get("attention2d"), (rows, size // rows)
    setups = [settled_or_reason(square, divided, Options(grid=grid, layout=layout)) for layout in square.layouts]
    setups += verify.plan([], [divided] if smoke else [divided, replace(divided, causal=False)], Options())
    if len(groups.ranks) > 1:
        setups = list({(s.provider.name, "" if smoke else s.layout): s for s in setups}.values())
    return [Run(groups, setup if smoke else with_our_kernels(setup)) for setup in setups]


def with_our_kernels(setup: Setup) -> Setup:
    """Softmax with our attention, which builds no plans for each shape and thread as cuDNN does."""
    if setup.provider.kind == "linear":
        return setup
    return settled_or_reason(setup.provider, setup.problem, replace(setup.options, backend="triton"))


def order(whole: Sequence[Run], beside: Sequence[Run]) -> list[list[Run]]:
    """By what they teach: softmax and then linear providers once each, the layouts of softmax, the kinds of linear
    attention, providers on groups side by side, the rest."""
    softmax, linear = ([run for run in whole if run.setup.provider.kind == kind] for kind in ("softmax", "linear"))
    tiers: list[list[Run]] = []
    for more in (
        first_of_each(softmax, lambda run: run.parts),
        first_of_each(linear, lambda run: run.parts),
        first_of_each(softmax, lambda run: (run.parts, run.setup.layout)),
        first_of_each(linear, lambda run: (run.setup.problem.decay, run.setup.problem.delta)),
        first_of_each(beside, lambda run: (run.groups, run.parts)),
        first_of_each([*whole, *beside], lambda run: (run.groups, str(run))),
    ):
        tiers.append([run for run in more if not any(run in tier for tier in tiers)])
    return tiers


def first_of_each(runs: Sequence[Run], key: Callable[[Run], object]) -> list[Run]:
    """The first run of every key."""
    firsts: dict[object, Run] = {}
    for run in runs:
        firsts.setdefault(key(run), run)
    return list(firsts.values())


def can(step: Step, run: Run) -> bool:
    """Whether a provider can do it; records why not."""
    if run.setup.reason is not None:
        step.not_run(f"over {step.library}, {run.groups.name}: {run}", run.setup.reason)
    return run.setup.reason is None


def start(call: Callable[..., object], *arguments: object) -> BaseProcess:
    """In a process of its own, beside the first cases."""
    process = multiprocessing.get_context("fork").Process(target=call, args=arguments, daemon=True)
    process.start()
    return process


def warm(runs: Sequence[Run]) -> None:
    """Autotune the kernels of linear attention: it takes longer than a case may, and is kept on disk."""
    for run in runs:
        judge(partial(call_on_threads, run, call))


def compute_answers(runs: Sequence[Run], folder: str) -> None:
    """Start to compute the answers of linear attention, which go token by token, each on a core of its own."""
    for key in dict.fromkeys((replace(run.setup.problem, size=1), run.setup.provider.kind) for run in runs):
        file = Path(folder, str(len(_elsewhere)))
        _elsewhere[key] = start(lambda key=key, file=file: file.write_bytes(pickle.dumps(make_case(*key)))), file


def check(step: Step, title: str, runs: Sequence[Run], world: int, env: dict[str, str]) -> None:
    """All cases of one environment."""
    for run in () if step.late else runs:  # once, before the ranks are forked
        answer(replace(run.setup.problem, size=1), run.setup.provider.kind)
    case_s = 20.0 if step.smoke else CASE_S
    for number, verdicts in run_on_ranks(
        step, lambda number: compare_on_rank(runs[number]), len(runs), ranks=world, case_s=case_s, env=env
    ):
        run = runs[number]
        if isinstance(verdicts, tuple):
            ok, detail = verdicts
        else:
            rank, (ok, detail) = max(enumerate(verdicts), key=_badness)
            detail = detail | {"rank": rank}
        step.add(f"{title}, {run.groups.name}", str(run), ok, {"of": run.parts} | detail)


def compare_on_rank(run: Run) -> Verdict:
    """The tensor closest to its limit."""
    if reason := cannot(run.setup, device()):
        return None, {"reason": reason}
    groups = [dist.new_group(ranks) for ranks in run.groups.ranks]
    own = next(group for group, ranks in zip(groups, run.groups.ranks, strict=True) if dist.get_rank() in ranks)
    return compare_to_answer(run.setup, ContextParallel(run.setup, group=own), device())


def call_on_threads[T](run: Run, each: Callable[[Setup, ContextParallel, torch.device], T]) -> T:
    """``compare_to_answer`` or ``call`` on rank threads."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := cannot(run.setup, device):
        raise NotRun(reason)

    def rank(mesh: Mesh) -> T:
        return each(run.setup, ContextParallel(run.setup, mesh=mesh), device)

    return run_threads(rank, run.setup.axes, patience=CASE_S)[0]


def call(setup: Setup, cp: ContextParallel, device: torch.device) -> tuple[Tensor, ...]:
    """The results of a rank's call for the whole sequence."""
    inputs = make_inputs(replace(setup.problem, size=1)).sharded(cp, device)
    return tuple(cp.unshard(x) for x in calls.call_through_autograd(cp, inputs, setup.problem))


def compare_to_answer(setup: Setup, cp: ContextParallel, device: torch.device) -> Verdict:
    """A rank's call against the answer of one device."""
    case = answer(replace(setup.problem, size=1), setup.provider.kind)
    errors = relative_errors(call(setup, cp, device), case.want, tensors(case.problem))
    return worst(errors, verify.limits(setup, case, device))


@cache
def answer(problem: Problem, kind: Kind) -> Case:
    """The answer of one device, which another process may have computed."""
    if (problem, kind) in _elsewhere:
        process, file = _elsewhere[problem, kind]
        process.join()
        if file.exists():
            return pickle.loads(file.read_bytes())
    return make_case(problem, kind)


def _badness(ranked: tuple[int, Verdict]) -> tuple[bool, float]:
    ok, detail = ranked[1]
    return ok is False, float(detail["error"]) / max(detail["limit"], 1e-30) if "error" in detail else 0.0
