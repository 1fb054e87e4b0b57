"""The start-up check: one step of the run itself on a tiny batch, on N context-parallel ranks and on one.

    the first call of Megatron's schedule in training, and before it, with a few tokens for each rank:
        schedule --> the script's get_batch, model and loss --> finalize_model_grads --> what the optimizer would read
        each call of attention in it                                                 --> ``recheck``
        the same, each rank alone with the whole sequence (``one_rank``)             --> the same gradients and losses
        once more, its embeddings moved by a rounding error                          --> how far rounding moves them

Nothing of Megatron is rebuilt: whatever makes N ranks train otherwise than one differs here, be it in the script, the
model, the schedule, or the reduction of gradients. Gradients are compared by random projections, so none is copied;
afterwards everything is as before (``restored``). A difference stops the run on all ranks. A step that cannot be run
so, on a fork, is reported, and the run starts.

New weights hide much of attention: its scores are nearly equal, whatever the angles. So queries and keys are scaled to
a norm at which scores differ.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import global_vars
from torch import Tensor
from torch.distributed import distributed_c10d

from cp_plugin.engine.comm.every_rank import gather_objects
from cp_plugin.engine.placement.documents import DOCUMENTS
from cp_plugin.megatron import runtime
from cp_plugin.megatron.mixers import fp8_scaling, gated_delta_net
from cp_plugin.megatron.mixers.core_attention import CoreAttention
from cp_plugin.megatron.patches import patching, rope
from cp_plugin.megatron.patches.patching import Call, Run, wraps
from cp_plugin.megatron.selfcheck import first_step, readings, recheck, tiny_batch
from cp_plugin.megatron.selfcheck.first_step import StepError, layout_of_run
from cp_plugin.megatron.selfcheck.one_rank import OneRank
from cp_plugin.megatron.selfcheck.restored import restored
from cp_plugin.megatron.state import STATE, Model

_FLOOR = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Smallest limit of a gradient, relative to its norm."""
_TF32 = 2e-3
_SCALE = 256.0  # of losses in float16
_OPINIONS = 4
"""How often rounding errors are tried before a difference is believed."""
_UNSTEADY = 0.3
"""By how much half of the gradients of a step may differ when it is repeated, for them to tell anything."""
_WAIT_S = 60.0  # for the other ranks, once the step has failed on this one
_LENGTHS = ("seq_length", "decoder_seq_length")  # of a schedule
_CALLS = itertools.count()


@wraps(
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
    "check of the first training step; length of padded sequences",
    otherwise="a step on several ranks would not be compared with one rank's",
    when=Run.is_compared,
)
def replace_get_forward_backward_func(call: Call) -> Callable[..., Any]:
    """Replaces ``get_forward_backward_func``: the schedule, with padded lengths; its first training step is checked."""
    original = call.original()

    @functools.wraps(original)
    def schedule(**named: Any) -> Any:
        if runtime.settings().active:
            cp = runtime.context_parallel()
            named |= {name: runtime.padded(cp, named[name]) for name in _LENGTHS if named.get(name) is not None}
        return original(**named)

    @functools.wraps(original)
    def checked(**named: Any) -> Any:
        alone = _size() == 1
        if STATE.unchecked is None or named.get("forward_only") or (alone and not runtime.settings().active):
            return schedule(**named)
        (optimizer, rates), STATE.unchecked = STATE.unchecked, None
        chunks = named["model"] if isinstance(named["model"], list) else [named["model"]]
        named["data_iterator"] = check(schedule, named, chunks, optimizer)
        reports = schedule(**named)
        if not alone:
            first_step.watch(named, chunks, optimizer, rates, reports)
        return reports

    return checked


def expect(optimizer: Any, rates: Any) -> None:
    """Have the first step checked; say at the optimizer's first step if none was: this fork calls another schedule.

    rates: the schedule of learning rates, or None.
    """
    STATE.unchecked = optimizer, rates

    def tell() -> None:
        if STATE.unchecked is not None:
            STATE.unchecked = None
            _not_compared("this run does not call the schedule that Megatron's get_forward_backward_func returns")

    if optimizer is not None:
        first_step.once(optimizer, "step", lambda *_, **__: tell())


def check(schedule: Callable[..., Any], named: Mapping[str, Any], chunks: Sequence[Any], optimizer: Any) -> Any:
    """Compare a step on all context-parallel ranks with one on a single rank; collective over all ranks.

    Args:
        schedule: Megatron's.
        named: the arguments of its first call.
        chunks: of the model.
        optimizer: Megatron's.

    Returns:
        The data iterator of the call, which still has all batches.

    Raises:
        StepError: on every rank, if the steps differ.
    """
    began, iterators = time.monotonic(), tiny_batch.each(named["data_iterator"], tiny_batch.Looked)
    problems: list[str] = []
    line, failure = "", None
    try:
        step = _Step(schedule, {**named, "data_iterator": iterators}, chunks, optimizer)
        problems, line = step.compare()
    except Exception as error:
        failure = error
    met, why = _all_met(failure)
    if failure is not None and not met:
        raise failure
    if why:
        _not_compared(why)
        return iterators
    first_step.stop_if_any(problems)
    runtime.print_notice(f"self-check passed: {line}; {time.monotonic() - began:.1f} s")
    return iterators


class _Step:
    def __init__(
        self, schedule: Callable[..., Any], named: Mapping[str, Any], chunks: Sequence[Any], optimizer: Any
    ) -> None:
        self.schedule, self.named, self.chunks, self.optimizer = schedule, named, chunks, optimizer
        self.args, self.size, self.config = global_vars._GLOBAL_ARGS, _size(), patching.inner_model(chunks[0]).config
        if getattr(self.config, "moe_flex_dispatcher_backend", None) == "hybridep":
            raise RuntimeError("HybridEP sizes its buffer by the first batch, which would be a tiny one")
        cuda = next(p for chunk in chunks for p in chunk.parameters()).is_cuda
        self.dtype = self.config.params_dtype
        self.floor = max(_FLOOR.get(self.dtype, _FLOOR[torch.bfloat16]), _TF32 * cuda)
        self.finalized: Callable[[], Any] | None = None
        self.script = named["forward_step_func"]
        self.scalers = [
            one for o in readings.optimizers(optimizer) if (one := getattr(o, "grad_scaler", None)) is not None
        ]
        layout, self.between = layout_of_run(), layout_of_run(between=True)
        self.padded = tiny_batch.tokens_for(layout, self.size, cuda=cuda)
        self.tokens = self.padded - (0 if STATE.model is None else STATE.model.padding % layout.divisor(self.size))
        self.lengths = dict.fromkeys(_LENGTHS, self.tokens)

    def compare(self) -> tuple[list[str], str]:
        """Differences on this rank, and a line on what was compared."""
        one = OneRank()
        roots = [*self.chunks, *(self.named.get(name) for name in ("pg_collection", "p2p_communicator")), self.script]
        with ExitStack() as back:
            if runtime.settings().active:
                back.callback(runtime.context_parallel().mesh.ledger.reset)
            back.callback(self._clear)
            back.enter_context(restored(self.chunks, [self.script, *self.scalers]))
            back.enter_context(self._lent())
            problems: list[str] = []
            if any(runtime.context_parallel(kind=kind).options.fp8 is not None for kind in runtime.settings().kinds):
                with runtime.without_fp8(), recheck.every_call(self.chunks) as calls:
                    self._run()
                problems += calls.summary
            with recheck.every_call(self.chunks) as calls:
                many = self._run()
            problems += calls.summary
            attention = f"{calls.calls} calls of attention are right within rounding"
            if self.size == 1 or any(gather_objects(bool(problems))):
                return problems, attention
            names = readings.parameter_names(self.chunks, self.optimizer)
            before = one.used()
            with one.alone(roots, self.args), patching.lent(STATE, model=self._model(0)):  # as without padding
                alone = readings.Reference(self._run())
                for salt in range(1, 1 + _OPINIONS):  # near a tie, not each rounding error turns it
                    alone.moved.append(self._run(salt))
                    change = alone.typical_growth()
                    changes = gather_objects(change)
                    if any(one > min(_UNSTEADY, 500 * self.floor) for one in changes):
                        raise RuntimeError(
                            "repeated, the step on one rank is another one: it draws random numbers of its own, or "
                            f"counts calls ({change:.1e} in half of the gradients here)"
                        )
                    problems = alone.differences(many, names, self.floor)
                    if not any(gather_objects(bool(problems))):
                        break
            leaked, own = (after - earlier for after, earlier in zip(one.used(), before, strict=True))
            if self.finalized is not None:
                with restored(self.chunks):
                    self._clear()
                    scale = _SCALE if self.scalers else 1.0
                    problems += readings.reduced_ones(self.chunks, self.optimizer, self.finalized, scale)
        if any(gather_objects(leaked > 0 or bool(problems and own))):
            raise RuntimeError(
                f"the step on one rank still used groups of context-parallel ranks ({leaked + own} times), so it is no "
                f"reference{''.join(f'; {text}' for text in problems)}"
            )
        logged = [name for name in many.values if " of " not in name or "norm" in name]
        line = (
            f"a step of {self.tokens} tokens on {self.size} context-parallel ranks equals the step on one rank: "
            f"{len(names)} gradients within {alone.largest(many):.0e} of their norm, "
            f"{', '.join(logged) or 'no losses here'}"
            f"{'' if any(one > 0 for one in changes) else '; what rounding changes was not measured'}; {attention}"
        )
        return problems, line

    def _run(self, noise: int = 0) -> readings.Result:
        """Run the step on a tiny batch, in which embeddings are moved by a rounding error, if noise is not 0."""
        seed = 1000 * parallel_state.get_data_parallel_rank()
        sizes = self.tokens, self.named["seq_length"], self.named["micro_batch_size"], self._vocabulary(), seed
        # Stock Megatron averages the means of ranks, which is one rank's where all have as many tokens.
        even = runtime.settings().of_stock and not self.config.calculate_per_token_loss

        def tiny(one: tiny_batch.Looked) -> Iterator[Any]:
            return tiny_batch.InPlace(one, tiny_batch.batches(one.first, *sizes, even=even))

        stages = parallel_state.get_pipeline_model_parallel_world_size()
        count = max(2, stages) if len(self.chunks) > 1 else 1 + (self.size <= 64)  # each rank computes whole sequences
        changed = {
            "data_iterator": tiny_batch.each(self.named["data_iterator"], tiny),
            "num_microbatches": count,
            **self.lengths,
        }
        with restored(self.chunks, [self.script]):
            self._clear()
            rope.forget_cached_embeddings()
            with (
                tiny_batch.noisy(self.chunks, noise, torch.finfo(self.dtype).eps),
                self._finalizing(),
                self._experts_fixed() as scores,
            ):
                reports = self.schedule(**{**self.named, **changed})
            self.optimizer.prepare_grads()
            values = readings.logged_losses(reports)
            if any(getattr(getattr(o, "config", None), "clip_grad", 0) for o in readings.optimizers(self.optimizer)):
                values["the norm of gradients"] = float(self.optimizer.get_grad_norm())
            values |= readings.saved_buffers(self.chunks)
            if scores:
                group = parallel_state.get_tensor_and_context_parallel_group()
                values["the scores of experts"] = float(runtime.sum_ranks(torch.stack(scores).sum(), group))
            return readings.Result(readings.projections(readings.gradients(self.optimizer)), values)

    def _experts_fixed(self) -> AbstractContextManager[list[Tensor]]:
        """Fix experts, unless documents place tokens in each step, or Megatron divides packs of several rows."""
        packs = runtime.packs() and self.named["micro_batch_size"] > 1
        if not getattr(self.config, "num_moe_experts", None) or self.between.name == DOCUMENTS.name or packs:
            return nullcontext([])
        size, rank = _size(), parallel_state.get_context_parallel_rank()
        positions = self.between.positions(self.tokens if size == 1 else self.padded, size, rank)
        return tiny_batch.fixed_experts(self.config, positions, self.tokens)

    def _vocabulary(self) -> int:
        sizes = (getattr(patching.inner_model(chunk), "vocab_size", None) for chunk in self.chunks)
        size = next((size for size in sizes if size), getattr(self.args, "padded_vocab_size", None))
        if size is None:
            raise ValueError("the model does not tell the size of its vocabulary")
        return size - 1

    @contextmanager
    def _finalizing(self) -> Iterator[None]:
        """In the block, note how the schedule finalizes gradients, with one token on each rank."""
        finalize = self.config.finalize_model_grads_func
        if finalize is None:
            yield
            return

        def noted(*args: Any, **named: Any) -> Any:
            def one(value: Any) -> Any:  # the number of tokens is a tensor
                return torch.ones_like(value) if isinstance(value, Tensor) else value

            self.finalized = partial(finalize, *map(one, args), **{name: one(x) for name, x in named.items()})
            return finalize(*args, **named)

        with patching.lent(self.config, finalize_model_grads_func=noted):
            yield

    def _model(self, padding: int) -> Model | None:
        """The run's model with the tiny batch's length."""
        if STATE.model is None:
            return None
        problem = replace(STATE.model.problem, seq_length=self.tokens + padding)
        return replace(STATE.model, problem=problem, padding=padding)

    def _clear(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Set lengths to the tiny batch's in the block, and switch off what is random or timed."""
        with ExitStack() as back:
            apart = {"slices": None, "first_batch": None, "cut": replace(STATE.cut), "trial": True}
            back.enter_context(patching.lent(STATE, model=self._model(self.padded - self.tokens), **apart))
            if self.args is not None:  # of other loops: their batches tell the length
                back.enter_context(patching.lent(self.args, **self.lengths))
            for scaler in self.scalers:
                if isinstance(getattr(scaler, "_scale", None), Tensor):
                    back.enter_context(patching.lent(scaler, _scale=torch.full_like(scaler._scale, _SCALE)))
            modules = [module for chunk in self.chunks for module in chunk.modules()]
            back.enter_context(tiny_batch.quiet([*modules, *readings.optimizers(self.optimizer)]))
            for module in modules:
                if isinstance(module, CoreAttention):
                    back.enter_context(patching.lent(module, scaling=fp8_scaling.make_scaling(module.config)))
                    hook = module.register_forward_pre_hook(tiny_batch.Strong(), with_kwargs=True, prepend=True)
                    back.callback(hook.remove)
                elif gated_delta_net.MIXER.computes(module):
                    back.callback(module.in_proj.register_forward_hook(tiny_batch.lasting(module)).remove)
            yield


def _all_met(error: Exception | None) -> tuple[bool, str]:
    """Return True if all ranks have ended the step, after a wait, and why one of them could not run it.

    A rank that failed alone leaves the others in its collectives, and its error ends the run.
    """
    store = dist.PrefixStore(f"cp_plugin_step/{next(_CALLS)}", distributed_c10d._get_default_store())
    if error is not None:
        store.set("why", f"{type(error).__name__}: {error}")
    if store.add("met", 1) == dist.get_world_size():
        store.set("all met", "")
    with suppress(RuntimeError):  # of the store, after so long
        store.wait(["all met"], timedelta(seconds=_WAIT_S))
    return store.check(["all met"]), store.get("why").decode() if store.check(["why"]) else ""


def _not_compared(why: str) -> None:
    """Say so; ValueError with ``--cp-selfcheck strict``."""
    settings, STATE.owed = runtime.settings(), -1
    but = ", but for attention, in the next step" if settings.check_every or settings.identities_every else ""
    text = (
        f"the check of a training step could not be run: {why}. Whether context-parallel ranks train as one rank does "
        f"is not compared{but * settings.active}"
    )
    if runtime.settings().strict:
        raise StepError(f"--cp-selfcheck strict: {text}. Use --cp-selfcheck once to train all the same")
    runtime.print_notice(text)


def _size() -> int:
    return parallel_state.get_context_parallel_world_size()
