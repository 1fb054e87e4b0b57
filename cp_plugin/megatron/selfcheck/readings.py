"""What a training step computes, in a few numbers: gradients as the optimizer would read them, losses as logged.

A gradient is read by its products with random signs, and its norm. Products are linear, so those of two steps differ by
the product of their difference: none is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isclose
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.runtime import sum_ranks

_PROJECTIONS = 4
_CHUNK = 1 << 20  # elements of a gradient that are projected at once
_GROWTH = 10.0
"""Limit, in units of what a rounding error of the embeddings changes."""
_ONE_GROUP = ("FP32Optimizer", "Float16OptimizerWithFloat16Params", "DistributedOptimizer")


class Result(NamedTuple):
    """What a step gives."""

    gradients: Tensor  # float64 [parameters, projections + 1], on the CPU; the last column has squared norms
    values: dict[str, float]
    """Logged losses, and the norm of all gradients."""


class Reference:
    """A step on one rank, and what rounding errors change of it."""

    def __init__(self, alone: Result) -> None:
        self.alone = alone
        self.moved: list[Result] = []
        """The step again, each with a rounding error of its embeddings."""

    def apart(self, other: Result) -> Tensor:
        """Return how far each gradient is from that of another step, relative to its norm."""
        norms = self.alone.gradients[:, -1].sqrt().clamp(min=1e-30)
        return (other.gradients - self.alone.gradients)[:, :-1].square().mean(1).sqrt() / norms

    @property
    def growth(self) -> Tensor:
        """Return what rounding errors change of each gradient, relative to its norm."""
        return torch.stack([self.apart(one) for one in self.moved]).amax(0)

    def typical_growth(self) -> float:
        """Return what they change of half of the gradients."""
        return float(self.growth.median()) if len(self.growth) else 0.0

    def largest(self, many: Result) -> float:
        """Return the largest difference of a gradient that is more than a sum of rounding errors."""
        apart = self.apart(many)[self.growth < 1]
        return float(apart.max()) if len(apart) else 0.0

    def differences(self, many: Result, names: Sequence[str], floor: float) -> list[str]:
        """Return what differs in a step on many ranks, beyond rounding.

        Args:
            names: of the gradients.
            floor: smallest limit, relative to a gradient's norm.
        """
        problems = []
        apart, growth = self.apart(many), self.growth
        limits = (_GROWTH * growth.clamp(min=self.typical_growth())).clamp(min=floor)
        wrong = (~(apart <= limits)).nonzero().flatten().tolist()
        if wrong:
            first, limit = wrong[0], float(limits[wrong[0]])
            problems.append(
                f"the gradient of {names[first]} by {float(apart[first]):.1e} of its norm (allowed {limit:.0e}"
                f"{self._factor(many, first, limit)}), the first of {len(wrong)} of {len(names)} that differ"
            )
        for key in many.values.keys() & self.alone.values.keys():
            a, b = many.values[key], self.alone.values[key]
            if not abs(a - b) <= max(floor * abs(b), *(_GROWTH * abs(one.values[key] - b) for one in self.moved)):
                problems.append(f"{key}: {a:.6g} instead of {b:.6g}")
        return problems

    def _factor(self, many: Result, place: int, limit: float) -> str:
        """Name the factor, if one gradient is a multiple of the other."""
        a, b = (x.gradients[place, :-1] for x in (many, self.alone))
        ratio = float(a @ b / (b @ b).clamp(min=1e-300))
        multiple = float((a - ratio * b).norm()) <= 10 * limit * float(a.norm())
        return f"; it is {ratio:.4g} times that of one rank" if multiple else ""


def scramble(numbers: Tensor, salt: int) -> Tensor:
    """Return a pseudo-random number by number: int64 of any shape."""
    bits = (numbers + 1 + salt * 0x632BE59B) * 0x1E3779B97F4A7C15
    return (bits ^ (bits >> 31)) * 0x3F58476D1CE4E5B9


def signs(numbers: Tensor, salt: int) -> Tensor:
    """1 or -1 by number: int64 of any shape -> float32."""
    return ((scramble(numbers, salt) >> 40) & 1).float().mul_(2).sub_(1)


def projections(flat: Sequence[Tensor | None]) -> Tensor:
    """Products of each gradient with random signs, and its squared norm: on the CPU.

    The signs are drawn once: each part of a gradient is multiplied by a window of them at another place.
    """
    device = next((g.device for g in flat if g is not None), torch.device("cpu"))
    rows = torch.zeros(len(flat), _PROJECTIONS + 1, dtype=torch.float64, device=device)
    chunk = min(_CHUNK, max((g.numel() for g in flat if g is not None), default=0))
    numbers = torch.arange(2 * chunk, device=device)
    drawn = torch.stack([signs(numbers, k).double() for k in range(_PROJECTIONS)])
    for place, g in enumerate(flat):
        for number, first in enumerate(range(0, 0 if g is None else g.numel(), chunk)):
            part = g[first : first + chunk].double().to(device)
            at = (0x9E3779B1 * place + 0x85EBCA6B * number >> 7) % chunk
            rows[place, :-1] += drawn[:, at : at + part.numel()] @ part
            rows[place, -1] += part @ part
    return rows.cpu()


def optimizers(optimizer: Any) -> list[Any]:
    """Return Megatron's optimizer, and those that it is a chain of."""
    return [optimizer, *getattr(optimizer, "chained_optimizers", ())]


def _parameters(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients(optimizer: Any) -> list[Tensor | None]:
    """Return what the optimizer would read, flat, of this rank's parts."""
    flat: list[Tensor | None] = []
    for p in _parameters(optimizer):
        g = getattr(p, "decoupled_grad", None) if p.grad is None else p.grad
        g = g.to_local() if hasattr(g, "to_local") else g
        flat.append(None if g is None else g.detach().flatten())
    return flat


def named_parameters(chunks: Sequence[Any], chunk: Any) -> list[tuple[str, Tensor]]:
    """Return a chunk's parameters, by names that are unique in the model's."""
    prefix = f"{list(chunks).index(chunk)}." if len(chunks) > 1 else ""
    return [(prefix + name, p) for name, p in patching.inner_model(chunk).named_parameters()]


def parameter_names(chunks: Sequence[Any], optimizer: Any) -> list[str]:
    """Name the optimizer's parameters by the model's, where it is known whose part one is."""
    known: dict[int, str] = {}
    spans = []
    for chunk in chunks:
        for name, p in named_parameters(chunks, chunk):
            known[id(p)] = known[id(getattr(p, "main_param", p))] = name
            spans.append((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name))
    names = []
    for place, p in enumerate(_parameters(optimizer)):
        at = next((name for low, high, name in spans if low <= p.data_ptr() < high), f"parameter {place}")
        names.append(known.get(id(p), at))
    return names


def saved_buffers(chunks: Sequence[Any]) -> dict[str, float]:
    """A number for each of the buffers that checkpoints have, such as biases of experts."""
    sums = {}
    for module in (module for chunk in chunks for module in chunk.modules()):
        for name, x in module._buffers.items():
            if x is not None and x.is_floating_point() and name not in module._non_persistent_buffers_set:
                numbers = torch.arange(x.numel(), device=x.device)
                sums[f"{name} of {type(module).__name__} {len(sums)}"] = float(
                    x.flatten().double() @ signs(numbers, 0).double()
                )
    return sums


def logged_losses(reports: Any) -> dict[str, float]:
    """Return what would be logged of the losses: means, or quotients of sums, over micro-batches and these ranks."""
    group, losses = parallel_state.get_context_parallel_group(), {}
    for key in reports[0] if reports and isinstance(reports[0], dict) else ():
        if "loss" not in str(key) or not isinstance(reports[0][key], Tensor | float | int):
            continue  # others may well be of a rank
        rows = [torch.as_tensor(report[key]) for report in reports]
        total = sum_ranks(torch.stack([row.detach().double().flatten() for row in rows]).sum(0), group)
        pair = total.numel() == 2
        losses[f"{key!r}"] = float(total[0] / total[1]) if pair else float(total.sum()) / len(rows) / group.size()
    return losses


def reduced_ones(chunks: Sequence[Any], optimizer: Any, finalize: Callable[[], Any], scale: float) -> list[str]:
    """Return what is wrong with the scale of reduced gradients: where all ranks' are x, for one token, so are they.

    Steps over equal copies cannot tell, since the same code reduces both. An expert's gradient is the sum over the
    ranks that share the expert, over the number of all. Each model-parallel rank has another x, so that a sum over
    these, as of norms and tied embeddings, is not taken for a multiple.

    Args:
        finalize: Megatron's, as the schedule calls it, with one token on each rank; gradients are zero before.
        scale: of losses.
    """
    named = [pair for chunk in chunks for pair in named_parameters(chunks, chunk) if pair[1].requires_grad]
    if not all(hasattr(p, "main_grad") for _, p in named):
        return []
    tensor, place = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_tensor_model_parallel_rank()
    place += tensor.size() * parallel_state.get_pipeline_model_parallel_rank()
    device = named[0][1].device if named else torch.device("cpu")
    x = torch.tensor(1 + 0.7549 * (1 + place) % 1, dtype=torch.float64, device=device)
    for _, p in named:
        p.main_grad.fill_(scale * float(x))
    for chunk in chunks:
        if chunk.ddp_config.overlap_grad_reduce:
            chunk.start_grad_sync()
    finalize()
    optimizer.prepare_grads()
    embedding = parallel_state.get_embedding_group(check_initialized=False)
    everyone = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    of_expert = sum_ranks(x, parallel_state.get_expert_data_parallel_group()) / everyone
    over_tensor = sum_ranks(x, tensor)
    dense = [x, over_tensor, over_tensor / tensor.size()]
    if embedding not in (None, dist.GroupMember.NON_GROUP_MEMBER):
        dense += [sum_ranks(one, embedding) for one in dense]
    right = {True: [of_expert, sum_ranks(of_expert, tensor)], False: dense}
    experts = {name for name, p in named if not getattr(p, "allreduce", True)}
    wrong = []
    for name, g in zip(parameter_names(chunks, optimizer), gradients(optimizer), strict=True):
        if g is not None and g.numel():
            least, most = (float(one) for one in g.aminmax())
            allowed = [float(one) for one in right[name in experts]]
            if not any(isclose(least, one, rel_tol=1e-2) and isclose(most, one, rel_tol=1e-2) for one in allowed):
                wrong.append(f"the gradient of {name} by {least / allowed[0]:.4g}")
    problems = [f"reduction over ranks scales {wrong[0]}, and {len(wrong) - 1} others"] if wrong else []
    return problems + _norm_of_others(optimizer, device)


def _norm_of_others(optimizer: Any, device: torch.device) -> list[str]:
    """Return what is wrong with the norm by which gradients are clipped: every element of the model counts once.

    Checks optimizers with one group of ranks for all parameters: those of models without experts. Collective.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    kind, config = type(parts[0]).__name__, getattr(parts[0], "config", None)
    others = ("use_precision_aware_optimizer", "optimizer_cpu_offload")
    able = kind in _ONE_GROUP and config.clip_grad > 0 and not any(getattr(config, name, False) for name in others)
    checked = torch.tensor(able and len(parts) == 1, device=device).int()
    dist.all_reduce(checked, dist.ReduceOp.MIN)  # pipeline stages may have others
    if not checked:
        return []
    counted = getattr(parts[0], "get_grads_for_grad_norm", None) or parts[0].get_main_grads_for_grad_norm  # before 0.19
    total = torch.zeros((), dtype=torch.float64, device=device)
    total += sum(g.double().square().sum() for g in counted())
    dist.all_reduce(total)
    copies = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if kind == "DistributedOptimizer":
        copies = getattr(parts[0].ddp_config, "num_distributed_optimizer_instances", 1)
    norm, want = float(optimizer.get_grad_norm()), float(total / copies) ** 0.5
    if isclose(norm, want, rel_tol=1e-3):
        return []
    what = "the norm of gradients is that of other ranks"
    return [f"{what}: {norm:.6g} for {want:.6g}, so they would be clipped otherwise"]
