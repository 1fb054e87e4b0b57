"""Every provider on every layout over process groups, through autograd, against attention in float64.

NCCL is initialised as by Megatron, without ``device_id``, and the context-parallel groups are all ranks, and two groups
side by side (neighbours, as with pipeline parallelism; every other rank, as with tensor parallelism); again with
CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron requires. Each case creates its groups and is the first to use them.

Every provider comes once, then every layout, then the rest. Where NCCL lets no ranks share a GPU, they are threads.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import torch
import torch.distributed as dist
from cases import cannot, provider
from over_ranks import CASE_S, device, one_over_ranks, over_ranks
from record import Found, NotRun, Step, found_by, worst
from torch import Tensor

from cp_plugin import Options, Problem
from cp_plugin.attention import calls
from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.setups import Setup, settled_or_reason
from cp_plugin.comm import Mesh, run_threads
from cp_plugin.methods import registry as providers
from cp_plugin.methods.protocol import Kind
from cp_plugin.testing import verify
from cp_plugin.testing.oracle import Case, make_case, relative_errors, tensors

RANKS = 4
FIRST_S = 30.0
"""Seconds for the first words of all ranks."""
PROBLEM = Problem(size=RANKS, heads=8, kv_heads=4, head_dim=64, v_head_dim=64, seq_length=512, dtype=torch.bfloat16)
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
    def of(self) -> tuple[str, ...]:
        return (provider(self.setup.provider.name),)

    def __str__(self) -> str:
        setup = self.setup
        rule = ", the delta rule" if setup.problem.delta else ""
        decay = f", a decay of each {setup.problem.decay}{rule}" if setup.provider.kind == "linear" else ""
        mask = "" if setup.problem.causal else ", full"
        choices = f", {setup}" if str(setup) else ""
        return f"{setup.provider.name} on {setup.layout}{choices}{decay}{mask}"


def main() -> None:
    with Step("nccl") as step:
        problem = TINY if step.smoke else PROBLEM
        world = max(RANKS, min(8, step.devices))
        step.note(ranks=world, ranks_share_a_gpu=0 < step.devices < world)
        whole, *beside = ([r for r in planned(g, problem, smoke=step.smoke) if can(step, r)] for g in groups(world))
        tiers = in_order(whole, [run for runs in beside for run in runs])
        warming = None if step.smoke or find_spec("fla") is None else warm(whole)
        refused = starts(step, world)
        if refused is None:
            over_groups(step, tiers, world, warming)
        elif refused:
            step.not_run(f"providers over {step.library}", refused)
            for run in (run for tier in tiers for run in tier if run in whole):
                name = f"{run.groups.name}: {run}"
                step.attempt(f"ranks as threads, not over {step.library}", name, partial(on_threads, run), run.of)


def over_groups(step: Step, tiers: list[list[Run]], world: int, warming: BaseProcess | None) -> None:
    """All tiers; linear attention waits for its kernels to be autotuned while there is something else to do."""
    softmax, linear, layouts, *rest = tiers
    env, title = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, f"over {step.library}"
    correct(step, title, softmax, world, env)
    still = warming is not None and warming.is_alive()
    for tier in (layouts, linear, *rest) if still else (linear, layouts, *rest):
        if tier is linear and warming is not None:
            warming.join(max(0.0, step.left / 2))
        correct(step, title, tier, world, env)
    env, title = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, f"over {step.library}, CUDA_DEVICE_MAX_CONNECTIONS=1"
    again = [run for tier in tiers for run in tier if run.groups.size == world]
    correct(step, title, again[: 2 if step.smoke else None], world, env)


def starts(step: Step, world: int) -> str | None:
    """None if the library works: a sum over all ranks, and a message to the next rank. Otherwise why it does not let
    ranks share a GPU, or "" if something is wrong."""

    def first_words() -> float:
        group, here = dist.new_group(range(world)), dist.get_rank()
        total, message = (torch.full((4,), float(here), device=device()) for _ in range(2))
        dist.all_reduce(total, group=group)
        received = torch.empty_like(message)
        ops = [
            dist.P2POp(dist.isend, message, group=group, group_peer=(here + 1) % world),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(here - 1) % world),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return total.sum().item() + received.sum().item() - 4 * ((here - 1) % world)

    name, want = f"{world} ranks say their first words", 4.0 * sum(range(world))
    said = one_over_ranks(step, first_words, ranks=world, case_s=FIRST_S)
    if isinstance(said, tuple):
        if 0 < step.devices < world:
            return f"{world} ranks cannot share {step.devices} GPU here: {' '.join(map(str, said[1].values()))}"
        step.add(f"over {step.library}", name, *said)
        return ""
    step.check(f"over {step.library}", name, said == [want] * world, sums=said, wanted=want)
    return None if said == [want] * world else ""


def groups(world: int) -> tuple[Groups, Groups, Groups]:
    """All ranks, and two divisions into two groups."""
    ranks, half = tuple(range(world)), world // 2
    return (
        Groups(f"CP {world}", (ranks,)),
        Groups(f"2 x CP {half}, neighbours", (ranks[:half], ranks[half:])),
        Groups(f"2 x CP {half}, every other", (ranks[::2], ranks[1::2])),
    )


def planned(of: Groups, problem: Problem, *, smoke: bool) -> list[Run]:
    """Every provider on every layout and with all its options, causal and full; one combination each for groups side by
    side."""
    here = replace(problem, size=of.size)
    rows = 2 if of.size % 2 == 0 < of.size // 2 else 1
    square, grid = providers.get("attention2d"), (rows, of.size // rows)
    found = [settled_or_reason(square, here, Options(grid=grid, layout=layout)) for layout in square.layouts]
    found += verify.plan([], [here] if smoke else [here, replace(here, causal=False)], Options())
    if len(of.ranks) > 1:
        found = list({(s.provider.name, "" if smoke else s.layout): s for s in found}.values())
    return [Run(of, setup) for setup in found]


def in_order(whole: Sequence[Run], beside: Sequence[Run]) -> list[list[Run]]:
    """By what they teach: softmax and then linear providers once each, the layouts of softmax, the kinds of linear
    attention, providers on groups side by side, the rest."""
    softmax, linear = ([run for run in whole if run.setup.provider.kind == kind] for kind in ("softmax", "linear"))
    tiers: list[list[Run]] = []
    for more in (
        first_of(softmax, lambda run: run.of),
        first_of(linear, lambda run: run.of),
        first_of(softmax, lambda run: (run.of, run.setup.layout)),
        first_of(linear, lambda run: (run.setup.problem.decay, run.setup.problem.delta)),
        first_of(beside, lambda run: (run.groups, run.of)),
        first_of([*whole, *beside], lambda run: (run.groups, str(run))),
    ):
        tiers.append([run for run in more if not any(run in tier for tier in tiers)])
    return tiers


def first_of(runs: Sequence[Run], key: Callable[[Run], object]) -> list[Run]:
    """The first run of every key."""
    found: dict[object, Run] = {}
    for run in runs:
        found.setdefault(key(run), run)
    return list(found.values())


def can(step: Step, run: Run) -> bool:
    """Whether a provider can do it; records why not."""
    if run.setup.reason is not None:
        step.not_run(f"over {step.library}, {run.groups.name}: {run}", run.setup.reason)
    return run.setup.reason is None


def warm(runs: Sequence[Run]) -> BaseProcess:
    """Start to autotune the kernels of linear attention: it takes longer than a case may, and is kept on disk."""
    linear = first_of([run for run in runs if run.setup.provider.kind == "linear"], Run.__str__)
    process = multiprocessing.get_context("fork").Process(target=warmed, args=(linear,), daemon=True)
    process.start()
    return process


def warmed(runs: Sequence[Run]) -> None:
    for run in runs:
        found_by(partial(on_threads, run))


def correct(step: Step, title: str, runs: Sequence[Run], world: int, env: dict[str, str]) -> None:
    """All cases of one environment."""
    for run in () if step.late else runs:  # once, before the ranks are forked
        answer(replace(run.setup.problem, size=1), run.setup.provider.kind)

    def done(number: int, found: list[Found] | Found) -> None:
        run = runs[number]
        rank, (ok, detail) = (None, found) if isinstance(found, tuple) else max(enumerate(found), key=_worst)
        step.add(
            f"{title}, {run.groups.name}",
            str(run),
            ok,
            {"of": run.of} | detail | ({} if rank is None else {"rank": rank}),
        )

    case_s = 20.0 if step.smoke else CASE_S
    over_ranks(step, lambda number: one(runs[number]), len(runs), done, ranks=world, case_s=case_s, env=env)


def one(run: Run) -> Found:
    """Run on a rank; the tensor closest to its limit."""
    if reason := cannot(run.setup, device()):
        return None, {"reason": reason}
    made = [dist.new_group(ranks) for ranks in run.groups.ranks]
    mine = next(group for group, ranks in zip(made, run.groups.ranks, strict=True) if dist.get_rank() in ranks)
    return near(run.setup, ContextParallel(run.setup, group=mine), device(), calls.through_autograd)


def on_threads(run: Run) -> Found:
    """The same on rank threads, without autograd, which has one thread per device."""
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reason := cannot(run.setup, here):
        raise NotRun(reason)

    def rank(mesh: Mesh) -> Found:
        return near(run.setup, ContextParallel(run.setup, mesh=mesh), here, calls.directly)

    return run_threads(rank, run.setup.axes, patience=CASE_S)[0]


def near(setup: Setup, cp: ContextParallel, here: torch.device, call: Callable[..., Sequence[Tensor]]) -> Found:
    """A rank's call against the answer of one device."""
    case = answer(replace(setup.problem, size=1), setup.provider.kind)
    got = tuple(cp.unshard(x) for x in call(cp, case.inputs.sharded(cp, here), setup.problem))
    return worst(relative_errors(got, case.want, tensors(case.problem)), verify.limits(setup, case, here))


@cache
def answer(problem: Problem, kind: Kind) -> Case:
    """The answer of one device."""
    return make_case(problem, kind)


def _worst(of_rank: tuple[int, Found]) -> tuple[bool, float]:
    ok, detail = of_rank[1]
    return ok is False, float(detail["error"]) / max(detail["limit"], 1e-30) if "error" in detail else 0.0


if __name__ == "__main__":
    main()
