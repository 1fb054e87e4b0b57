"""``--cp-log-traffic``: bytes sent, time waited and load balance of context-parallel attention.

At each log interval the ranks of a context-parallel group gather their measurements. Rank 0 prints a line about its
group; the rank with Megatron's TensorBoard and W&B writers logs its own group's numbers:

    cp-plugin/bytes on AXIS             per iteration of the busiest rank, including any evaluation in between
    cp-plugin/overlap                   share of the messages' time in flight that was not waited for
    cp-plugin/waited, seconds           for messages, per iteration, mean of the ranks
    cp-plugin/waited, max over mean     of the ranks
    cp-plugin/work, max over mean       of the ranks' visible (query, key) pairs; with packing, of the last pack
    cp-plugin/check, seconds            of --cp-check-every, per iteration, mean of the ranks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.calls import shapes, without_peers
from cp_plugin.comm import Ledger, Waited, Waits
from cp_plugin.core.layout import sort_positions
from cp_plugin.core.problem import Problem
from cp_plugin.core.tiles import tiles
from cp_plugin.core.values import KeyValues, Queries
from cp_plugin.kernels.blocks import Block
from cp_plugin.kernels.recording import RecordingKernel
from cp_plugin.megatron import runtime
from cp_plugin.megatron.patches.patching import Call, around
from cp_plugin.megatron.selfcheck import first_step
from cp_plugin.megatron.selfcheck.checked_call import PHASE
from cp_plugin.megatron.state import STATE

_NO_DATA = torch.device("meta")


class Measured(NamedTuple):
    """One rank's measurements since the last log interval."""

    sent: dict[str, int]  # mesh axis -> bytes
    waits: Waited
    pairs: int  # visible pairs of one softmax layer; 0: no such layer, or no pack yet
    check: float = 0.0  # seconds of ``--cp-check-every``


def watch() -> None:
    """Start timing messages if the flag is given; needs the process groups."""
    if runtime.settings().log_traffic:
        runtime.context_parallel().mesh.ledger.waits = Waits()


def replace_training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's ``training_log``, which is called after every iteration: the first losses are compared."""
    since = 0  # iterations since the ledger was reset

    @around
    def training_log(call: Call) -> Any:
        nonlocal since
        first_step.compare_log(call.arguments.get("loss_dict"))
        result = call.original()
        if runtime.settings().log_traffic:
            from megatron.training import get_args

            since += 1
            iteration = call["iteration"]
            ledger = runtime.context_parallel().mesh.ledger
            if ledger.waits is not None:
                ledger.waits.total()  # frees CUDA events
            if iteration % get_args().log_interval == 0:
                _report(ledger, iteration, since)
                ledger.reset()
                since = 0
        return result

    return training_log(original)


def scalars(group: Sequence[Measured], iterations: int) -> dict[str, float]:
    """A context-parallel group's numbers; times and bytes per iteration."""
    axes = sorted({axis for one in group for axis in one.sent})
    found = {f"bytes on {axis}": max(one.sent.get(axis, 0) for one in group) / iterations for axis in axes}
    waited, under_way = ([one.waits[i] for one in group] for i in range(2))
    if sum(under_way) > 0:
        found["overlap"] = 1 - sum(waited) / sum(under_way)
        found["waited, seconds"] = sum(waited) / len(group) / iterations
        found["waited, max over mean"] = _max_over_mean(waited)
    pairs = [one.pairs for one in group]
    if any(pairs):
        found["work, max over mean"] = _max_over_mean(pairs)
    if any(one.check for one in group):
        found["check, seconds"] = sum(one.check for one in group) / len(group) / iterations
    return found


def describe(ledger: Ledger, iteration: int, iterations: int, group: dict[str, float]) -> str:
    """Log line: bytes rank 0 sent per iteration by phase, verb and mesh axis, and its group's numbers."""
    total = sum(line.bytes for line in ledger.entries()) / iterations
    parts = [f"{t.phase} {t.op} on {t.axis}: {t.bytes / iterations:,.0f}" for t in ledger.entries()]
    rest = [f"; {name}: {value:.4g}" for name, value in group.items() if not name.startswith("bytes")]
    return (
        f"cp_plugin: iteration {iteration}: bytes sent by rank 0 per iteration: {total:,.0f}"
        f"{' (' + ', '.join(parts) + ')' if parts else ''}{''.join(rest)}"
    )


def _report(ledger: Ledger, iteration: int, iterations: int) -> None:
    """Collective over the context-parallel group."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    sent: Counter[str] = Counter()
    for line in ledger.entries():
        sent[line.axis] += line.bytes
    waits = Waited() if ledger.waits is None else ledger.waits.total()
    mine = Measured(sent, waits, _pairs(), ledger.seconds(PHASE))
    cp_group = parallel_state.get_context_parallel_group()
    everyone = [mine] * cp_group.size()
    dist.all_gather_object(everyone, mine, group=cp_group)
    numbers = scalars(everyone, iterations)
    if dist.get_rank() == 0:
        print(describe(ledger, iteration, iterations, numbers), flush=True)
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    for name, value in numbers.items():
        if tensorboard:
            tensorboard.add_scalar(f"cp-plugin/{name}", value, iteration)
        if wandb:
            wandb.log({f"cp-plugin/{name}": value}, iteration)


def _pairs() -> int:
    problem, pack = runtime.problem(), STATE.last_pack
    if problem is None or not runtime.settings().softmax or (problem.documents and pack is None):
        return 0
    if pack is not None:
        bounds = tuple(pack.bounds.tolist())
        problem = replace(problem, seq_length=bounds[-1], bounds=bounds, placed=pack.layout)
    return visible_pairs(runtime.context_parallel(kind="softmax"), problem)


@lru_cache(maxsize=1)
def visible_pairs(cp: ContextParallel, problem: Problem) -> int:
    """(query, key) pairs times heads that this rank computes in the forward of one softmax layer.

    Computed by running the method on a mesh without peers, on meta tensors, and counting the tiles that reach the
    kernel. Linear layers need no balance: every token costs the same.
    """
    counted: list[int] = []

    def count(q: Tensor, k: Tensor, v: Tensor, block: Block) -> None:
        rows, keys = (sort_positions(side, _NO_DATA)[0] for side in (block.rows, block.keys))
        counted.append(sum(tile.pairs for tile in tiles(rows, keys, block.mask)) * q.size(2))

    q, k, v, *_ = shapes(problem, problem.seq_length // problem.size)
    without_peers(cp.provider, problem, cp.options, cp.index, RecordingKernel(count)).forward(
        Queries(q), KeyValues(k, v)
    )
    return sum(counted)


def _max_over_mean(numbers: Sequence[float]) -> float:
    total = sum(numbers)
    return max(numbers) * len(numbers) / total if total else 1.0
