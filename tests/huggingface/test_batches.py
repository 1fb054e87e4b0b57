"""Batches: all ranks hold parts of the same one, and packs of documents are those of one rank."""

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
from tiny import differs, model_of, pack, padded, raised, run_on_ranks, tokens, train, transformers

from cp_plugin import ContextParallel, huggingface
from cp_plugin.testing.launch import RankError

LENGTHS = (20, 1, 27, 16)
PACKED = pack(*LENGTHS)


BOUNDS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
PACKS: dict[str, dict[str, Any]] = {
    "by position_ids": PACKED,
    "by cu_seq_lens_q": {key: x for key, x in PACKED.items() if key != "position_ids"} | {"cu_seq_lens_q": BOUNDS},
    "as a collator says it": PACKED
    | {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 27, "max_length_k": 27},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Gemma 3": ("gemma3_text", {"sliding_window": 9}),
    "dynamic NTK": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 16},
    ),
    "gpt-oss": ("gpt_oss", {"sliding_window": 7}),
    "LFM 2": ("lfm2", {}),
    "Qwen 3 Next": ("qwen3_next", {}),
}
PLACES: list[tuple[str, dict[str, str]]] = [
    ("ring", {"layout": "zigzag"}),
    ("ring", {"layout": "documents"}),
    ("needed", {"layout": "contiguous"}),
    ("needed", {"layout": "documents"}),
    *((provider, {}) for provider in ("attention2d", "ulysses", "all_gather", "burst", "striped")),
]


@each_value
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("way", PACKS)
@pytest.mark.parametrize("name", MODELS)
def test_packs_are_their_documents_alone(name: str, way: str, place: tuple[str, dict[str, str]]) -> None:
    """States and convolutions begin anew in each document; or the model, in a transformers that does not pass on the
    bounds, is refused."""
    (kind, more), (provider, options) = MODELS[name], place
    linear = kind in ("lfm2", "qwen3_next")
    if linear and options.get("layout") not in ("zigzag", "contiguous"):
        provider, options = "ring", {"layout": "zigzag"}
    try:
        model, ranks = model_of(kind, **more), 2 if provider == "ulysses" else 4
        assert differs(model, provider, ranks, padded(*LENGTHS), PACKS[way], **options) <= (1e-4 if linear else 2e-5)
    except RankError as error:
        assert "does not pass `cu_seq_lens_q` on to its linear layers" in str(error), error
        assert tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 10)


def test_packs_that_do_not_fit_are_refused() -> None:
    cp, batch = ContextParallel("ring"), PACKED
    wrong: list[tuple[str, dict[str, Any]]] = [
        (r"must be \[b, s\], got \[64\]", {"input_ids": batch["input_ids"][0]}),
        ("other documents by position_ids than by bounds", {"cu_seq_lens_q": torch.tensor([0, 8, 64])}),
        ("do not count from 0 in each document", {"position_ids": torch.arange(5, 69)[None]}),
        ("must increase from 0 to the 64 tokens", {"cu_seq_lens_q": torch.tensor([0, 20, 48])}),
        ("other cu_seq_lens_k than _q", {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": torch.tensor([0, 64])}),
        (r"`position_ids` of \[1, 32\] for input_ids of \[1, 64\]", {"position_ids": batch["position_ids"][:, :32]}),
        ("does not support padding", {"attention_mask": torch.arange(64)[None] < 60}),
    ]
    for message, more in wrong:
        with pytest.raises(ValueError, match=message):
            huggingface.shard(cp, **batch | more)
    two = {key: x.repeat(2, 1) for key, x in batch.items()}
    two["position_ids"][1] = torch.arange(64)
    with pytest.raises(ValueError, match="documents that begin at different tokens in different rows"):
        huggingface.shard(cp, **two)


def test_bounds_added_to_a_call_are_followed() -> None:
    """Passed to the model, beside positions of the whole sequence: rotary angles are relative."""
    more = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 27, "max_length_k": 27}
    whole = {key: x for key, x in PACKED.items() if key != "position_ids"}

    def call(model: Any) -> Callable[..., Any]:
        divided = "forward" in vars(model)
        return lambda **batch: model(**batch | (more if divided else {"position_ids": PACKED["position_ids"]}))

    assert differs(model_of("llama"), whole=whole, call=call) <= 2e-5


DISAGREEMENTS: dict[str, tuple[str, Callable[[Any, Callable[..., dict[str, Any]]], dict[str, Any] | None]]] = {
    "other rows": ("input_ids", lambda model, shard: shard(tokens().flip(0))),
    "other labels": ("labels", lambda model, shard: shard(tokens(), tokens().flip(0))),
    "another length": ("shape of position_ids", lambda model, shard: shard(tokens(128))),
    "other documents": ("documents", lambda *_: {"cu_seq_lens_q": torch.tensor([0, 20 + 4 * dist.get_rank(), 64])}),
    "evaluation on one rank": ("model.training", lambda model, _: vars(model).update(training=False)),
    "a setting of the config": ("config", lambda model, _: vars(model.config).update(attention_dropout=0.5)),
    "a count of labels": ("num_items_in_batch", lambda *_: {"num_items_in_batch": torch.tensor(7)}),
    "a wrong call": ("rank 1: position_ids must be those of this rank's tokens", lambda *_: {"position_ids": None}),
}
"""What is named, and what changes the model, or the arguments of a call."""


@each_value
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_are_named(what: str, number: int) -> None:
    model, (named, change) = model_of("llama"), DISAGREEMENTS[what]

    def rank(cp: ContextParallel) -> str:
        huggingface.apply(model, cp)
        batch = huggingface.shard(cp, tokens())
        for _ in range(number):
            model(**batch)
        if cp.index or what == "other documents":
            batch |= change(model, partial(huggingface.shard, cp)) or {}
        return raised(lambda: model(**batch))

    texts = run_on_ranks(rank)
    disagree = " (rank 0 and rank 1 disagree)" * (what != "a wrong call")
    assert f"{named}{disagree}" in texts[0], texts[0]
    assert disagree in texts[1]


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

    def rank(cp: ContextParallel) -> list[float]:
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

    for got in run_on_ranks(rank, "needed", 4, layout=layout):
        assert got == pytest.approx([want.loss, shorter, in_documents], rel=1e-5)
