"""The rest of the first training step, from its schedule to the log, which the check on a tiny batch does not run.

    gradients at the end of the schedule --> as the optimizer finds them
    samples of the step                  --> by which the schedule of learning rates advances
    losses that the schedule returns     --> the ones that are logged

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

from cp_plugin.megatron import runtime
from cp_plugin.megatron.patches.patching import Call, around
from cp_plugin.megatron.selfcheck.readings import projections
from cp_plugin.megatron.state import STATE

_WITHIN = 1e-3


def watch(
    named: Mapping[str, Any],
    chunks: Sequence[Any],
    optimizer: Any,
    rates: Any,
    reports: Any,
    stop: Callable[[list[str]], None],
) -> None:
    """Follow this step on.

    Args:
        named, reports: arguments of Megatron's schedule and what it returned.
        rates: the schedule of learning rates, or None.
        stop: raises an error on all ranks if any has found something; collective.
    """
    size = runtime.context_parallel().size
    before = _main_gradients(chunks)
    samples = named["num_microbatches"] * named["micro_batch_size"] * parallel_state.get_data_parallel_world_size()

    def stepped() -> None:
        stop(_multiples("gradients between the schedule and the optimizer", before, _main_gradients(chunks), size))

    def advanced(increment: int) -> None:
        if increment == samples * size:
            stop([f"learning rates advance by {increment} samples instead of {samples}, times the number of ranks"])

    _once(optimizer, "step", lambda *_, **__: stepped())
    if rates is not None:
        _once(rates, "step", lambda *args, **given: advanced(*args[:1], **given))
    STATE.losses = _expected(reports), stop


@around
def replace_training_log(call: Call) -> Any:
    """Replacement for ``training_log``, which is called after every iteration: the first losses are compared."""
    _compare_log(call.arguments.get("loss_dict"))
    return call.original()


def _compare_log(logged: Any) -> None:
    """Compare the losses that are logged after the first step; collective over all ranks, once."""
    if STATE.losses is None:
        return
    (expected, stop), STATE.losses = STATE.losses, None
    size, found = runtime.context_parallel().size, []
    for key, (right, part) in expected.items() if isinstance(logged, Mapping) else ():
        if key not in logged or not isinstance(logged[key], Tensor | float) or isclose(right, 0):
            continue
        value = float(logged[key])
        wrong = {right * size: "times the number of ranks", right / size: "over their number"}
        if not isclose(part, right, rel_tol=_WITHIN):
            wrong[part] = "this context-parallel rank's part alone"
        for other, why in wrong.items():
            if isclose(value, other, rel_tol=1e-5) and not isclose(value, right, rel_tol=1e-5):
                found.append(f"the loss that is logged as {key!r} is {value:.6g} instead of {right:.6g}, {why}")
    stop(found)


def _once(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Call ``look`` before the next call of a method."""
    original = getattr(owner, name)

    def seen(*args: Any, **named: Any) -> Any:
        vars(owner).pop(name)
        look(*args, **named)
        return original(*args, **named)

    vars(owner)[name] = seen


def _main_gradients(chunks: Sequence[Any]) -> Tensor:
    flat = [p.main_grad.flatten() for c in chunks for p in c.parameters() if getattr(p, "main_grad", None) is not None]
    return projections(flat, flat[0].device) if flat else torch.zeros(0, 1)


def _multiples(what: str, before: Tensor, after: Tensor, size: int) -> list[str]:
    a, b = before[:, :-1], after[:, :-1]
    if not len(a) or torch.equal(a, b):
        return []
    for factor in (float(size), 1.0 / size):
        if float((b - factor * a).norm()) <= _WITHIN * float(b.norm()):
            return [f"{what} are multiplied by {factor:.4g}, as many as there are context-parallel ranks"]
    return []


def _expected(reports: Any) -> dict[str, tuple[float, float]]:
    """By name, the loss over all ranks, and over this context-parallel rank and its data-parallel ones."""
    found: dict[str, tuple[float, float]] = {}
    for key in reports[0] if reports and isinstance(reports[0], dict) else ():
        rows = [report[key] for report in reports]
        if all(isinstance(row, Tensor) and row.numel() == 2 for row in rows):
            part = torch.stack([row.detach().double().flatten() for row in rows]).sum(0)
            whole, own = part.clone(), part.clone()
            dist.all_reduce(whole, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            dist.all_reduce(own, group=parallel_state.get_data_parallel_group())
            found[key] = (float(whole[0] / whole[1]), float(own[0] / own[1].clamp(min=1)))
    return found
