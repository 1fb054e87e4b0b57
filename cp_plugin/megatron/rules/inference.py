"""Rules of generation: models that can be decoded, and requests to Megatron's static engine.

The engine silently ignores some fields of ``SamplingParams``; these are refused, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cp_plugin.megatron.rules.rule import Found, Rule, given, refuse, when

if TYPE_CHECKING:
    from megatron.core.inference.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """A model to decode with."""

    stages: int = 1  # pipeline stages
    layers: int = 1  # attention layers with a cache
    sequence_parallel: bool = False
    stateful: str = ""  # layers whose state is not kept between tokens
    converted: bool = False  # attention has another layout than the other layers
    other_attention: str = ""  # an attention class that is neither the plugin's nor Megatron's


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How Megatron's static engine is built and called; the defaults are supported."""

    sizes: Mapping[str, int] = field(default_factory=dict)  # arguments of ``static_engine``
    models: str = ""  # a list of models instead of one
    cuda_graphs: str = "none"
    flash_decode: bool = False
    dynamic: str = ""  # a part of Megatron's dynamic engine
    speculative: int = 0  # speculative tokens
    wrapper: str = ""  # a wrapper that is not the plugin's
    controller: str = ""  # a controller that is not the plugin's
    tokenizer: str = ""  # a tokenizer without an end-of-document token
    add_bos: bool = False
    encoder_prompt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt in the engine's queue."""

    params: SamplingParams
    tokens: Sequence[int]
    eod: int  # the tokenizer's end of document
    vocabulary: int  # token ids of the model
    limit: int  # the engine's ``max_sequence_length``
    queued: Sequence[SamplingParams] = ()  # of the requests in the same batch


def _size(engine: Engine) -> Found:
    return next(({"name": name, "size": size} for name, size in engine.sizes.items() if size < 1), None)


def _new(request: Request) -> int:
    """Tokens to generate; -1: not specified."""
    new = request.params.num_tokens_to_generate
    return new if isinstance(new, int) else -1


def _ignored(name: str, fine: Any, fix: str) -> Rule:
    """Refuse a field of ``SamplingParams`` that the engine ignores, unless ``fine(request)``."""
    return Rule(
        name=f"ignored {name}",
        what=f"SamplingParams.{name}={{found!r}} has no effect in Megatron's static engine",
        fix=fix,
        looks_at=lambda request: when(not fine(request), found=getattr(request.params, name)),
    )


def _sampled(name: str, fine: Any, fix: str) -> Rule:
    """Refuse a field of ``SamplingParams`` unless ``fine(value, vocabulary)``."""

    def looks_at(request: Request) -> Found:
        found = getattr(request.params, name)
        return when(not fine(found, request.vocabulary), found=found, last=request.vocabulary - 1)

    what = f"SamplingParams.{name}={{found!r}}"
    return Rule(name=f"value of {name}", what=what, fix=fix, looks_at=looks_at)


def _foreign(request: Request) -> Found:
    wrong = [token for token in request.tokens if not 0 <= token < request.vocabulary]
    return when(wrong, token=wrong[0] if wrong else 0, vocabulary=request.vocabulary)


def _too_long(request: Request) -> Found:
    tokens, new = len(request.tokens), max(0, _new(request))
    return when(tokens + new > request.limit, tokens=tokens, new=new, both=tokens + new, limit=request.limit)


def _unlike(request: Request) -> Found:
    for other in request.queued:
        names = [name for name, value in vars(request.params).items() if getattr(other, name, None) != value]
        if names:
            return {"names": ", ".join(names)}
    return None


CONTINUED = (
    Rule(
        name="pipeline stages of a generation",
        what="generation runs on one pipeline stage, got --pipeline-model-parallel-size {stages}",
        fix="use 1; a torch_dist checkpoint can be loaded with any number of stages",
        looks_at=lambda model: when(model.stages > 1, stages=model.stages),
    ),
    Rule(
        name="attention of a generation",
        what="generation supports none of this model's attention layers",
        fix="use --transformer-impl local",
        looks_at=lambda model: when(model.layers == 0),
    ),
    Rule(
        name="sequence parallelism of a generation",
        what="generation runs without --sequence-parallel",
        why="it would split single tokens",
        fix="leave it out",
        looks_at=given("sequence_parallel"),
    ),
    Rule(
        name="states of a generation",
        what="generation cannot continue {stateful}",
        why="the plugin does not keep their state between tokens",
        fix="use a model without them",
        looks_at=given("stateful"),
    ),
    Rule(
        name="layouts of a generation",
        what="generation runs without --linear-cp-layout contiguous",
        why="it shards a prompt in attention's layout",
        fix="leave it out",
        looks_at=given("converted"),
    ),
    Rule(
        name="other attention of a generation",
        what="generation cannot continue {other_attention}",
        fix="use --transformer-impl local, or two or more context-parallel ranks with --cp-provider",
        looks_at=given("other_attention"),
    ),
)
ENGINE = (
    Rule(
        name="sizes of the engine",
        what="static_engine({name}={size})",
        fix="it must be 1 or more",
        looks_at=_size,
    ),
    Rule(
        name="several models",
        what="static_engine() takes one model, got {models}",
        fix="give it the first of what Megatron's get_model() returns",
        looks_at=given("models"),
    ),
    Rule(
        name="CUDA graphs of the engine",
        what="--cuda-graph-impl {graphs} is not supported in generation with context parallelism",
        why="its cache grows, and its communication cannot be captured",
        fix="use --cuda-graph-impl none",
        looks_at=lambda engine: when(engine.cuda_graphs != "none", graphs=engine.cuda_graphs),
    ),
    Rule(
        name="flash decode",
        what="--flash-decode reads Megatron's own cache, which holds whole sequences",
        fix="leave it out: the plugin decodes from its own, sharded cache",
        looks_at=given("flash_decode"),
    ),
    Rule(
        name="the dynamic engine",
        what="{dynamic} is not supported with context parallelism",
        why="its paged cache, chunked prefill and data-parallel coordinator need whole sequences on one rank",
        fix="use StaticInferenceContext with cp_plugin.megatron.inference.engine.static_engine()",
        looks_at=given("dynamic"),
    ),
    Rule(
        name="speculative decoding",
        what="--num-speculative-tokens {speculative} is not supported with context parallelism",
        why="rejected tokens would have to be removed from a sharded cache",
        fix="use 0; inference skips the model's layers for multi-token prediction",
        looks_at=given("speculative"),
    ),
    Rule(
        name="wrapper of the engine",
        what="Controller runs cp_plugin.megatron.inference.engine.InferenceWrapper, got {wrapper}, which does not "
        "support context parallelism",
        fix="use static_engine(), or InferenceWrapper",
        looks_at=given("wrapper"),
    ),
    Rule(
        name="tokenizer of the engine",
        what="the tokenizer {tokenizer} has no end-of-document token (eod), with which Megatron pads a batch",
        fix="use one that has it",
        looks_at=given("tokenizer"),
    ),
    Rule(
        name="controller of the engine",
        what="StaticEngine runs cp_plugin.megatron.inference.engine.Controller, got {controller}",
        fix="use static_engine(), which creates one",
        looks_at=given("controller"),
    ),
    Rule(
        name="add_BOS of generate",
        what="generate(add_BOS=True) has no effect in Megatron's static engine",
        fix="queue each prompt with add_request(prompt, add_BOS=True, sampling_params=...) and call run_engine()",
        looks_at=given("add_bos"),
    ),
    Rule(
        name="encoder prompts",
        what="encoder prompts apply only to encoder-decoder models",
        fix="leave encoder_prompt and encoder_prompts out",
        looks_at=given("encoder_prompt"),
    ),
)
REQUEST = (
    Rule(
        name="number of new tokens",
        what="SamplingParams.num_tokens_to_generate is {new}",
        fix="Megatron's static engine needs 0 or more",
        looks_at=lambda request: when(_new(request) < 0, new=request.params.num_tokens_to_generate),
    ),
    _ignored("num_tokens_total", lambda request: request.params.num_tokens_total is None, "use num_tokens_to_generate"),
    _ignored(
        "stop_words",
        lambda request: not request.params.stop_words,
        "it stops only at the tokenizer's end of document; truncate the text yourself",
    ),
    _ignored("termination_id", lambda request: request.params.termination_id in (None, request.eod), "leave it out"),
    _ignored(
        "add_BOS",
        lambda request: not request.params.add_BOS,
        "use add_request(prompt, add_BOS=True, sampling_params=...)",
    ),
    _sampled(
        "top_k",
        lambda k, vocabulary: isinstance(k, int) and 0 <= k < vocabulary,
        "an int from 0 (no limit) to {last}",
    ),
    _sampled("top_p", lambda p, _: isinstance(p, float) and 0.0 <= p <= 1.0, "a float from 0.0 (no limit) to 1.0"),
    Rule(
        name="top_k and top_p",
        what="SamplingParams.top_k={k} and top_p={p}",
        fix="set only one of them",
        looks_at=lambda request: when(
            request.params.top_k and request.params.top_p, k=request.params.top_k, p=request.params.top_p
        ),
    ),
    _sampled("temperature", lambda temperature, _: temperature > 0.0, "above 0; top_k=1 takes the likeliest token"),
    Rule(
        name="empty prompt",
        what="a prompt is empty",
        fix="give each request at least one token",
        looks_at=lambda request: when(not request.tokens),
    ),
    Rule(
        name="tokens of a prompt",
        what="a prompt has token {token}, which is not in the model's vocabulary of {vocabulary}",
        fix="use the tokenizer that the model was trained with",
        looks_at=_foreign,
    ),
    Rule(
        name="length of a prompt",
        what="a prompt of {tokens} tokens plus {new} new ones makes {both}, more than max_sequence_length {limit}",
        fix="raise it, or generate fewer tokens",
        looks_at=_too_long,
    ),
    Rule(
        name="requests of one queue",
        what="SamplingParams differ in {names} between queued requests, and Megatron's static engine would use the "
        "first for all",
        fix="run the queued ones first, then queue the others",
        looks_at=_unlike,
    ),
)


def check_continued(model: Continued) -> None:
    """ValueError for a model that generation does not support."""
    refuse(CONTINUED, model)


def check_engine(engine: Engine) -> None:
    """ValueError for uses of Megatron's static engine that are unsupported or ignored."""
    refuse(ENGINE, engine)


def check_request(request: Request) -> None:
    """ValueError for a request that cannot be answered as asked."""
    refuse(REQUEST, request)
