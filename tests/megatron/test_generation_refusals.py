"""The rules of generation: every rule refuses its example, in a message that names value and fix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rule_examples import Example, check, example

from cp_plugin.megatron.rules import inference

pytestmark = pytest.mark.usefixtures("adapter")
MODELS = {
    "pipeline stages of a generation": example("--pipeline-model-parallel-size 2", stages=2),
    "attention of a generation": example("none of this model's attention layers", layers=0),
    "sequence parallelism of a generation": example("--sequence-parallel", sequence_parallel=True),
    "states of a generation": example("Mamba layers (M)", stateful="Mamba layers (M)"),
    "layouts of a generation": example("--linear-cp-layout contiguous", converted=True),
    "other attention of a generation": example("TEDotProductAttention", other_attention="TEDotProductAttention"),
}
ENGINES = {
    "sizes of the engine": example("static_engine(max_requests=0)", sizes={"max_requests": 0}),
    "several models": example("got a list of 2", models="a list of 2"),
    "CUDA graphs of the engine": example("--cuda-graph-impl local", cuda_graphs="local"),
    "flash decode": example("--flash-decode", flash_decode=True),
    "the dynamic engine": example("DynamicInferenceContext", dynamic="DynamicInferenceContext"),
    "speculative decoding": example("--num-speculative-tokens 2", speculative=2),
    "wrapper of the engine": example("got GPTInferenceWrapper", wrapper="GPTInferenceWrapper"),
    "tokenizer of the engine": example("the tokenizer Numbers", tokenizer="Numbers"),
    "controller of the engine": example("TextGenerationController", controller="TextGenerationController"),
    "add_BOS of generate": example("generate(add_BOS=True)", add_bos=True),
    "encoder prompts": example("encoder prompts", encoder_prompt=True),
}
PARAMS = {
    "num_tokens_to_generate": 4,
    "num_tokens_total": None,
    "stop_words": None,
    "termination_id": None,
    "add_BOS": False,
    "top_k": 1,
    "top_p": 0.0,
    "temperature": 1.0,
}
"""A request to which no rule applies."""
REQUESTS = {
    "number of new tokens": example("num_tokens_to_generate is None", num_tokens_to_generate=None),
    "ignored num_tokens_total": example("SamplingParams.num_tokens_total=9", num_tokens_total=9),
    "ignored stop_words": example("SamplingParams.stop_words=['3']", stop_words=["3"]),
    "ignored termination_id": example("SamplingParams.termination_id=4", termination_id=4),
    "ignored add_BOS": example("SamplingParams.add_BOS=True", add_BOS=True),
    "value of top_k": example("SamplingParams.top_k=128: an int from 0 (no limit) to 127", top_k=128),
    "value of top_p": example("SamplingParams.top_p=1.5", top_k=0, top_p=1.5),
    "top_k and top_p": example("SamplingParams.top_k=1 and top_p=0.5", top_p=0.5),
    "value of temperature": example("SamplingParams.temperature=0.0", temperature=0.0),
    "empty prompt": example("a prompt is empty", tokens=()),
    "tokens of a prompt": example("token 128, which is not in the model's vocabulary of 128", tokens=(1, 128)),
    "length of a prompt": example(
        "14 tokens plus 4 new ones makes 18, more than max_sequence_length 16", tokens=(1,) * 14
    ),
    "requests of one queue": example("differ in top_k", queued=[SimpleNamespace(**PARAMS | {"top_k": 2})]),
}


def request_of(given: Example) -> inference.Request:
    values = dict(given.args)
    sampling = SimpleNamespace(**{name: values.pop(name, usual) for name, usual in PARAMS.items()})
    plain = {"params": sampling, "tokens": (1, 2), "eod": 0, "vocabulary": 128, "limit": 16}
    return inference.Request(**plain | values)


SUBJECTS = (
    (inference.CONTINUED, MODELS, lambda given: inference.Continued(**given.args)),
    (inference.ENGINE, ENGINES, lambda given: inference.Engine(**given.args)),
    (inference.REQUEST, REQUESTS, request_of),
)


@pytest.mark.parametrize(("rules", "examples", "subject"), SUBJECTS)
def test_rules_of_generation(rules: Any, examples: dict[str, Example], subject: Any) -> None:
    for rule in rules:
        assert rule.of(subject(example(""))) is None
        check(rule, rule.of(subject(examples[rule.name])), examples[rule.name].names)


def test_all_problems_of_a_request_in_one_message() -> None:
    wrong = request_of(example("", tokens=(1, 128), stop_words=["3"], temperature=0.0))
    with pytest.raises(ValueError) as raised:
        inference.check_request(wrong)
    told = ["SamplingParams.stop_words", "SamplingParams.temperature", "a prompt has token 128"]
    parts = str(raised.value).split(" | ")
    assert [part[: len(name)] for part, name in zip(parts, told, strict=True)] == told
