"""How a model of transformers is called, on one rank and on several: through what users put around it, or past it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import tiny
import torch

from cp_plugin import ContextParallel, huggingface

Forward = Callable[..., Any]


class Wrapper(torch.nn.Module):
    def __init__(self, model: Any, cp: ContextParallel | None) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def patched(model: Any) -> None:
    """A forward of the instance's own, whose results differ from its class's."""
    forward, embed = model.forward, model.get_input_embeddings()

    def own(input_ids: torch.Tensor, **named: Any) -> Any:
        return forward(inputs_embeds=1.5 * embed(input_ids), **named)

    model.forward = own


def call_inner_model(model: Any, cp: ContextParallel | None) -> Forward:
    """A loss of hidden states, as fused log-probabilities have."""

    def forward(**batch: Any) -> SimpleNamespace:
        inputs = {name: x for name, x in batch.items() if "labels" not in name and name != "num_items_in_batch"}
        states = model.base_model(**inputs)[0]
        whole = (states.size(0), states.size(1) * (1 if cp is None else cp.size), states.size(2))
        factors = torch.randn(whole, generator=torch.Generator().manual_seed(3))
        return SimpleNamespace(loss=(states * (factors if cp is None else cp.shard(factors, 1))).mean(2).sum())

    return forward


def with_noise(model: Any, cp: ContextParallel | None) -> Forward:
    """NEFTune's, without its random signs: by the length of the rows."""
    hook = lambda layer, args, states: states + 5 / (states.size(1) * states.size(2)) ** 0.5  # noqa: E731

    def forward(**batch: Any) -> Any:
        handle = model.get_input_embeddings().register_forward_hook(hook)
        result = model(**batch)
        handle.remove()
        return result

    return forward


def saved(model: Any, cp: ContextParallel | None) -> Forward:
    """On one rank, whose config is another one then; so it is by a user's note."""
    if cp is not None and cp.index == 0:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
        model.config.dtype, model.config.note, model.config._name_or_path = torch.float16, "mine", "elsewhere"
    return model


def padded_on_one_rank(model: Any, cp: ContextParallel | None) -> Forward:
    """On the left, where only the other ranks' rows can be divided."""

    def forward(**batch: Any) -> Any:
        if cp is not None:
            mask = torch.ones(1, 32, dtype=torch.int64)
            mask[0, 0] = cp.index != 0
            row = {"input_ids": tiny.tokens(32, 1), "attention_mask": mask}
            batch = huggingface.Collator(cp, lambda _: row)([row])
        return model(**batch)

    return forward


ROWS = 5
"""No number of ranks divides it."""


def evaluated(model: Any, cp: ContextParallel | None) -> Forward:
    """The loss that Trainer finds of all rows; it is the mean of theirs."""

    def forward(**batch: Any) -> float | torch.Tensor:
        rows = tiny.tokens(33, ROWS)
        if cp is None:
            model.eval()
            with torch.no_grad():
                loss = torch.stack([model(input_ids=row[None], labels=row[None]).loss for row in rows]).mean()
            model.train()
            return loss
        from transformers import Trainer, TrainingArguments

        with tempfile.TemporaryDirectory() as folder:
            quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}
            args = TrainingArguments(output_dir=folder, per_device_eval_batch_size=1, **quiet)
            trainer = Trainer(model=model, args=args, data_collator=huggingface.Collator(cp))
            return trainer.evaluate([{"input_ids": row} for row in rows])["eval_loss"]

    return forward


WAYS: dict[str, Callable[[Any, ContextParallel | None], Forward]] = {
    "called": lambda model, cp: model,
    "patched": lambda model, cp: model,
    "wrapped": Wrapper,
    "inner": call_inner_model,
    "noise": with_noise,
    "saved": saved,
    "padded on one rank": padded_on_one_rank,
    "evaluated": evaluated,
}
OF_ROWS = ("inner", "padded on one rank", "evaluated")
