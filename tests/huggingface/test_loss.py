"""The ranks' losses add up to the loss of one rank, or the head is refused by name; losses of one's own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import compare, config_of, model_of, needs_transformers, refusal, run_on_ranks, tokens, train, transformers
from torch.nn.functional import cross_entropy

from cp_plugin import ContextParallel, huggingface
from cp_plugin.testing.launch import RankError

pytestmark = needs_transformers


@pytest.mark.parametrize("name", ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"])
def test_other_heads_are_refused_by_name(name: str) -> None:
    text = refusal(getattr(transformers, f"Llama{name}")(config_of("llama")))
    assert f"Llama{name}: its loss is not the mean cross entropy of the next tokens" in text, text


def test_a_model_without_a_head_has_no_loss_to_check() -> None:
    model = transformers.AutoModel.from_config(config_of("llama"))

    def rank(cp: ContextParallel) -> torch.Tensor:
        huggingface.apply(model, cp)
        batch = huggingface.shard(cp, tokens())
        inputs = {key: batch[key] for key in ("input_ids", "position_ids")}
        return cp.unshard(model(**inputs).last_hidden_state, 1).detach()

    want = model(input_ids=tokens()).last_hidden_state
    for got in run_on_ranks(rank):
        assert torch.allclose(got, want, atol=1e-5)


def fused(follows: bool) -> Callable[..., Any]:
    """A forward as Liger's: training makes no logits. Its older ones shifted the labels of shards once more."""

    def forward(self: Any, input_ids: Any = None, labels: Any = None, *, shift_labels: Any = None, **named: Any) -> Any:
        items = named.pop("num_items_in_batch", None)
        logits = self.lm_head(self.model(input_ids, shift_labels=shift_labels, **named)[0])
        following = shift_labels if follows or not self.training else None
        loss = None if labels is None else self.loss_function(logits, labels, 97, items, shift_labels=following)
        return transformers.modeling_outputs.CausalLMOutputWithPast(
            loss=loss, logits=None if self.training and labels is not None else logits
        )

    return forward


@pytest.mark.parametrize("when", ["before", "after", "after, rows", "shifting"])
def test_a_loss_that_is_fused_with_the_head(when: str) -> None:
    """Kind: a forward that is set on the instance is honoured. Refused for want of logits; set after ``apply``, it took
    the blame of label smoothing."""
    one = train(model_of("llama"), {"input_ids": tokens(), "labels": tokens()})

    def rank(cp: ContextParallel) -> float | str:
        model = model_of("llama")
        rows = huggingface.Collator(cp)([{"input_ids": tokens()[cp.index]}]) | {"num_items_in_batch": 126}
        batch = rows if "rows" in when else huggingface.shard(cp, tokens())
        forward = MethodType(fused(when != "shifting"), model)
        try:
            if "after" not in when:
                model.forward = forward
            huggingface.apply(model, cp)
            model.forward = forward if "after" in when else model.forward
            return compare(model, batch, one)
        except ValueError as error:
            return str(error)

    for got in run_on_ranks(rank):
        if when == "after":
            assert "forward of LlamaForCausalLM was replaced after huggingface.apply" in got, got
        elif when == "shifting":
            assert "its loss is not the mean cross entropy" in got, got
        else:
            assert got <= 1e-5, got


@pytest.mark.parametrize("how", ["config before", "config after", "argument"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_router_losses_are_refused_at_each_call(kind: str, how: str) -> None:
    """Kind: settings that are read once, and changed later. The balance loss was summed over ranks, each of local
    statistics (Megatron-LM 5696 and prime-rl 2828 have the same)."""
    model = model_of(kind)

    def rank(cp: ContextParallel) -> None:
        model.config.output_router_logits = how == "config before"
        huggingface.apply(model, cp)
        batch = huggingface.shard(cp, tokens())
        model(**batch)
        model.config.output_router_logits = how == "config after"
        model(**batch, output_router_logits=True if how == "argument" else None)

    with pytest.raises(RankError, match="output_router_logits: each rank would balance only its own tokens"):
        run_on_ranks(rank)


PACKED = torch.tensor([0, 20, 21, 61])
"""Bounds of three documents, whose first labels are not counted."""
ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded left and right": {"attention_mask": (torch.arange(61) >= torch.tensor([[5], [0]])).long()},
    "packed": {"cu_seq_lens_q": PACKED},
    "packed by positions": {"position_ids": torch.cat([torch.arange(n) for n in PACKED.diff()])[None]},
}
ROWS["padded left and right"]["attention_mask"][1, 50:] = 0
MORE: dict[str, dict[str, Any]] = {"granite": {"logits_scaling": 3.0}, "gpt2": {"tie_word_embeddings": True}}


def wanted(model: Any, ids: torch.Tensor, targets: torch.Tensor, rows: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and log-probabilities on one rank, from all logits: document by document, and without padding."""
    where = ROWS[rows].get("attention_mask", torch.ones_like(ids))
    spans = [(i, int(x.argmax()), int(x.argmax() + x.sum())) for i, x in enumerate(where)]
    if rows.startswith("packed"):
        spans = [(i, *ends) for i in range(len(ids)) for ends in pairwise(PACKED.tolist())]
    logs, states = torch.zeros(ids.size(0), 60), torch.zeros(*ids.shape, 64)
    for i, start, end in spans:
        output = model(input_ids=ids[i : i + 1, start:end], use_cache=False, output_hidden_states=True)
        states[i, start:end] = output.hidden_states[-1][0]
        following = targets[i, start + 1 : end]
        each = -cross_entropy(output.logits[0, :-1] / 0.7, following, ignore_index=-100, reduction="none")
        logs[i, start : end - 1] = each
    return states, logs


@pytest.mark.parametrize("wrapper", ["model", "DDP"])
@pytest.mark.parametrize(
    ("kind", "rows", "place"),
    [
        ("llama", "plain", {"layout": "contiguous"}),
        ("llama", "padded left and right", {"layout": "zigzag"}),
        ("granite", "packed", {"provider": "striped"}),
        ("mixtral", "packed by positions", {"provider": "needed", "layout": "documents"}),
        ("gpt2", "plain", {"provider": "attention2d"}),
    ],
)
def test_what_a_loss_of_ones_own_needs(
    kind: str, rows: str, place: dict[str, str], wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kind: the only way to whole rows was logits of all tokens. Values and gradients are those of one rank; also of
    labels that are on another rank than the token before them."""
    monkeypatch.setattr("cp_plugin.huggingface.probabilities._AT_ONCE", 7)
    model, ids = model_of(kind, **MORE.get(kind, {})), tokens(61, 1 if rows.startswith("packed") else 2)
    targets = ids.clone()
    targets[:, 30:34] = -100
    if rows.startswith("packed"):
        targets[:, PACKED[:-1]] = -100

    def own(states: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
        return -torch.nn.functional.logsigmoid(logs.sum(1)).sum() + states.float().square().mean()

    states, logs = wanted(model, ids, targets, rows)
    loss = own(states, logs)
    want = torch.autograd.grad(loss, list(model.parameters()))

    def rank(cp: ContextParallel) -> list[float]:
        huggingface.apply(model, cp)
        called = torch.nn.parallel.DistributedDataParallel(model) if wrapper == "DDP" else model
        got = huggingface.log_probabilities(called, cp, ids, targets, temperature=0.7, **ROWS[rows])
        hidden = huggingface.hidden_states(model, cp, ids, **ROWS[rows])
        assert got.dtype == torch.float32 and got.shape == (len(ids), 60)
        errors = [float((got - logs).abs().max()), float((hidden - states).abs().max())]
        (own(hidden, got) * (cp.size if wrapper == "DDP" else 1)).backward()
        for p, gradient in zip(model.parameters(), want, strict=True):
            if wrapper != "DDP":
                dist.all_reduce(p.grad)
            errors.append(float((p.grad - gradient).norm() / gradient.norm().clamp_min(1e-3)))
        return errors

    assert max(max(errors) for errors in run_on_ranks(rank, ranks=4, **place)) <= 1e-4
