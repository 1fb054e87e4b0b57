"""A collator for transformers' ``Trainer``, which gives each rank rows of its own.

    huggingface.apply(model, cp)
    Trainer(model=model, args=args, train_dataset=rows, data_collator=huggingface.Collator(cp))

The ranks exchange their rows: the batch is all of them, as under data parallelism, and each rank holds a part of every
row's tokens instead of rows. Sampling, evaluation and gradient accumulation are Trainer's own, and its
``average_tokens_across_devices``, which is on, makes the loss the mean over the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import get_worker_info

from cp_plugin.attention.agreement import gathered
from cp_plugin.attention.api import ContextParallel
from cp_plugin.huggingface.attention import refuse
from cp_plugin.huggingface.batch import IGNORED, shard

_PACKS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class Collator:
    """Rows of all ranks, of which this rank gets its tokens. Collective: ranks must ask for as many batches."""

    def __init__(
        self,
        cp: ContextParallel,
        collate: Callable[[Sequence[Any]], Mapping[str, Any]] | None = None,
        *,
        pad_token_id: int = 0,
    ) -> None:
        """
        Args:
            collate: makes a batch of this rank's rows: ``input_ids`` and perhaps ``labels`` ``[b, s]``, or a packed row
                as ``DataCollatorWithFlattening`` does, which become one row of all ranks' documents. None: stacks rows
                of equal length.
            pad_token_id: fills up rows, on the right and without labels, until the ranks can divide them.
        """
        self.cp, self.collate, self.pad_token_id = cp, collate, pad_token_id

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        """
        Raises:
            ValueError: in a worker process, which cannot communicate, or for padding on the left.
        """
        if get_worker_info() is not None:
            raise ValueError(
                "huggingface.Collator exchanges rows between ranks, which DataLoader workers cannot: set "
                "dataloader_num_workers=0"
            )
        batch = dict(_stacked(examples) if self.collate is None else self.collate(examples))
        ids = batch["input_ids"]
        labels = _labels(ids, batch)
        if any(batch.get(name) is not None for name in _PACKS):
            return self._packed(ids, labels, _starts(ids, batch))
        longest = int(gathered(self.cp.mesh, torch.tensor([ids.size(1)])).max()) if self.cp.size > 1 else ids.size(1)
        length = self.cp.layout.padded(longest, self.cp.size) if self.cp.size > 1 else longest
        ids, labels = self._filled(ids, labels, length)
        return shard(self.cp, self._all(ids), self._all(labels))

    def _packed(self, ids: Tensor, labels: Tensor, starts: Tensor) -> dict[str, Any]:
        """One row of all ranks' documents; what fills it up is a document of its own."""
        sizes = gathered(self.cp.mesh, torch.tensor([ids.numel()])) if self.cp.size > 1 else torch.tensor([ids.numel()])
        longest = int(sizes.max())
        rows = [pad(x.reshape(1, -1), (0, longest - x.numel())) for x in (ids, labels, starts)]
        real = torch.cat([torch.arange(longest) < n for n in sizes])
        ids, labels, starts = (self._all(x).reshape(-1)[real] for x in rows)
        length = self.cp.layout.padded(len(ids), self.cp.size) if self.cp.size > 1 else len(ids)
        bounds = sorted({*starts.nonzero().flatten().tolist(), len(ids), length})
        ids, labels = self._filled(ids[None], labels[None], length)
        return shard(self.cp, ids, labels, cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32))

    def _filled(self, ids: Tensor, labels: Tensor, length: int) -> tuple[Tensor, Tensor]:
        more = (0, length - ids.size(1))
        return pad(ids, more, value=self.pad_token_id), pad(labels, more, value=IGNORED)

    def _all(self, x: Tensor) -> Tensor:
        return gathered(self.cp.mesh, x) if self.cp.size > 1 else x


def _stacked(examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    names = [name for name in ("input_ids", "labels") if name in examples[0]]
    return {name: torch.stack([torch.as_tensor(example[name]) for example in examples]) for name in names}


def _labels(ids: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Padding has no label; under a causal mask no other token sees it if it is on the right."""
    labels = batch.get("labels")
    labels = ids if labels is None else labels
    mask = batch.get("attention_mask")
    if mask is None:
        return labels
    refuse(bool((mask[:, 1:] > mask[:, :-1]).any()), "padding on the left: set the tokenizer's padding_side to right")
    return labels.masked_fill(mask == 0, IGNORED)


def _starts(ids: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """1 where a document begins, int64 like ids."""
    starts = torch.zeros_like(ids)
    starts[:, 0] = 1
    bounds, positions = batch.get("cu_seq_lens_q"), batch.get("position_ids")
    if bounds is not None:
        starts.view(-1)[bounds[:-1].long()] = 1
    elif positions is not None:
        starts[:, 1:] |= (positions.expand(ids.shape).diff(dim=1) != 1).long()
    return starts
