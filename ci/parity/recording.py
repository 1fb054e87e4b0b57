"""Record of a Megatron training on every rank: losses, gradient norms, and gradients of step 1.

Used by the parity runner (forked ranks, torchrun, srun) and by ``tests/megatron/harness.py``. It wraps Megatron's
``train_step`` without changing its behaviour.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class Record:
    """Results of one rank."""

    coordinates: dict[str, int] = field(default_factory=dict)
    """tp, cp, dp, pp and ep rank."""
    losses: list[float] = field(default_factory=list)
    """Reported loss of every step; last pipeline stage only."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm of every step; 0 if Megatron computes none (``--clip-grad 0``)."""
    mtp_losses: list[Tensor] = field(default_factory=list)
    """This rank's part of the multi-token prediction losses of every step, by depth; last pipeline stage only."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameters before the first step."""
    grads: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the first step, reduced over the data-parallel and context-parallel ranks."""
    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    """(phase, mesh axis) -> bytes sent in step 1, by the ledger; empty without a provider."""
    formula: dict[tuple[str, str], int] = field(default_factory=dict)
    """The same by the provider's closed formula."""


def record_into(record: Record) -> None:
    """Fill ``record`` during the training of this process; call it beforehand, once Megatron can be imported."""
    from megatron.core.transformer import multi_token_prediction
    from megatron.training import training

    step = training.train_step

    @functools.wraps(step)
    def train_step(forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        first = not record.coordinates
        if first:
            record.coordinates = _coordinates()
            record.weights = {n: _copy(p) for n, p in _parameters(model)}
        result = step(forward_step_func, data_iterator, model, *args, **kwargs)
        if first:
            record.grads = {n: _copy(p.main_grad) for n, p in _parameters(model)}
            _record_traffic(record, model)
        tracked = multi_token_prediction.MTPLossLoggingHelper.tracker
        values = tracked.get("loss_values", tracked.get("values"))  # since 0.19, before
        if values is not None:
            record.mtp_losses.append(_copy(values))
        if "lm loss" in result[0]:
            record.losses.append(float(result[0]["lm loss"]))
        record.norms.append(float(result[5] or 0.0))
        return result

    training.train_step = train_step


def write(record: Record, folder: Path, rank: int) -> None:
    """Write ``folder/rank-00012.pt`` atomically, for ``read``."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank-{rank:05d}.pt"
    torch.save(asdict(record), file.with_suffix(".part"))
    file.with_suffix(".part").rename(file)


def read(folder: Path, ranks: int) -> list[Record]:
    """The records of all ranks. Raises FileNotFoundError naming the ranks without one."""
    files = [folder / f"rank-{rank:05d}.pt" for rank in range(ranks)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise FileNotFoundError(f"{folder}: {len(missing)} of {ranks} ranks left no record: {', '.join(missing[:8])}")
    return [Record(**torch.load(file, weights_only=True)) for file in files]


def _coordinates() -> dict[str, int]:
    from megatron.core import parallel_state

    axes = {"tp": "tensor_model", "cp": "context", "dp": "data", "pp": "pipeline_model", "ep": "expert_model"}
    return {short: getattr(parallel_state, f"get_{axis}_parallel_rank")() for short, axis in axes.items()}


def _record_traffic(record: Record, model: Sequence[torch.nn.Module]) -> None:
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.layers.core_attention import AnyCoreAttention

    if not runtime.settings().active:
        return
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, AnyCoreAttention):
                cp, problem, linear = module.context_parallel, runtime.problem(), runtime.settings().linear
                if module.kind == "linear":
                    problem = linear.problem(problem)
                for line, sent in cp.provider.traffic(problem, cp.options, cp.index).items():
                    record.formula[line] = record.formula.get(line, 0) + sent * get_num_microbatches()
    for line in runtime.context_parallel().mesh.ledger.entries():
        record.sent[line.phase, line.axis] = record.sent.get((line.phase, line.axis), 0) + line.bytes


def _parameters(model: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    """All parameters except those whose gradients are sharded."""
    named = [(f"{i}.{n}", p) for i, chunk in enumerate(model) for n, p in chunk.named_parameters()]
    return [(name, parameter) for name, parameter in named if getattr(parameter, "main_grad", None) is not None]


def _copy(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)
