"""Train Megatron on forked CPU ranks with context parallelism and without, and compare.

Same weights, float32: loss of the first step within 1e-6 relative, every parameter's gradient within 1e-4 relative
(norm), later losses within 1e-5. Every rank is compared with the rank of the same tensor-, pipeline- and data-parallel
coordinates in the run without context parallelism.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.testing.launch import run_ranks

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
PACKED, HYBRID, LATENT = "--dataloader-inter-document-masking", "--hybrid-layer-pattern", "--multi-latent-attention"
SHORT = 40
"""Longest document of packed mock data, in tokens: several in each sequence of 64."""
LIMITS = FIRST_LOSS, LOSS, GRADIENT = 1e-6, 1e-5, 1e-4
"""Relative errors in float32: of the first step's loss, of all losses, and of any parameter's gradient (norm)."""


@dataclass(slots=True, kw_only=True)
class Record:
    """Results of one rank."""

    coordinates: dict[str, int] = field(default_factory=dict)
    """tp, cp, dp, pp and ep rank."""
    losses: list[float] = field(default_factory=list)
    """Reported loss of every step; last pipeline stage only."""
    eval_losses: list[float] = field(default_factory=list)
    """Of evaluations, where the test's loop reports them."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm of every step; 0 if Megatron computes none (``--clip-grad 0``)."""
    logged: list[dict[str, float]] = field(default_factory=list)
    """Losses and rates in the line that Megatron prints of every step; last rank only."""
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
    result: Any = None
    """What ``train``'s ``ask`` returned."""

    @property
    def place(self) -> tuple[int, ...]:
        """The coordinates that the run without context parallelism has, too."""
        return tuple(self.coordinates[axis] for axis in ("tp", "pp", "dp"))


def record_into(record: Record, ask: Callable[[torch.nn.Module], Any] | None = None) -> None:
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
            record.result = ask(model[0]) if ask is not None else None
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

    training.train_step, say = train_step, training.print_rank_last

    def print_rank_last(text: str) -> None:
        if " iteration " in text and dist.get_rank() == dist.get_world_size() - 1:
            values = re.findall(r"\| ([\w ]*(?:loss|rate)): (\S+)", text)
            record.logged.append({name: float(value) for name, value in values if name != "learning rate"})
        say(text)

    training.print_rank_last = print_rank_last


def _coordinates() -> dict[str, int]:
    from megatron.core import parallel_state

    axes = {"tp": "tensor_model", "cp": "context", "dp": "data", "pp": "pipeline_model", "ep": "expert_model"}
    return {short: getattr(parallel_state, f"get_{axis}_parallel_rank")() for short, axis in axes.items()}


def _record_traffic(record: Record, model: Sequence[torch.nn.Module]) -> None:
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.mixers.core_attention import AnyCoreAttention

    if not runtime.settings().active:
        return
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, AnyCoreAttention):
                cp, problem, linear = module.context_parallel, runtime.model().problem, runtime.settings().linear
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


def run(
    script: str | None, main: Callable[[], object] | None = None, ask: Callable[[torch.nn.Module], Any] | None = None
) -> Record:
    """Train in this process, by sys.argv, with ``script``, ``main`` or the plugin's own loop; ask: as ``train``'s."""
    record = Record()
    record_into(record, ask)
    if script is not None:
        sys.path.insert(0, os.path.dirname(script))
        runpy.run_path(script, run_name="__main__")
    elif main is not None:
        main()
    else:
        from cp_plugin.megatron.models import gpt

        gpt.train()
    return record


def stand_in(documents: int, modules: Sequence[str]) -> None:
    """Shorten the mock data's documents (0: Megatron's length), and call ``install`` of modules in place of kernels.

    modules: or ``module:function``.
    """
    if documents:
        from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

        MockGPTLowLevelDataset.max_sequence_length = documents
    for name in modules:
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function or "install")()


def short_documents() -> None:
    """Several documents in each sequence of 64 tokens of mock data."""
    stand_in(SHORT, ())


def train(
    ranks: int,
    flags: str = "",
    *,
    steps: int = 1,
    model: str = MODEL,
    training: str = SGD,
    timeout: float = 300.0,
    rank_flags: Sequence[str] | None = None,
    documents: int = 0,
    modules: Sequence[str] | None = (),
    prepare: Callable[[], None] | None = None,
    before: Callable[[], None] | None = None,
    ask: Callable[[torch.nn.Module], Any] | None = None,
) -> list[Record]:
    """Train on ``ranks`` forked processes with the plugin active, and return every rank's record.

    model: without what contradicts a hybrid model, whose kernels are stood in for, or multi-latent attention.
    rank_flags: more flags for each rank alone, to start ranks that disagree.
    documents, modules: see ``stand_in``; None: a hybrid model's kernels are not stood in for, either.
    prepare: called on every rank when the provider's patches are in place, before anything uses them.
    before: called on every rank first of all.
    ask: called on every rank with the model before the first step, for its record's ``result``.
    """
    if HYBRID in f"{model} {flags}":
        model = model.replace("--num-layers 2 ", "")
        modules = None if modules is None else ("state_space_kernels", *modules)
    if LATENT in flags:
        model = model.replace("--group-query-attention --num-query-groups 2 ", "")
    words = f"{model} {DATA} {training} --train-iters {steps} {flags}".split()

    def rank() -> Record:
        if before is not None:
            before()
        own = rank_flags[int(os.environ["RANK"])].split() if rank_flags is not None else []
        from cp_plugin.megatron import activate

        sys.argv = ["pretrain_gpt.py", *words, *own]
        activate()
        from cp_plugin import pretrain_gpt
        from cp_plugin.megatron.patches import hooks

        start = hooks.start

        def start_and_prepare(*settings: Any) -> None:
            start(*settings)
            stand_in(documents, modules or ())
            if prepare is not None:
                prepare()

        hooks.start = start_and_prepare
        return run(SCRIPT, pretrain_gpt.main, ask)

    records = run_ranks(rank, ranks, timeout=timeout)
    assert all(isinstance(record, Record) for record in records), "a rank left early"
    return records


stock = functools.cache(train)
"""A cached training without context parallelism."""


def compare(got: Sequence[Record], want: Sequence[Record], *, steps: int, limits: Sequence[float] = LIMITS) -> None:
    """Raise AssertionError, or ValueError (``gap``), unless losses and gradients are those of the other run."""
    difference, (first, loss, grad) = gap(got, want), limits
    assert difference.grad <= grad, f"gradient of {difference.where}: {difference.grad:.1e} off"
    assert {len(record.losses) for record in got} <= {0, steps}
    assert difference.first <= first and difference.loss <= loss, difference


def assert_same_bits(got: Sequence[Record], want: Sequence[Record]) -> None:
    """The losses and gradients of all ranks are those of the other run, to the bit."""
    for record, base in zip(got, want, strict=True):
        assert record.losses == base.losses
        different = [name for name, grad in base.grads.items() if not torch.equal(record.grads[name], grad)]
        assert base.grads and not different, (record.coordinates, different)


class Gap(NamedTuple):
    """Relative differences between a training run with context parallelism and one without."""

    loss: float
    """Largest of all steps."""
    norm: float
    """Of the gradient norm, likewise."""
    grad: float
    """Norm of the difference over the norm, worst parameter on any rank, step 1."""
    where: str = ""
    """That parameter."""
    first: float = 0.0
    """Of the first step's loss."""

    def fits(self, limit: Gap) -> bool:
        """Compare loss, norm and gradients; NaN is within no limit."""
        return self.loss <= limit.loss and self.norm <= limit.norm and self.grad <= limit.grad


def gap(got: Sequence[Record], want: Sequence[Record]) -> Gap:
    """Between every rank of ``got`` and the rank of ``want`` with the same tp, pp and dp rank.

    Raises:
        ValueError: they are not comparable: different initial weights, parameters or numbers of steps, or numbers that
            are not finite.
    """
    place = {record.place: record for record in want}
    if len(place) != len(want):
        raise ValueError("two ranks without context parallelism have the same place")
    losses, norms, firsts, grads = [], [], [], [(0.0, "")]
    for record in got:
        base = place.get(record.place)
        if base is None:
            raise ValueError(f"{record.coordinates}: no rank without context parallelism has this place")
        _check(record, base)
        losses += differences(record.losses, base.losses)
        firsts += differences(record.losses[:1], base.losses[:1])
        norms += differences(record.norms, base.norms)
        for name, grad in base.grads.items():
            wide = grad.double()
            error, norm = (record.grads[name].double() - wide).norm().item(), wide.norm().item()
            grads.append((error / norm if norm else math.inf * error if error else 0.0, name))
    if not losses:
        raise ValueError("no rank reported a loss")
    error, where = max(grads, key=lambda pair: (math.isnan(pair[0]), pair[0]))
    return Gap(worst(losses), worst(norms), error, where, worst(firsts))


def _check(record: Record, base: Record) -> None:
    for name in ("weights", "grads"):
        if getattr(record, name).keys() != getattr(base, name).keys():
            raise ValueError(f"{record.coordinates}: not the parameters of the model on one rank")
    for name, weight in base.weights.items():
        if not torch.equal(record.weights[name], weight):
            raise ValueError(f"{name} on {record.coordinates}: not the same weight to begin with")
    if len(record.losses) != len(base.losses) or len(record.norms) != len(base.norms):
        raise ValueError(f"{record.coordinates}: {len(record.norms)} steps, not {len(base.norms)}")
    if not all(map(math.isfinite, (*base.losses, *base.norms))):
        raise ValueError("loss or gradient norm without context parallelism is not finite")


def relative(got: float, want: float) -> float:
    """The difference over the power of two below ``want``, so that one rounding has the same size for every value."""
    unit = math.ldexp(1.0, math.frexp(want)[1] - 1)
    return abs(got - want) / unit if want else math.inf * abs(got) if got else 0.0


def differences(got: Sequence[float], want: Sequence[float]) -> list[float]:
    """``relative`` of each pair."""
    return [relative(a, b) for a, b in zip(got, want, strict=True)]


def worst(values: Sequence[float]) -> float:
    """The largest; NaN if one is."""
    return max(values, key=lambda x: (math.isnan(x), x))
