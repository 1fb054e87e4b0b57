"""Batches: all ranks hold parts of the same one, and packs of documents are those of one rank.

Kinds: agreement of ranks is never asked (the stock ``Trainer`` gives each rank rows of its own; AutoModel 3359); packed
documents known by ``cu_seq_lens_q`` or by positions that restart, which were refused (LlamaFactory 10787).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nightly import each_value
from tiny import CONVOLUTION, DELTA_NET, EXPERTS, differs, model_of, needs_transformers, tokens, train, transformers

from cp_plugin import ContextParallel, huggingface
from cp_plugin.testing.launch import RankError, run_ranks

LENGTHS = (20, 1, 27, 16)


def packed() -> dict[str, torch.Tensor]:
    """One row of four documents, as ``DataCollatorWithFlattening`` makes it."""
    ids = tokens(64, 1)
    labels = ids.clone()
    starts = torch.tensor(LENGTHS).cumsum(0)[:-1]
    labels[0, [0, *starts.tolist()]] = -100
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def bounds() -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)


PACKS: dict[str, dict[str, Any]] = {
    "by position_ids": packed(),
    "by cu_seq_lens_q": {key: x for key, x in packed().items() if key != "position_ids"} | {"cu_seq_lens_q": bounds()},
    "as a collator says it": packed()
    | {"cu_seq_lens_q": bounds(), "cu_seq_lens_k": bounds(), "max_length_q": 27, "max_length_k": 27},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Gemma 3": ("gemma3_text", {"sliding_window": 9}),
    "dynamic NTK": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 16},
    ),
}
PLACES = {
    "ring": {},
    "striped": {},
    "attention2d": {},
    "ulysses": {},
    "all_gather": {},
    "burst": {},
    "needed": {"layout": "documents"},
    "ring ": {"layout": "documents"},
}


@needs_transformers
@each_value
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("name", MODELS)
def test_packs_are_those_of_one_rank(name: str, pack: str, place: str) -> None:
    kind, more = MODELS[name]
    ranks = 2 if place == "ulysses" else 4
    assert differs(model_of(kind, **more), place.strip(), ranks, packed(), PACKS[pack], **PLACES[place]) <= 2e-5


def documents_alone(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss of the documents one by one: transformers' linear layers know no documents on a CPU, and gpt-oss
    makes its mask without positions."""
    losses, start = [], 0
    for length in LENGTHS:
        ids, labels = (batch[key][:, start : start + length] for key in ("input_ids", "labels"))
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="none"))
        start += length
    return torch.cat(losses).mean()


@needs_transformers
@each_value
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "documents"])
@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2", "gpt_oss"])
def test_packs_are_their_documents_alone(kind: str, layout: str, pack: str) -> None:
    """States and convolutions begin anew in each document; or the model, in a transformers that does not pass on the
    bounds, is refused."""
    more: dict[str, dict[str, Any]] = {
        "qwen3_next": {**DELTA_NET, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
        "lfm2": CONVOLUTION,
        "gpt_oss": {**EXPERTS, "num_local_experts": 4, "sliding_window": 7},
    }
    model = model_of(kind, **more[kind])
    loss = documents_alone(model, packed())
    want = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)

    def rank() -> float:
        cp = ContextParallel("needed", group=dist.group.WORLD, layout=layout)
        huggingface.apply(model, cp)
        model.zero_grad()
        mine = model(**huggingface.shard(cp, **PACKS[pack])).loss
        mine.backward()
        worst, floor = 0.0, 1e-3 * max(float(x.norm()) for x in want)
        for p, gradient in zip(model.parameters(), want, strict=True):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            worst = max(worst, float((p.grad - gradient).norm() / gradient.norm().clamp_min(floor)))
        return worst

    try:
        assert max(run_ranks(rank, 4, init_process_group=True)) <= 1e-4
    except RankError as error:
        assert "does not pass `cu_seq_lens_q` on to its linear layers" in str(error), error
        assert tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 10)


def test_packs_that_do_not_fit_are_refused() -> None:
    cp, batch = ContextParallel("ring"), packed()
    wrong: list[tuple[str, dict[str, Any]]] = [
        (
            "position_ids begin documents at 0, 20, 21, 48, cu_seq_lens_q at 0, 8",
            {"cu_seq_lens_q": torch.tensor([0, 8, 64])},
        ),
        ("must increase from 0 to the 64 tokens", {"cu_seq_lens_q": torch.tensor([0, 20, 48])}),
        ("cu_seq_lens_k must be the bounds", {"cu_seq_lens_q": bounds(), "cu_seq_lens_k": torch.tensor([0, 64])}),
        ("position_ids must be those of the whole sequence", {"position_ids": batch["position_ids"][:, :32]}),
        ("does not support padding", {"attention_mask": torch.arange(64)[None] < 60}),
    ]
    for message, more in wrong:
        with pytest.raises(ValueError, match=message):
            huggingface.shard(cp, **batch | more)
    two = {key: x.repeat(2, 1) for key, x in batch.items()}
    two["position_ids"][1] = torch.arange(64)
    with pytest.raises(ValueError, match="documents that begin at different tokens in different rows"):
        huggingface.shard(cp, **two)


@needs_transformers
def test_bounds_added_to_a_call_are_followed() -> None:
    """Passed to the model, beside positions of the whole sequence: rotary angles are relative."""
    more = {"cu_seq_lens_q": bounds(), "cu_seq_lens_k": bounds(), "max_length_q": 27, "max_length_k": 27}
    whole = {key: x for key, x in packed().items() if key != "position_ids"}

    def call(model: Any) -> Callable[..., Any]:
        divided = "forward" in vars(model)
        return lambda **batch: model(**batch | (more if divided else {"position_ids": packed()["position_ids"]}))

    assert differs(model_of("llama"), whole=whole, call=call) <= 2e-5


DISAGREEMENTS: dict[str, tuple[str, Callable[..., object]]] = {
    "other rows": ("input_ids", lambda model, batch, shard: batch.update(shard(tokens().flip(0)))),
    "other labels": ("labels", lambda model, batch, shard: batch.update(shard(tokens(), tokens().flip(0)))),
    "another length": ("shape of position_ids", lambda model, batch, shard: batch.update(shard(tokens(128)))),
    "other documents": (
        "documents",
        lambda model, batch, _: batch.update(cu_seq_lens_q=torch.tensor([0, 20 + 4 * dist.get_rank(), 64])),
    ),
    "evaluation on one rank": ("model.training", lambda model, batch, _: model.eval()),
    "a setting of the config": ("config", lambda model, batch, _: setattr(model.config, "attention_dropout", 0.5)),
    "a count of labels": (
        "num_items_in_batch",
        lambda model, batch, _: batch.update(num_items_in_batch=torch.tensor(7)),
    ),
    "a wrong call": (
        "rank 1: position_ids must be those of this rank's tokens",
        lambda model, batch, _: batch.pop("position_ids"),
    ),
}


@needs_transformers
@each_value
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_are_named(what: str, number: int) -> None:
    model, (named, change) = model_of("llama"), DISAGREEMENTS[what]

    def rank() -> str:
        cp = ContextParallel("ring", group=dist.group.WORLD)
        huggingface.apply(model, cp)
        batch = huggingface.shard(cp, tokens())
        for _ in range(number):
            model(**batch)
        if cp.index or what == "other documents":
            change(model, batch, partial(huggingface.shard, cp))
        with pytest.raises(ValueError) as raised:
            model(**batch)
        return str(raised.value)

    texts = run_ranks(rank, 2, init_process_group=True)
    disagree = " (rank 0 and rank 1 disagree)" * (what != "a wrong call")
    assert f"{named}{disagree}" in texts[0], texts[0]
    assert disagree in texts[1]


@needs_transformers
@pytest.mark.parametrize("layout", ["contiguous", "striped", "documents"])
def test_the_code_of_the_page(layout: str) -> None:
    """Kind: what a page leads to, nobody ran. Padding was counted as labels (4.574 for 4.579)."""
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    by_hand, ddp, padded, documents, own = re.findall(
        r"```python\n(.*?)```", page.split("## A step by hand")[1].split("## With Trainer")[0], re.DOTALL
    )
    model, ids = model_of("llama"), tokens(61, 1)
    lengths, mask = (20, 1, 40), (torch.arange(61) < 57)[None].long()
    known: dict[str, Any] = {
        **{"torch": torch, "huggingface": huggingface, "model": model, "input_ids": ids, "labels": ids.clone()},
        **{"attention_mask": mask, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]},
    }
    want = train(model, {"input_ids": ids, "labels": ids})
    shorter = train(model, {"input_ids": ids[:, :57], "labels": ids[:, :57]}).loss
    parts = [model(input_ids=x, labels=x).loss * (x.size(1) - 1) for x in ids.split(lengths, 1) if x.size(1) > 1]
    in_documents = sum(parts).item() / 58

    def rank() -> list[float]:
        cp = ContextParallel("needed", group=dist.group.WORLD, layout=layout)
        huggingface.apply(model, cp)

        def run(code: str) -> list[float]:
            model.zero_grad()
            exec(code, known | {"cp": cp}, ran := dict[str, Any]())
            known.update(ran)
            return [float(p.grad.norm()) for p in model.parameters()] if "backward" in code else []

        def loss(batch: dict[str, Any]) -> float:
            total = model(**batch).loss.detach()
            dist.all_reduce(total)
            return float(total)

        gradients = [float(x.norm()) for x in want.gradients.values()]
        assert run(by_hand) == pytest.approx(gradients, rel=1e-4) and run(ddp) == pytest.approx(gradients, rel=1e-4)
        losses = [loss(known["batch"])]
        run(padded)
        losses.append(loss(huggingface.shard(cp, ids, known["labels"])))
        run(documents)
        losses.append(loss(known["packed"]))
        run(own)
        assert known["logs"].shape == (1, 60) and known["states"].shape == (1, 61, 64)
        return losses

    for got in run_ranks(rank, 4, init_process_group=True):
        assert got == pytest.approx([want.loss, shorter, in_documents], rel=1e-5)
