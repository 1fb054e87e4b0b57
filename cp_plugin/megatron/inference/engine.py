"""Megatron's static inference engine with the context sharded over context-parallel ranks.

    engine = static_engine(model, tokenizer, max_requests=8, max_sequence_length=32_768)
    done = engine.generate(["def main"], sampling_params=SamplingParams(num_tokens_to_generate=64))
    done[0].generated_text

Call it identically on every rank. Megatron batches, samples, stops and detokenises; ``decoding`` runs its steps:

    Megatron's controller gives                                                the plugin
    all prompts of a batch up to the length of the shortest, ``[b, n]``        prefills, by any provider
    then one token of each, ``[b, 1]``: of its prompt, or the sampled one      decodes

The rest of a prompt longer than the shortest of its batch is therefore decoded token by token: batch prompts of similar
length, or use ``max_requests=1``.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.async_stream import AsyncStream
from megatron.core.inference.contexts import BaseInferenceContext, StaticInferenceContext
from megatron.core.inference.engines import StaticInferenceEngine
from megatron.core.inference.inference_request import InferenceRequest, Status
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.scheduler import Scheduler
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from cp_plugin.megatron import compat
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.cpu.cuda_surface import OnCpu
from cp_plugin.megatron.inference.decoding import Decoding, check, decoding
from cp_plugin.megatron.rules import inference as rules
from cp_plugin.megatron.startup import agreement


def static_engine(
    model: torch.nn.Module,
    tokenizer: Any,
    *,
    max_requests: int,
    max_sequence_length: int,
    prefill_chunk: int | None = None,
    random_seed: int | None = None,
) -> StaticEngine:
    """Megatron's static engine for a model with the plugin's attention or, on one rank, Megatron's own.

    Args:
        model: a GPT or hybrid model, also wrapped.
        tokenizer: one of Megatron's.
        max_requests: sequences in a batch.
        max_sequence_length: tokens of a prompt and its continuation.
        prefill_chunk: prompt tokens per forward; None: all of the shortest prompt.
        random_seed: for torch's global generator, as in Megatron; sampling uses the model's
            ``inference_sampling_seed`` (the training's ``--seed``).

    Raises:
        ValueError: for an unsupported model, tokenizer or size.
    """
    sizes = {"max_requests": max_requests, "max_sequence_length": max_sequence_length}
    if prefill_chunk is not None:
        sizes["prefill_chunk"] = prefill_chunk
    rules.check_engine(rules.Engine(sizes=sizes))
    context = StaticInferenceContext(max_requests, max_sequence_length)
    wrapped = InferenceWrapper(model, context, prefill_chunk=prefill_chunk)
    return StaticEngine(Controller(wrapped, tokenizer), random_seed=random_seed)


class InferenceWrapper(GPTInferenceWrapper):
    """Megatron's model wrapper, with the steps of ``Decoding``."""

    def __init__(
        self, model: torch.nn.Module, inference_context: BaseInferenceContext, *, prefill_chunk: int | None = None
    ) -> None:
        """ValueError for an unsupported model or context; ``prefill_chunk`` as in ``static_engine``."""
        _check_model(model)
        super().__init__(model, inference_context)
        self._chunk = prefill_chunk
        self._so_far: Decoding | None = None

    @property
    def inference_context(self) -> BaseInferenceContext:
        """Megatron's bookkeeping of a batch; the cache is in ``Decoding``."""
        return self._context

    @inference_context.setter
    def inference_context(self, context: BaseInferenceContext) -> None:
        _check_context(context)
        self._context = context

    @contextmanager
    def batch(self, sequences: int, tokens: int) -> Iterator[None]:
        """Inside the block, steps continue ``sequences`` texts of at most ``tokens`` each; then the cache is freed."""
        with decoding(self.model, batch=sequences, context=tokens) as self._so_far:
            try:
                yield
            finally:
                self._so_far = None

    def prep_inference_input(self, prompts_tokens: Tensor) -> dict[str, Any]:
        """The padded tokens ``[b, n]``, with an empty mask: without one Megatron would make n * n elements."""
        return {"tokens": prompts_tokens, "attention_mask": torch.empty(0, dtype=torch.bool)}

    def get_batch_for_context_window(
        self, inference_input: dict[str, Any], context_start_position: int, context_end_position: int
    ) -> dict[str, Any]:
        """The tokens of a step."""
        tokens = inference_input["tokens"][:, context_start_position:context_end_position]
        return {**inference_input, "tokens": tokens}

    @torch.inference_mode()
    def run_one_forward_step(self, inference_input: dict[str, Any], recv_buffer_seq_len: int | None = None) -> Tensor:
        """Logits ``[b, t, vocabulary]`` after a step's tokens ``[b, t]``, on every rank; of a prompt only the last,
        unless the context asks for all. ValueError outside ``batch``."""
        if self._so_far is None:
            raise ValueError(
                "InferenceWrapper runs inside its batch(): give it to cp_plugin.megatron.inference.engine.Controller "
                "instead of Megatron's TextGenerationController, or use static_engine()"
            )
        tokens, context = inference_input["tokens"], self.inference_context
        with _outside_inference_mode():
            if context.sequence_len_offset:
                logits = self._so_far.extend(tokens)
            elif context.config.materialize_only_last_token_logits:
                logits = self._so_far.prefill(tokens, chunk=self._chunk).unsqueeze(1)
            else:
                logits = _all_logits(self.model, self._so_far, tokens, self._chunk)
        context.increment_sequence_len_offset(tokens.size(1))
        return logits


def _all_logits(model: torch.nn.Module, so_far: Decoding, tokens: Tensor, chunk: int | None) -> Tensor:
    """Prefill; logits ``[b, n, vocabulary]`` after every token, on every rank, for the prompt's log-probabilities.
    The hidden states of all ranks are gathered once."""
    layer = get_attr_wrapped_model(model, "output_layer")
    continued, positions, rows, more = layer.forward, [], [], {}

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        positions.append(so_far.rows().long())
        rows.append(hidden)
        more.update(args=args, kwargs=kwargs)
        return continued(hidden, *args, **kwargs)

    layer.forward = forward
    try:
        so_far.prefill(tokens, chunk=chunk)
    finally:
        layer.forward = continued
    mesh = so_far.session.mesh
    with mesh.ledger.phase("prefill"):
        order, hidden = mesh.all_gather("cp", (torch.cat(positions), torch.cat(rows))).wait()
    whole = torch.empty_like(hidden).index_copy_(0, order, hidden)[: tokens.size(1)]
    logits, _ = continued(whole, *more["args"], **more["kwargs"])
    logits = get_attr_wrapped_model(model, "_scale_logits")(logits).transpose(0, 1)
    parallel = get_attr_wrapped_model(model, "parallel_output")
    return gather_from_tensor_model_parallel_region(logits.contiguous()) if parallel else logits


class Controller(TextGenerationController):
    """Megatron's loop over the tokens of a batch. The first tensor- and context-parallel rank broadcasts its sampled
    tokens (8 bytes each), since rounding may differ between devices."""

    def __init__(self, inference_wrapped_model: InferenceWrapper, tokenizer: Any) -> None:
        """ValueError for another wrapper, or a tokenizer without an end of document."""
        wrapper = "" if isinstance(inference_wrapped_model, InferenceWrapper) else _class(inference_wrapped_model)
        without_eod = _class(tokenizer) if getattr(tokenizer, "eod", None) is None else ""
        rules.check_engine(rules.Engine(wrapper=wrapper, tokenizer=without_eod))
        super().__init__(inference_wrapped_model, tokenizer)

    @torch.inference_mode()
    def generate_all_output_tokens_static_batch(
        self,
        active_requests: OrderedDict[int, InferenceRequest],
        active_streams: OrderedDict[str, AsyncStream] | None = None,
    ) -> OrderedDict[int, InferenceRequest]:
        """Complete and return these requests; ValueError, on every rank, if the ranks have different ones."""
        wrapped, requests = self.inference_wrapped_model, list(active_requests.values())
        limits = (wrapped.inference_context.max_batch_size, wrapped.inference_context.max_sequence_length)
        _require_same(requests, self.sampling_rng.initial_seed(), limits)
        longest = max(len(request.prompt_tokens) for request in requests)
        with wrapped.batch(len(requests), longest + requests[0].sampling_params.num_tokens_to_generate):
            return super().generate_all_output_tokens_static_batch(active_requests, active_streams)

    def sample_from_logits(self, *args: Any, **kwargs: Any) -> Tensor:
        """Tokens ``[b]``, the same on every rank."""
        tokens = super().sample_from_logits(*args, **kwargs).contiguous()
        group = parallel_state.get_tensor_and_context_parallel_group()
        if group.size() > 1:
            dist.broadcast(tokens, dist.get_global_rank(group, 0), group=group)
        return tokens

    def generate_output_tokens_dynamic_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: ValueError."""
        rules.check_engine(rules.Engine(dynamic="DynamicInferenceEngine"))

    async_generate_output_tokens_dynamic_batch = generate_output_tokens_dynamic_batch


class StaticEngine(StaticInferenceEngine):
    """Megatron's static engine, which refuses options that Megatron would silently ignore."""

    def __init__(
        self,
        text_generation_controller: Controller,
        max_batch_size: int | None = None,
        random_seed: int | None = None,
        legacy: bool = True,
        buffer_size_gb: float | None = None,
    ) -> None:
        """As in Megatron; ValueError for another controller, or ``legacy=False`` (dynamic batches)."""
        controller = text_generation_controller
        if not isinstance(controller, Controller):
            rules.check_engine(rules.Engine(controller=_class(controller)))
        if not legacy:
            inside = "StaticInferenceEngine(legacy=False), a DynamicInferenceEngine inside,"
            rules.check_engine(rules.Engine(dynamic=inside))
        with _outside_inference_mode():  # Megatron's engine switches it on for the whole process
            super().__init__(controller, max_batch_size, random_seed, legacy=True)
        self.scheduler: CheckedScheduler = CheckedScheduler(self.scheduler.max_batch_size, self.controller)

    def generate(
        self,
        prompts: list[str] | None = None,
        add_BOS: bool = False,
        encoder_prompts: list[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> list[InferenceRequest]:
        """As in Megatron; ValueError for an unsupported request, which leaves none queued."""
        rules.check_engine(rules.Engine(add_bos=add_BOS, encoder_prompt=encoder_prompts is not None))
        with self.scheduler.emptied_on_error():
            return super().generate(prompts, add_BOS, encoder_prompts, *args, **kwargs)

    def run_engine(self) -> None:
        """Answer all queued requests, as in Megatron, but without tqdm's progress bar on every rank."""
        scheduler = self.scheduler
        with scheduler.emptied_on_error():
            while scheduler.have_requests_pending():
                active = scheduler.active_request_pool.copy()
                streams = OrderedDict((n, scheduler.streams[n]) for n in active if n in scheduler.streams)
                done = self.controller.generate_all_output_tokens_static_batch(active, streams)
                scheduler.update_requests_pools(result_dict=done)

    def _wrapped_run_engine(self, cuda_device: int) -> None:
        """``run_engine`` in another thread, which needs to enter CPU mode itself."""
        with OnCpu() if cpu.active() else nullcontext():
            super()._wrapped_run_engine(cuda_device)


class CheckedScheduler(Scheduler):
    """Megatron's queue, which refuses unsupported requests."""

    def __init__(self, max_batch_size: int, controller: Controller) -> None:
        super().__init__(max_batch_size)
        self._controller = controller

    def add_request(self, **request: Any) -> int:
        """As in Megatron, with keywords; ValueError for an unsupported request."""
        given = request.get("inference_request")
        tokens = request.get("prompt_tokens") if given is None else given.prompt_tokens
        params = request.get("sampling_params") if given is None else given.sampling_params
        encoder = request.get("encoder_prompt") if given is None else given.encoder_prompt
        rules.check_engine(rules.Engine(encoder_prompt=encoder is not None))
        queued = [*self.active_request_pool.values(), *self.waiting_request_pool.values()]
        rules.check_request(
            rules.Request(
                params=SamplingParams(num_tokens_to_generate=None) if params is None else params,
                tokens=tokens or (),
                eod=self._controller.tokenizer.eod,
                vocabulary=self._controller.vocab_size,
                limit=self._controller.inference_wrapped_model.inference_context.max_sequence_length,
                queued=[other.sampling_params for other in queued],
            )
        )
        return super().add_request(**request)

    @contextmanager
    def emptied_on_error(self) -> Iterator[None]:
        """If the block fails, mark unfinished requests as failed, end their streams, and empty the queue."""
        try:
            yield
        except BaseException as error:
            for pool in (self.active_request_pool, self.waiting_request_pool):
                for number, request in pool.items():
                    request.status = Status.FAILED
                    self.abort_request(number, exception=error)
                pool.clear()
            raise


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """Run Megatron's models as in training: its inference mode expects its own caches and gathered logits."""
    mode = compat.inference_mode()
    active = mode is not None and mode.is_active()
    if active:
        mode.unset_active()
    try:
        yield
    finally:
        if mode is not None:
            mode.set_active() if active else mode.unset_active()


def _check_model(model: torch.nn.Module) -> None:
    """ValueError for a model that generation does not support, or that is configured for another inference."""
    if isinstance(model, list | tuple):
        rules.check_engine(rules.Engine(models=f"a {_class(model)} of {len(model)}"))
    check(model)
    config = get_model_config(model)
    graphs = getattr(config, "cuda_graph_impl", "none")
    rules.check_engine(rules.Engine(cuda_graphs=graphs, flash_decode=config.flash_decode))


def _check_context(context: BaseInferenceContext) -> None:
    """ValueError for any context but a static one without speculative decoding."""
    if not isinstance(context, StaticInferenceContext):
        rules.check_engine(rules.Engine(dynamic=_class(context)))
    rules.check_engine(rules.Engine(speculative=getattr(context.config, "num_speculative_tokens", None) or 0))


def _require_same(requests: Sequence[InferenceRequest], seed: int, limits: tuple[int, int]) -> None:
    """Compare requests, sampling seed and limits among tensor- and context-parallel ranks; collective.

    Raises:
        ValueError: on every rank, naming the difference.
    """
    group = parallel_state.get_tensor_and_context_parallel_group()
    if group.size() == 1:
        return
    mine = {
        "number of requests": str(len(requests)),
        "seed": str(seed),
        "max_requests, max_sequence_length": str(limits),
    }
    for number, request in enumerate(requests):
        mine[f"prompt {number}"] = hashlib.sha256(repr(list(request.prompt_tokens)).encode()).hexdigest()[:8]
        mine[f"sampling of prompt {number}"] = repr(sorted(vars(request.sampling_params).items()))
    everyone: list[dict[str, str]] = [{}] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    found = agreement.differing(everyone, dist.get_process_group_ranks(group))
    if found:
        raise ValueError(f"the ranks disagree on what to generate: {found[0]}. Make the same request on every rank")


def _class(thing: object) -> str:
    return type(thing).__name__
