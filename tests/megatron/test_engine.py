"""Megatron's static inference engine under context parallelism: answers of one rank, or a refusal."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nightly import one_case, slow
from test_decoding import with_model

pytestmark = pytest.mark.usefixtures("adapter")

NEW, LIMIT = 16, 64
PROMPTS = ("5 17 99 3 62", "7 7 21 80 4 91 33 2 118 64 10 56", "88 1 44")
GREEDY = {"num_tokens_to_generate": NEW, "top_k": 1, "return_log_probs": True, "no_early_termination": True}
SAMPLED = {"num_tokens_to_generate": NEW, "top_k": 20, "temperature": 1.3, "no_early_termination": True}


class Numbers:
    """A tokenizer of numbers. Megatron's NullTokenizer lacks the ``bos`` that its controller reads."""

    def __init__(self, eod: int = 126) -> None:
        self.eod, self.bos = eod, None

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def params(**values: Any) -> Any:
    from megatron.core.inference.sampling_params import SamplingParams

    made = SamplingParams()
    made.add_attributes(values)
    return made


def engine_for(model: torch.nn.Module, **values: Any) -> Any:
    from cp_plugin.megatron.inference.engine import static_engine

    values = {"tokenizer": Numbers(), "max_requests": 3, "max_sequence_length": LIMIT, **values}
    return static_engine(model, **values)


def told(requests: Any) -> list[dict[str, Any]]:
    """The parts of finished requests that tests compare."""
    names = ("generated_text", "text", "prompt_log_probs", "generated_log_probs", "generated_top_n_logprobs")
    return [
        {"tokens": request.generated_tokens.tolist(), **{name: getattr(request, name) for name in names}}
        for request in requests
    ]


def by_megatron(model: torch.nn.Module) -> dict[str, Any]:
    """Megatron's own wrapper and controller on one rank, with its own cache."""
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.inference_request import InferenceRequest
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.text_generation_controllers import text_generation_controller
    from megatron.core.inference.utils import InferenceMode

    def answered(values: dict[str, Any]) -> list[dict[str, Any]]:
        wrapped = GPTInferenceWrapper(model, StaticInferenceContext(3, LIMIT))
        controller = text_generation_controller.TextGenerationController(wrapped, Numbers())
        requests = OrderedDict()
        for number, prompt in enumerate(PROMPTS):
            tokens = controller.tokenize_prompt(controller.tokenizer, prompt)
            requests[number] = InferenceRequest(
                request_id=number, prompt=prompt, prompt_tokens=tokens, sampling_params=params(**values)
            )
        with InferenceMode.active():
            return told(controller.generate_all_output_tokens_static_batch(requests).values())

    return {"sampled": answered(SAMPLED), "top": answered({**GREEDY, "top_n_logprobs": 2})}


def by_the_engine(model: torch.nn.Module) -> dict[str, Any]:
    """Answers of the engine, on one rank of those that it runs on."""
    found = {}
    for name, values in (("sampled", SAMPLED), ("top", {**GREEDY, "top_n_logprobs": 2})):
        found[name] = told(engine_for(model).generate(list(PROMPTS), sampling_params=params(**values)))
    return found


def by_the_engine_in_all_ways(model: torch.nn.Module) -> dict[str, Any]:
    """The same, and its other features; afterwards model and Megatron's inference mode are as before."""
    from megatron.core.inference.utils import InferenceMode

    prompts, before = list(PROMPTS), {name: set(vars(module)) for name, module in model.named_modules()}
    found = by_the_engine(model)
    assert not InferenceMode.is_active()
    with InferenceMode.active():  # as another engine of Megatron's leaves it
        chunked = engine_for(model, max_requests=2, prefill_chunk=2)  # two batches, of another composition
        found["chunks"] = told(chunked.generate(prompts, sampling_params=params(**GREEDY)))
        assert InferenceMode.is_active()
    found["streamed"] = asyncio.run(streamed(engine_for(model)))
    found["ended"] = told(ended(model, found["top"][0]["tokens"][5]))
    nothing_new = params(**{**GREEDY, "num_tokens_to_generate": 0})
    found["prompts alone"] = told(engine_for(model).generate(prompts, sampling_params=nothing_new))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    return found


async def streamed(engine: Any) -> list[str]:
    """The last text of each prompt's stream."""

    async def last(stream: Any) -> str:
        return [part.generated_text async for part in stream][-1]

    numbers = [engine.add_request(prompt, sampling_params=params(**GREEDY), streaming=True) for prompt in PROMPTS]
    tasks = [asyncio.create_task(last(engine.get_stream_generator(number))) for number in numbers]
    await engine.run_engine_async()
    return await asyncio.gather(*tasks)


def ended(model: torch.nn.Module, eod: int) -> Any:
    engine = engine_for(model, tokenizer=Numbers(eod))
    return engine.generate(list(PROMPTS), sampling_params=params(num_tokens_to_generate=NEW, top_k=1))


def differently_drawn(model: torch.nn.Module) -> list[list[int]]:
    """Sampled tokens where the ranks' generators differ from the second token on."""
    engine, rank = engine_for(model), torch.distributed.get_rank()
    draw = engine.controller.sample_from_logits

    def sample_from_logits(*args: Any, **kwargs: Any) -> torch.Tensor:
        tokens = draw(*args, **kwargs)
        engine.controller.sampling_rng.manual_seed(rank)
        return tokens

    engine.controller.sample_from_logits = sample_from_logits
    return [one["tokens"] for one in told(engine.generate(list(PROMPTS), sampling_params=params(**SAMPLED)))]


def refusals(model: torch.nn.Module) -> None:
    """Each way to a rule, of which ``test_generation_refusals`` has all; the engine then answers the next request."""
    from megatron.core.inference.contexts import DynamicInferenceContext, StaticInferenceContext
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

    from cp_plugin.megatron.inference.engine import Controller, InferenceWrapper, StaticEngine

    engine, rank = engine_for(model), torch.distributed.get_rank()
    static, speculative = StaticInferenceContext(3, LIMIT), StaticInferenceContext(3, LIMIT)
    speculative.config.num_speculative_tokens = 2
    dynamic = object.__new__(DynamicInferenceContext)
    stock = TextGenerationController(InferenceWrapper(model, static), Numbers())
    request = SimpleNamespace(prompt_tokens=[1, 2], sampling_params=params(**GREEDY), prompt="1 2")

    def ask(prompts: list[str], **values: Any) -> Callable[[], Any]:
        return lambda: engine.generate(prompts, sampling_params=params(**{**GREEDY, **values}))

    def mixed() -> None:
        engine.add_request("1 2", sampling_params=params(**GREEDY))
        engine.generate(["1 2"], sampling_params=params(**SAMPLED))

    asked: list[tuple[str, Callable[[], Any]]] = [
        ("takes one model, got a list of 1", lambda: engine_for([model])),
        ("--cuda-graph-impl local is not supported", configured(model, cuda_graph_impl="local")),
        ("--flash-decode reads Megatron's own cache", configured(model, flash_decode=True)),
        ("max_requests=0", lambda: engine_for(model, max_requests=0)),
        ("DynamicInferenceContext is not supported", lambda: InferenceWrapper(model, dynamic)),
        (
            "DynamicInferenceContext is not supported",
            lambda: setattr(engine.controller.inference_wrapped_model, "inference_context", dynamic),
        ),
        ("DynamicInferenceEngine is not supported", lambda: engine.controller.generate_output_tokens_dynamic_batch()),
        (
            "StaticInferenceEngine(legacy=False), a DynamicInferenceEngine inside, is not supported",
            lambda: StaticEngine(engine.controller, legacy=False),
        ),
        ("--num-speculative-tokens 2 is not supported", lambda: InferenceWrapper(model, speculative)),
        (
            "got GPTInferenceWrapper, which does not support context parallelism",
            lambda: Controller(GPTInferenceWrapper(model, static), Numbers()),
        ),
        ("got TextGenerationController: use static_engine()", lambda: StaticEngine(stock)),
        (
            "instead of Megatron's TextGenerationController",
            lambda: stock.generate_all_output_tokens_static_batch(OrderedDict({0: request})),
        ),
        ("the tokenizer Numbers has no end-of-document token", lambda: engine_for(model, tokenizer=Numbers(None))),
        ("num_tokens_to_generate is None", ask(["1 2"], num_tokens_to_generate=None)),
        ("SamplingParams.num_tokens_total=9 has no effect", ask(["1 2"], num_tokens_total=9)),
        (
            "generate(add_BOS=True) has no effect",
            lambda: engine.generate(["1 2"], True, sampling_params=params(**GREEDY)),
        ),
        (
            "encoder prompts apply only to encoder-decoder models",
            lambda: engine.generate(["1 2"], False, ["3"], sampling_params=params(**GREEDY)),
        ),
        ("top_k=128: an int from 0 (no limit) to 127", ask(["1 2"], top_k=128)),
        ("a prompt has token 128, which is not in the model's vocabulary of 128", ask(["1 2", "3 128"])),
        ("a prompt of 49 tokens plus 16 new ones makes 65, more than max_sequence_length 64", ask(["1 " * 49])),
        ("SamplingParams differ in temperature, top_k, return_log_probs", mixed),
        ("prompt 0 is", ask([f"1 {rank}"])),
        ("number of requests is 1 on rank 0 and 2 on rank 1", ask(["1 2"] * (1 + rank))),
        ("seed is 0 on rank 0 and 1 on rank 1", configured(model, inference_sampling_seed=rank)),
    ]
    for said, attempt in asked:
        with pytest.raises(ValueError, match=re.escape(said)):
            attempt()
        assert not engine.scheduler.have_requests_pending()
    engine.generate(["1 2"], sampling_params=params(**GREEDY))


def configured(model: torch.nn.Module, **values: Any) -> Callable[[], Any]:
    """An engine's answer with a changed model configuration."""

    def attempt() -> None:
        from megatron.core.utils import get_model_config

        configs = [get_model_config(model), *(m.config for m in model.modules() if hasattr(m, "config"))]
        before = [(config, {name: getattr(config, name) for name in values}) for config in configs]
        try:
            for config in configs:
                vars(config).update(values)
            engine_for(model).generate(["1 2"], sampling_params=params(**GREEDY))
        finally:
            for config, own in reversed(before):
                vars(config).update(own)

    return attempt


@cache
def megatron_on_one_rank() -> dict[str, Any]:
    """Its answers; on the same model the plugin's engine must give them, too."""

    def both(model: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        return by_megatron(model), by_the_engine(model)

    wanted, found = with_model(both, "")[0]
    check(found, wanted)
    return wanted


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """One rank's answers are Megatron's: the same tokens and texts, log-probabilities within rounding."""
    greedy = wanted["top"]
    for name in found.keys() & {"sampled", "top", "chunks"}:
        for ours, megatron in zip(found[name], wanted["sampled"] if name == "sampled" else greedy, strict=True):
            assert ours["tokens"] == megatron["tokens"] and len(ours["tokens"]) == NEW, name
            assert (ours["text"], ours["generated_text"]) == (megatron["text"], megatron["generated_text"])
            if name != "sampled":
                for kind in ("prompt_log_probs", "generated_log_probs"):
                    assert ours[kind] == pytest.approx(megatron[kind], rel=1e-5), (name, kind)
    for ours, megatron in zip(found["top"], greedy, strict=True):
        assert len(ours["generated_top_n_logprobs"]) == NEW
        for mine, its in zip(ours["generated_top_n_logprobs"], megatron["generated_top_n_logprobs"], strict=True):
            assert len(mine) == 2 and mine == pytest.approx(its, rel=1e-5)


def check_all_ways(found: dict[str, Any], greedy: list[dict[str, Any]]) -> None:
    """Streams end with the text, generation ends at the end of document, and prompts can be scored alone."""
    assert found["streamed"] == [answer["generated_text"].strip() for answer in greedy]
    end = greedy[0]["tokens"][5]
    for cut, alone, megatron in zip(found["ended"], found["prompts alone"], greedy, strict=True):
        tokens = megatron["tokens"]
        assert cut["tokens"] == (tokens[: tokens.index(end)] if end in tokens else tokens)
        assert alone["tokens"] == [] and len(megatron["prompt_log_probs"]) >= 2
        assert alone["prompt_log_probs"] == pytest.approx(megatron["prompt_log_probs"], rel=1e-5)


@slow
def test_all_features_match_megatron_on_one_rank() -> None:
    wanted = megatron_on_one_rank()
    found = with_model(by_the_engine_in_all_ways, "--context-parallel-size 2 --cp-provider striped", 2)
    check(found[0], wanted)
    check_all_ways(found[0], wanted["top"])
    assert found[1] == found[0]


@one_case
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [(2, "--cp-provider attention2d"), (2, "--cp-provider burst"), (4, "--cp-provider usp")],
)
def test_providers_match_megatron_on_one_rank(ranks: int, flags: str) -> None:
    found = with_model(by_the_engine, f"--context-parallel-size {ranks} {flags}", ranks)
    check(found[0], megatron_on_one_rank())
    assert all(rank == found[0] for rank in found)


def test_all_ranks_take_the_same_token_whatever_they_would_draw() -> None:
    flags = "--context-parallel-size 2 --cp-provider ring --tensor-model-parallel-size 2"
    found = with_model(differently_drawn, flags, 4)
    assert all(rank == found[0] and [len(tokens) for tokens in rank] == [NEW] * 3 for rank in found)


def test_refusals() -> None:
    with_model(refusals, "--context-parallel-size 2 --cp-provider striped", 2)
