"""Run Megatron's own training loop on forked CPU ranks, and record what it computed."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cp_plugin.launch import run_ranks

MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --seq-length 64 --max-position-embeddings 64 --attention-dropout 0 "
    "--hidden-dropout 0"
)
DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0"
SGD = (
    "--micro-batch-size 2 --global-batch-size 4 --lr 0.05 --lr-decay-style constant --optimizer sgd --sgd-momentum 0 "
    "--weight-decay 0 --clip-grad 0 --log-interval 1 --eval-iters 0 --eval-interval 1000"
)
SCRIPT = os.environ.get("CP_PLUGIN_TEST_SCRIPT")
"""A training script to use instead of the plugin's own; for example a Megatron-LM checkout's pretrain_gpt.py."""


@dataclass(slots=True, kw_only=True)
class Record:
    """What one rank computed."""

    coordinates: dict[str, int] = field(default_factory=dict)
    """Its tp, cp, dp and pp rank."""
    losses: list[float] = field(default_factory=list)
    """Reported loss of every step; last pipeline stage only."""
    mtp_losses: list[Tensor] = field(default_factory=list)
    """This rank's part of the losses of multi-token prediction in every step, by depth; last pipeline stage only."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameters before the first step."""
    grads: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the first step, reduced over the data-parallel and context-parallel ranks."""
    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    """(phase, mesh axis) -> bytes the rank sent in the first step, by the ledger; empty without a provider."""
    formula: dict[tuple[str, str], int] = field(default_factory=dict)
    """The same by the provider's closed formula."""


def train(
    ranks: int,
    flags: str = "",
    *,
    steps: int = 1,
    model: str = MODEL,
    training: str = SGD,
    timeout: float = 180.0,
    rank_flags: Sequence[str] | None = None,
    prepare: Callable[[], None] | None = None,
) -> list[Record]:
    """Train on ``ranks`` forked processes with the plugin active, and return every rank's record.

    rank_flags: more flags for each rank alone, to start ranks that disagree.
    prepare: called on every rank when the provider's patches are in place, before anything uses them.
    """
    words = f"{model} {DATA} {training} --train-iters {steps} {flags}".split()
    records = run_ranks(_train_rank, ranks, args=(words, rank_flags, prepare), timeout=timeout)
    assert all(isinstance(record, Record) for record in records), "a rank left early"
    return records


def _train_rank(words: list[str], rank_flags: Sequence[str] | None, prepare: Callable[[], None] | None) -> Record:
    if rank_flags is not None:
        words = [*words, *rank_flags[int(os.environ["RANK"])].split()]
    from cp_plugin.megatron import activate

    sys.argv = ["pretrain_gpt.py", *words]
    activate()
    if prepare is not None:
        _after_start(prepare)
    record = Record()
    _record_into(record)
    if SCRIPT is not None:
        sys.path.insert(0, os.path.dirname(SCRIPT))
        runpy.run_path(SCRIPT, run_name="__main__")
    else:
        runpy.run_module("cp_plugin.pretrain_gpt", run_name="__main__", alter_sys=True)
    return record


def _after_start(prepare: Callable[[], None]) -> None:
    from cp_plugin.megatron import hooks

    start = hooks.start

    def start_and_prepare(*settings: Any) -> None:
        start(*settings)
        prepare()

    hooks.start = start_and_prepare


def _record_into(record: Record) -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_token_prediction
    from megatron.training import training

    step = training.train_step

    @functools.wraps(step)
    def train_step(forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        first = not record.coordinates
        if first:
            record.coordinates = {
                "tp": parallel_state.get_tensor_model_parallel_rank(),
                "cp": parallel_state.get_context_parallel_rank(),
                "dp": parallel_state.get_data_parallel_rank(),
                "pp": parallel_state.get_pipeline_model_parallel_rank(),
            }
            record.weights = {n: p.detach().clone() for n, p in _parameters(model)}
        result = step(forward_step_func, data_iterator, model, *args, **kwargs)
        if first:
            record.grads = {n: p.main_grad.detach().clone() for n, p in _parameters(model)}
            _record_traffic(record, model)
        tracked = multi_token_prediction.MTPLossLoggingHelper.tracker
        values = tracked.get("loss_values", tracked.get("values"))  # since 0.19, before
        if values is not None:
            record.mtp_losses.append(values.clone())
        if "lm loss" in result[0]:
            record.losses.append(float(result[0]["lm loss"]))
        return result

    training.train_step = train_step


def _record_traffic(record: Record, model: Sequence[torch.nn.Module]) -> None:
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.attention import AnyCoreAttention

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
    """All parameters, but for those whose gradients are divided over the ranks."""
    named = [(f"{i}.{n}", p) for i, chunk in enumerate(model) for n, p in chunk.named_parameters()]
    return [(name, parameter) for name, parameter in named if getattr(parameter, "main_grad", None) is not None]
