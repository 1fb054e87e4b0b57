"""A collator for transformers' ``Trainer``, which gives each rank rows of its own (``rows``).

    huggingface.apply(model, cp)
    Trainer(model=model, args=args, train_dataset=rows, data_collator=huggingface.Collator(cp))

Loading, sampling, evaluation, prediction and gradient accumulation are Trainer's own, and its
``average_tokens_across_devices``, which is on, makes the loss the mean over the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.huggingface.batch import IGNORED
from cp_plugin.huggingface.rows import ROWS, starts_of


class Collator:
    """Batches of rows of this rank's own, which a divided model exchanges with the other ranks' when it is called."""

    def __init__(
        self,
        cp: ContextParallel,
        collate: Callable[[Sequence[Any]], Mapping[str, Any]] | None = None,
        *,
        pad_token_id: int = 0,
    ) -> None:
        """
        Args:
            collate: makes a batch of rows: ``input_ids`` ``[b, s]`` and perhaps ``labels``, ``attention_mask`` (padding
                on the right) and ``position_ids`` of that shape, or packs as ``DataCollatorWithFlattening`` does. None:
                pads the rows on the right and stacks them.
            pad_token_id: fills up rows on the right, without labels, where there is no ``collate``.
        """
        self.cp, self.collate, self.pad_token_id = cp, collate, pad_token_id

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        """The batch with ``labels`` (None: the input without padding), and ``shift_labels``; without communication.

        What the ranks cannot divide is refused by all of them when the model is called; alone, here already.
        """
        batch = self._stacked(examples) if self.collate is None else dict(self.collate(examples))
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        labels = ids if batch.get("labels") is None else batch["labels"]
        fits = mask is not None and mask.shape == labels.shape
        batch["labels"] = labels.masked_fill(mask == 0, IGNORED) if fits else labels
        if batch.get("shift_labels") is None:
            batch["shift_labels"] = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        batch[ROWS] = self._begun(batch, len(examples))
        return batch

    def _begun(self, batch: Mapping[str, Any], examples: int) -> Tensor:
        """``[b, s]``: 1 where an example begins; -1 where that is not known."""
        rows = torch.zeros_like(batch["input_ids"])
        rows[:, 0] = 1
        try:
            documents = starts_of(batch)
        except ValueError:
            if self.cp.size == 1:
                raise
            return rows
        if len(rows) == examples:
            return rows
        return documents if int(documents.sum()) == examples else -rows

    def _stacked(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rows = [{key: x for key, x in example.items() if not isinstance(x, str)} for example in examples]
        if len({len(row["input_ids"]) for row in rows}) > 1:
            rows = [{"attention_mask": torch.ones(len(row["input_ids"]), dtype=torch.int64)} | row for row in rows]
        filling = {"input_ids": self.pad_token_id, "labels": IGNORED}
        return {
            key: pad_sequence([torch.as_tensor(row[key]) for row in rows], True, filling.get(key, 0))
            for key in {key: None for row in rows for key in row}
        }
