"""The rest of the first training step, from its schedule to the log, which the check on a tiny batch does not run.

    gradients at the end of the schedule --> as the optimizer finds them
    samples of the step                  --> by which the schedule of learning rates advances
    losses that the schedule returns     --> the ones that are logged
    weights in the second step           --> the same on all ranks that hold them

Each may be what the script makes of it; it may not be a multiple by the number of context-parallel ranks, or of one
rank's part alone. The calls of the optimizer and of the schedule are seen through for this step only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isclose
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_plugin.engine.comm.every_rank import gather_objects
from cp_plugin.engine.common.text import group_ranks
from cp_plugin.engine.core.layout import Layout
from cp_plugin.engine.placement.documents import get_layout
from cp_plugin.megatron import runtime
from cp_plugin.megatron.patches.patching import Call, Run, wraps
from cp_plugin.megatron.selfcheck.readings import named_parameters, projections
from cp_plugin.megatron.state import STATE

_WITHIN = 1e-3
_SAME = 1e-6


class StepError(ValueError):
    """A step on N context-parallel ranks is not the step on one rank."""


def watch(named: Mapping[str, Any], chunks: Sequence[Any], optimizer: Any, rates: Any, reports: Any) -> None:
    """Follow this step on.

    Args:
        named, reports: arguments of Megatron's schedule and what it returned.
        rates: the schedule of learning rates, or None.
    """
    size = parallel_state.get_context_parallel_world_size()
    before = _main_gradients(chunks)
    samples = named["num_microbatches"] * named["micro_batch_size"] * parallel_state.get_data_parallel_world_size()

    def stepped(*_: Any, **__: Any) -> None:
        stop_if_any(_multiples(before, _main_gradients(chunks), size))
        once(optimizer, "step", lambda *_, **__: stop_if_any(_unlike(chunks)))  # its forward has gathered all weights

    def advanced(increment: int = 0, *_: Any, **__: Any) -> None:
        if increment == samples * size:
            what = f"learning rates advance by {increment} samples instead of {samples}"
            stop_if_any([f"{what}, times the number of ranks"])

    once(optimizer, "step", stepped)
    if rates is not None:
        once(rates, "step", advanced)
    STATE.losses = _expected(reports)


@wraps(
    "megatron.training.training:training_log",
    "comparison of the first logged losses",
    otherwise="a loss could be logged that is not the one trained on",
    when=Run.is_compared,
)
def replace_training_log(call: Call) -> Any:
    """Replacement for ``training_log``, which is called after every iteration: the first losses are compared."""
    if STATE.losses is not None:
        expected, STATE.losses = STATE.losses, None
        stop_if_any(_logged_otherwise(expected, call.arguments.get("loss_dict")))
    return call.original()


def _logged_otherwise(expected: Mapping[str, tuple[float, float]], logged: Any) -> list[str]:
    """Losses that are logged after the first step as multiples, or of one rank's part alone."""
    size, problems = parallel_state.get_context_parallel_world_size(), []
    for key, (right, part) in expected.items() if isinstance(logged, Mapping) else ():
        if key not in logged or not isinstance(logged[key], Tensor | float) or isclose(right, 0):
            continue
        value = float(logged[key])
        wrong = {right * size: "times the number of ranks", right / size: "over their number"}
        if not isclose(part, right, rel_tol=_WITHIN):
            wrong[part] = "this context-parallel rank's part alone"
        for other, why in wrong.items():
            if isclose(value, other, rel_tol=1e-5) and not isclose(value, right, rel_tol=1e-5):
                problems.append(f"the loss that is logged as {key!r} is {value:.6g} instead of {right:.6g}, {why}")
    return problems


def once(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Call ``look`` before the next call of a method."""
    original = getattr(owner, name)

    def seen(*args: Any, **named: Any) -> Any:
        if vars(owner).get(name) is seen:  # not another's, set since
            del vars(owner)[name]
        look(*args, **named)
        return original(*args, **named)

    vars(owner)[name] = seen


def _unlike(chunks: Sequence[Any]) -> list[str]:
    """Weights that one step has made different on ranks which hold the same."""
    named = [pair for chunk in chunks for pair in named_parameters(chunks, chunk) if not isinstance(pair[1], DTensor)]
    groups = {
        True: parallel_state.get_data_parallel_group(with_context_parallel=True),
        False: parallel_state.get_expert_data_parallel_group(),
    }
    different = []
    for dense, group in groups.items():
        these = [(name, p.detach()) for name, p in named if getattr(p, "allreduce", True) is dense]
        if not these or group.size() == 1:
            continue
        sums = torch.stack([torch.stack([p.sum(dtype=torch.float64), p.norm(dtype=torch.float64)]) for _, p in these])
        most = torch.stack((sums, -sums))
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        apart = (most.sum(0).amax(1) > _SAME * sums[:, 1]).tolist()
        different += [name for (name, _), wrong in zip(these, apart, strict=True) if wrong]
    others = f"and {len(different) - 1} other weights different on ranks that hold the same"
    return [f"the first step left {different[0]} {others}"] if different else []


def _main_gradients(chunks: Sequence[Any]) -> Tensor:
    flat = [p.main_grad.flatten() for c in chunks for p in c.parameters() if getattr(p, "main_grad", None) is not None]
    return projections(flat)


def _multiples(before: Tensor, after: Tensor, size: int) -> list[str]:
    a, b = before[:, :-1], after[:, :-1]
    if not len(a) or torch.equal(a, b):
        return []
    changed = (b - a).norm(dim=1) > _WITHIN * b.norm(dim=1)
    for factor in (float(size), 1.0 / size):
        multiples = changed & ((b - factor * a).norm(dim=1) <= _WITHIN * b.norm(dim=1))
        if multiples.any():
            return [
                f"gradients between the schedule and the optimizer are multiplied by {factor:.4g}, as many as there "
                f"are context-parallel ranks, in {int(multiples.sum())} of {len(a)} parameters"
            ]
    return []


def _expected(reports: Any) -> dict[str, tuple[float, float]]:
    """Return, by name, the loss over all ranks, and over this context-parallel rank and its data-parallel ones."""
    losses: dict[str, tuple[float, float]] = {}
    for key in reports[0] if reports and isinstance(reports[0], dict) else ():
        rows = [report[key] for report in reports]
        if all(isinstance(row, Tensor) and row.numel() == 2 for row in rows):
            part = torch.stack([row.detach().double().flatten() for row in rows]).sum(0)
            whole = runtime.sum_ranks(part, parallel_state.get_data_parallel_group(with_context_parallel=True))
            own = runtime.sum_ranks(part, parallel_state.get_data_parallel_group())
            losses[key] = (float(whole[0] / whole[1]), float(own[0] / own[1].clamp(min=1)))
    return losses


def stop_if_any(problems: list[str]) -> None:
    """StepError on all ranks, if any has found something; collective."""
    by_rank = {rank: "; ".join(texts) for rank, texts in enumerate(gather_objects(problems)) if texts}
    if not by_rank:
        return
    ranks_of = group_ranks(list(by_rank.values()), list(by_rank))
    told = [f"rank {', '.join(map(str, ranks[:8]))}: {text}" for text, ranks in list(ranks_of.items())[:3]]
    stock, size = not runtime.settings().active, parallel_state.get_context_parallel_world_size()
    raise StepError(
        f"{runtime.settings().flag} on the {layout_of_run().name} layout: a step on {size} context-parallel ranks "
        f"differs from the step on one rank. {' | '.join(told)}. Training would have gone wrong silently: the script, "
        "or this Megatron, computes by a rank's part of the sequence what belongs to the whole. "
        f"--cp-selfcheck off skips this check{'' if stock else ', --cp-provider upstream trains without the plugin'}"
    )


def layout_of_run(*, between: bool = False) -> Layout:
    """The run's layout; between: of tokens outside of attention."""
    if not runtime.settings().active:
        return get_layout("zigzag")
    cp = runtime.context_parallel()
    return (runtime.batch_layout(cp) if between else cp).layout
