"""What Megatron's static inference engine is refused for under the plugin, before it starts, and why.

Its static loop drops some fields of ``SamplingParams`` without a word; these are refused, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.contexts import BaseInferenceContext, StaticInferenceContext
from megatron.core.inference.inference_request import InferenceRequest
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.utils import get_model_config

from cp_plugin.megatron.rules import decoding_checks
from cp_plugin.megatron.startup import agreement


def no_dynamic(name: str) -> str:
    """Why ``name``, a part of Megatron's dynamic engine, is refused."""
    return (
        f"{name} is not supported with context parallelism: its blocks of keys and values, its chunks and its "
        "data-parallel coordinator know whole sequences on one rank only. Use StaticInferenceContext with "
        "cp_plugin.megatron.inference.engine.static_engine()"
    )


def check_sizes(max_requests: int, max_sequence_length: int, prefill_chunk: int | None) -> None:
    """ValueError for sizes below 1."""
    sizes = {
        "max_requests": max_requests,
        "max_sequence_length": max_sequence_length,
        "prefill_chunk": 1 if prefill_chunk is None else prefill_chunk,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"static_engine({name}={size}): it must be 1 or more")


def check_model(model: torch.nn.Module) -> None:
    """ValueError for a model that generation cannot run, or that is set up for another way of inference."""
    if isinstance(model, list | tuple):
        raise ValueError(
            f"static_engine() takes one model, got a {type(model).__name__} of {len(model)}: give it the first of what "
            "Megatron's get_model() returns"
        )
    decoding_checks.check(model)
    config = get_model_config(model)
    graphs = getattr(config, "cuda_graph_impl", "none")
    if graphs != "none":
        raise ValueError(
            f"generation with context parallelism runs without CUDA graphs, for its cache grows and its messages are "
            f"not captured: got --cuda-graph-impl {graphs}, use none"
        )
    if config.flash_decode:
        raise ValueError(
            "--flash-decode reads Megatron's own cache, which holds whole sequences: leave it out, the plugin decodes "
            "from its divided cache"
        )


def check_context(context: BaseInferenceContext) -> None:
    """ValueError for any context but a static one without speculative decoding."""
    if not isinstance(context, StaticInferenceContext):
        raise ValueError(no_dynamic(type(context).__name__))
    speculative = getattr(context.config, "num_speculative_tokens", 0)
    if speculative:
        raise ValueError(
            f"speculative decoding is not supported with context parallelism: got --num-speculative-tokens "
            f"{speculative}, use 0; layers for multi-token prediction in the model are left out of inference"
        )


def check_parts(wrapped: object, wanted: type, tokenizer: Any) -> None:
    """ValueError for Megatron's own wrapper of the model, or a tokenizer without an end of document."""
    if not isinstance(wrapped, wanted):
        raise ValueError(
            f"Controller runs cp_plugin.megatron.inference.engine.InferenceWrapper, got {type(wrapped).__name__}, "
            "which knows no context parallelism"
        )
    if getattr(tokenizer, "eod", None) is None:
        raise ValueError(
            f"the tokenizer {type(tokenizer).__name__} has no end-of-document token (eod), with which Megatron pads a "
            "batch: use one that has"
        )


def check_engine(controller: object, wanted: type, legacy: bool) -> None:
    """ValueError for Megatron's own controller, or an engine that is a dynamic one inside."""
    if not isinstance(controller, wanted):
        raise ValueError(
            f"StaticEngine runs cp_plugin.megatron.inference.engine.Controller, got {type(controller).__name__}: use "
            "static_engine(), which makes one"
        )
    if not legacy:
        raise ValueError(no_dynamic("StaticInferenceEngine(legacy=False), a DynamicInferenceEngine inside,"))


def check_generate(add_bos: bool, encoder_prompt: object) -> None:
    """ValueError for arguments that Megatron's static engine would ignore."""
    if add_bos:
        raise ValueError(
            "generate(add_BOS=True) has no effect in Megatron's static engine: queue each prompt with "
            "add_request(prompt, add_BOS=True, sampling_params=...) and call run_engine()"
        )
    if encoder_prompt is not None:
        raise ValueError("encoder prompts are for encoder-decoder models: leave encoder_prompt and encoder_prompts out")


def check_prompt(tokens: Sequence[int] | None, vocabulary: int) -> None:
    """ValueError for a prompt without tokens, or with some that are not in the model's vocabulary."""
    if not tokens:
        raise ValueError("a prompt is empty: give each request at least one token")
    wrong = [token for token in tokens if not 0 <= token < vocabulary]
    if wrong:
        raise ValueError(
            f"a prompt has token {wrong[0]}, which is not in the model's vocabulary of {vocabulary}: use the tokenizer "
            "of the training"
        )


def check_length(tokens: int, params: SamplingParams, limit: int) -> None:
    """ValueError for a prompt that is too long with its continuation."""
    new = params.num_tokens_to_generate
    if tokens + new > limit:
        raise ValueError(
            f"a prompt of {tokens} tokens and {new} new ones are {tokens + new}, more than max_sequence_length "
            f"{limit}: raise it, or ask for less"
        )


def check_sampling(params: SamplingParams | None, tokenizer: Any, vocabulary: int) -> None:
    """ValueError for what the static loop cannot do, or would ignore; the message names the field."""
    new = None if params is None else params.num_tokens_to_generate
    if params is None or not isinstance(new, int) or new < 0:
        raise ValueError(
            f"SamplingParams.num_tokens_to_generate is {new}: Megatron's static engine needs a number of 0 or more"
        )
    ignored = {
        "num_tokens_total": (params.num_tokens_total is None, "use num_tokens_to_generate"),
        "stop_words": (not params.stop_words, "it stops at the tokenizer's end of document alone; cut the text"),
        "termination_id": (params.termination_id in (None, tokenizer.eod), "leave it out"),
        "add_BOS": (not params.add_BOS, "use add_request(prompt, add_BOS=True, sampling_params=...)"),
    }
    for name, (fine, fix) in ignored.items():
        if not fine:
            raise ValueError(
                f"SamplingParams.{name}={getattr(params, name)!r} has no effect in Megatron's static engine: {fix}"
            )
    if not (isinstance(params.top_k, int) and 0 <= params.top_k < vocabulary):
        raise ValueError(f"SamplingParams.top_k={params.top_k!r}: an int from 0 (no limit) to {vocabulary - 1}")
    if not (isinstance(params.top_p, float) and 0.0 <= params.top_p <= 1.0):
        raise ValueError(f"SamplingParams.top_p={params.top_p!r}: a float from 0.0 (no limit) to 1.0")
    if params.top_k and params.top_p:
        raise ValueError(f"SamplingParams.top_k={params.top_k} and top_p={params.top_p}: give one of them")
    if not params.temperature > 0.0:
        raise ValueError(f"SamplingParams.temperature={params.temperature}: above 0; top_k=1 takes the likeliest token")


def check_alike(params: SamplingParams, others: Sequence[SamplingParams]) -> None:
    """ValueError where requests of one queue are to be sampled differently."""
    for other in others:
        different = [name for name, value in vars(params).items() if getattr(other, name, None) != value]
        if different:
            raise ValueError(
                f"SamplingParams differ in {', '.join(different)} between queued requests, and Megatron's static "
                "engine would use the first for all: run these first, and queue the others then"
            )


def require_same(requests: Sequence[InferenceRequest], seed: int, limits: tuple[int, int]) -> None:
    """Compare what the tensor- and context-parallel ranks that answer together were asked; collective.

    Args:
        requests: of this batch.
        seed: of the generator that samples.
        limits: the context's largest batch and sequence length.

    Raises:
        ValueError: on every one of these ranks, naming what differs and who has what.
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
        raise ValueError(f"the ranks disagree on what to generate: {found[0]}. Ask the same on every rank")
