"""Every provider on every layout over process groups, through autograd, against attention in float64.

NCCL is initialised as by Megatron, without ``device_id``, and the context-parallel groups are all ranks, and two groups
side by side (neighbours, as with pipeline parallelism; every other rank, as with tensor parallelism); again with
CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron requires. Each case creates its groups and is the first to use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from over_ranks import CASE_S, device, one_over_ranks, over_ranks
from record import Found, Step, worst

from cp_plugin import Options, Problem
from cp_plugin.attention import calls
from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.setups import Setup, settled_or_reason
from cp_plugin.methods import registry as providers
from cp_plugin.methods.protocol import Kind
from cp_plugin.testing import verify
from cp_plugin.testing.oracle import Case, make_case, relative_errors, tensors

RANKS = 4
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

    def __str__(self) -> str:
        setup = self.setup
        decay = f", a decay of each {setup.problem.decay}" if setup.provider.kind == "linear" else ""
        mask = "" if setup.problem.causal else ", full"
        choices = f", {setup}" if str(setup) else ""
        return f"{setup.provider.name} on {setup.layout}{choices}{decay}{mask}"


def main() -> None:
    with Step("nccl") as step:
        problem = TINY if step.smoke else PROBLEM
        world = max(RANKS, min(8, step.devices))
        step.note(ranks=world, ranks_share_a_gpu=0 < step.devices < world)
        if not starts(step, world):
            return
        whole, beside = groups(world)
        runs = {"": planned(whole, problem, smoke=step.smoke), ", CUDA_DEVICE_MAX_CONNECTIONS=1": []}
        for subgroups in beside:
            runs[""] += planned(subgroups, problem, smoke=step.smoke)
        runs[", CUDA_DEVICE_MAX_CONNECTIONS=1"] = runs[""][: 2 if step.smoke else None]
        for how, of_world in runs.items():
            env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1" if how else "8"}
            correct(step, f"over {step.library}{how}", of_world, world, env)


def starts(step: Step, world: int) -> bool:
    """Whether the library works at all: a sum over all ranks, and a message to the next rank."""

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
    said = one_over_ranks(step, first_words, ranks=world)
    if isinstance(said, str) and 0 < step.devices < world:
        reason = f"{world} ranks cannot share {step.devices} GPU here: {said}"
        step.not_run(f"providers over {step.library}", reason)
        return False
    detail = {"failure": said} if isinstance(said, str) else {"sums": said, "wanted": want}
    step.check(f"over {step.library}", name, said == [want] * world, **detail)
    return said == [want] * world


def groups(world: int) -> tuple[Groups, tuple[Groups, Groups]]:
    """All ranks, and two divisions into two groups."""
    ranks, half = tuple(range(world)), world // 2
    neighbours = Groups(f"2 x CP {half}, neighbours", (ranks[:half], ranks[half:]))
    return Groups(f"CP {world}", (ranks,)), (
        neighbours,
        Groups(f"2 x CP {half}, every other", (ranks[::2], ranks[1::2])),
    )


def planned(of: Groups, problem: Problem, *, smoke: bool) -> list[Run]:
    """Every provider on every layout and with all its options; one combination each for groups side by side."""
    here = replace(problem, size=of.size)
    found = verify.plan([], [here] if smoke else [here, replace(here, causal=False)], Options())
    rows = 2 if of.size % 2 == 0 < of.size // 2 else 1
    square = providers.get("attention2d")
    for layout in square.layouts:
        found.append(settled_or_reason(square, here, Options(grid=(rows, of.size // rows), layout=layout)))
    if len(of.ranks) > 1:
        found = list({(s.provider.name, "" if smoke else s.layout): s for s in found}.values())
    return [Run(of, setup) for setup in found]


def correct(step: Step, title: str, runs: Sequence[Run], world: int, env: dict[str, str]) -> None:
    """All cases of one environment."""
    usual = [run for run in runs if run.setup.reason is None]
    for run in runs:
        if run.setup.reason is not None:
            step.not_run(f"{title}, {run.groups.name}: {run}", run.setup.reason)
    for run in usual:  # once, before the ranks are forked
        answer(replace(run.setup.problem, size=1), run.setup.provider.kind)

    def done(number: int, found: list[Any] | str) -> None:
        run = usual[number]
        group = f"{title}, {run.groups.name}"
        if isinstance(found, str):
            step.stopped(group, str(run), found)
            return
        rank, (ok, detail) = max(enumerate(found), key=lambda row: _share(row[1][1]))
        step.check(group, str(run), ok, **detail, rank=rank)

    case_s = 20.0 if step.smoke else CASE_S
    over_ranks(step, lambda number: one(usual[number]), len(usual), done, ranks=world, case_s=case_s, env=env)


def one(run: Run) -> Found:
    """Run on a rank; the tensor closest to its limit."""
    made = [dist.new_group(ranks) for ranks in run.groups.ranks]
    mine = next(group for group, ranks in zip(made, run.groups.ranks, strict=True) if dist.get_rank() in ranks)
    setup, here = run.setup, device()
    cp, case = ContextParallel(setup, group=mine), answer(replace(setup.problem, size=1), setup.provider.kind)
    got = calls.through_autograd(cp, case.inputs.sharded(cp, here), setup.problem)
    errors = relative_errors(tuple(cp.unshard(x) for x in got), case.want, tensors(case.problem))
    return worst(errors, verify.limits(setup, case, here))


@cache
def answer(problem: Problem, kind: Kind) -> Case:
    """The answer of one device."""
    return make_case(problem, kind)


def _share(detail: dict[str, Any]) -> float:
    return float(detail["error"]) / max(detail["limit"], 1e-30)


if __name__ == "__main__":
    main()
