"""Rows of each rank's own: outside a divided model all is as under data parallelism, inside ranks hold tokens.

    rank 0    row 0 ------+    +-- tokens 0 1 of rows 0 1 --> model --+    +--> logits of row 0
                          +----+                                      +----+
    rank 1    row 1 ------+    +-- tokens 2 3 of rows 0 1 --> model --+    +--> logits of row 1

The ranks' losses add up to the loss of all rows. Loading rows needs no communication, so that any loader will do, and
what the model says of a row comes back to the rank that has it, so that whoever gathers and counts rows may go on, such
as transformers' ``Trainer``, whose ``average_tokens_across_devices`` makes the loss the mean over the tokens of all
ranks:

    huggingface.apply(model, cp)
    Trainer(model=model, args=args, train_dataset=rows, data_collator=huggingface.Collator(cp))
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from cp_plugin.engine.attention.agreement import gathered, problem_of_ranks
from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.comm import Ledger, Mesh
from cp_plugin.engine.common.eager import eager
from cp_plugin.engine.placement.documents import DOCUMENTS
from cp_plugin.huggingface.attention import placed, refuse
from cp_plugin.huggingface.batch import IGNORED, document_starts, part, require_shape

ROWS = "cp_rows"
"""Key of a tensor ``[b, s]`` by which rows of a rank's own are known: 1 where an example begins; -1: nobody knows."""
ASKED = "cp_asked"
"""Key of what is asked for instead of the model's output: an object with ``compute(forward, named)``."""
_TOKENS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "seq_idx")
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_FILLING = (0, IGNORED, 0, -1, 0)
"""Of input_ids, labels, starts, owner and place; no counted token sees them, whatever they are."""


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


@dataclass(frozen=True, slots=True)
class _Where:
    """Where the tokens of a batch ``[b, s]`` of all ranks are, and whose they are."""

    cp: ContextParallel
    owner: Tensor
    """``[b, s]``: the rank whose row a token is in; -1: of none."""
    place: Tensor
    """``[b, s]``: its place in that rank's rows."""
    shape: tuple[int, int]
    """Of this rank's rows."""

    def to_rows(self, x: Tensor) -> Tensor:
        """``[b, s / size, ...]`` of the tokens here -> ``[*shape, ...]`` of the rows of this rank; differentiable."""
        cp, kind = self.cp, x.dtype
        n = self.owner.size(1)
        x = x.flatten(0, 1).to(torch.uint8 if kind == torch.bool else kind)
        tokens = [cp.layout.positions(n, cp.size, number, x.device) for number in cp.numbers]
        owners, places = ([whole[:, at].flatten() for at in tokens] for whole in (self.owner, self.place))
        longest = int(torch.stack([torch.bincount(owner[owner >= 0], minlength=cp.size) for owner in owners]).max())
        leaving = [(owners[cp.index] == rank).nonzero().flatten() for rank in range(cp.size)]
        parts = torch.stack([pad(x[at], (*([0, 0] * (x.dim() - 1)), 0, longest - len(at))) for at in leaving])
        parts = _ToOwners.apply(parts, cp.mesh)
        coming = [(owner == cp.index).nonzero().flatten() for owner in owners]
        arrived = torch.cat([part[: len(at)] for part, at in zip(parts, coming, strict=True)])
        place = torch.cat([x[at] for x, at in zip(places, coming, strict=True)])
        return arrived.new_zeros(arrived.shape).index_copy(0, place, arrived).unflatten(0, self.shape).to(kind)


class _ToOwners(torch.autograd.Function):
    """Part i of ``[size, ...]`` to rank i. The gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh, usual, mesh.ledger = mesh, mesh.ledger, Ledger()
        sizes = tuple(mesh.axes.values())
        x = x.unflatten(0, sizes)
        try:
            for i, axis in enumerate(mesh.axes):
                (arrived,) = mesh.all_to_all(axis, (x.movedim(i, 0).contiguous(),)).wait()
                x = arrived.movedim(0, i)
        finally:
            mesh.ledger = usual
        return x.flatten(0, len(sizes) - 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ToOwners.apply(grad, ctx.mesh), None


def run_own_rows(cp: ContextParallel, model: Callable[..., Any], training: bool, named: dict[str, Any]) -> Any:
    """The model's output for this rank's rows: in training, if there are labels, without logits."""
    batch, where = _share_rows(cp, training, named)
    return _to_own_rows(model(**batch), where, training, batch.get("labels") is not None)


@eager
def _share_rows(cp: ContextParallel, training: bool, named: dict[str, Any]) -> tuple[dict[str, Any], _Where]:
    """Arguments of the model for this rank's tokens of all ranks' rows. Collective. ValueError on every rank, for what
    cannot be divided on any, or for ranks that differ in more than rows."""
    named = dict(named)
    examples = named.pop(ROWS)
    ids, following = named["input_ids"], named.get("shift_labels") if named.get("labels") is not None else None
    problem, starts, counted = None, ids, following
    try:
        refuse(
            training and _unsummed(), "training without DDP, as Trainer does after evaluate(): set eval_on_start=True"
        )
        starts = starts_of(named)
        counted = None if following is None else _without_repeated(following, examples, training)
    except ValueError as error:
        problem = str(error)
    items, (b, s) = named.get("num_items_in_batch"), ids.shape if problem is None else (0, 0)
    count, kept = (0 if x is None else int((x != IGNORED).sum()) for x in (following, counted))
    ours = [problem is not None, following is not None, training, -1.0 if items is None else float(items)]
    theirs = [b, s, problem is None and bool(starts[:, 1:].any()), count, kept]
    table = _agreed(cp, ours, theirs, problem, ids.device)
    shapes = [(int(row[0]), int(row[1])) for row in table]
    labels = torch.full_like(ids, IGNORED) if counted is None else counted
    packed = any(row[2] for row in table)
    x = torch.stack([ids, labels, starts])
    ids, labels, starts, owner, place = _gather_rows(cp, x, shapes, packed)
    bounds = (0, ids.size(1)) if cp.layout == DOCUMENTS and cp.size > 1 else ()
    if packed:
        bounds = (*starts[0].nonzero().flatten().tolist(), ids.size(1))
    rest = {key: x for key, x in named.items() if key not in (*_TOKENS, *BOUNDS)}
    batch = part(cp, ids, None if following is None else labels, bounds)
    total, real = (sum(row[i] for row in table) for i in (3, 4))
    if items is not None and 0 < real < total:
        rest["num_items_in_batch"] = items * real / total
    return batch | rest, _Where(placed(cp, bounds), owner, place, (b, s))


def _loading() -> Any:
    """accelerate's state of the loader in use; None without accelerate."""
    accelerate = sys.modules.get("accelerate.state")
    return None if accelerate is None else accelerate.GradientState()


def _uneven() -> bool:
    sampler = getattr(getattr(_loading(), "active_dataloader", None), "batch_sampler", None)
    return not getattr(sampler, "even_batches", True) and not getattr(sampler, "drop_last", True)


def _unsummed() -> bool:
    """Return True in a step of accelerate's data parallelism without DistributedDataParallel, which sums gradients."""
    if not torch.is_grad_enabled() or getattr(_loading(), "active_dataloader", None) is None:
        return False
    kind = sys.modules["accelerate.state"].AcceleratorState().distributed_type
    return kind in ("MULTI_CPU", "MULTI_GPU") and DistributedDataParallel._get_active_ddp_module() is None


def _without_repeated(following: Tensor, examples: Tensor, training: bool) -> Tensor:
    """Without labels of the examples by which accelerate fills up the last batch of an evaluation."""
    state = _loading()
    if training or state is None or not state.end_of_dataloader or state.remainder <= 0:
        return following
    refuse(
        bool((examples < 0).any()),
        "an evaluation whose last batch is not full, of packs that do not tell which example is where",
    )
    number = examples.flatten().cumsum(0).view(examples.shape)  # from 1
    first = int(number[-1, -1]) * (dist.get_rank() if dist.is_initialized() else 0)
    return following.masked_fill(number + first > state.remainder, IGNORED)


def _agreed(
    cp: ContextParallel, ours: list[Any], theirs: list[Any], problem: str | None, device: torch.device
) -> list[list[float]]:
    """Every rank's ``theirs``, in rank order, once all have the same ``ours``."""
    if cp.size == 1 and problem is not None:
        raise ValueError(problem)
    header = torch.tensor([[*ours, *theirs]], dtype=torch.float64, device=device)
    table = gathered(cp.mesh, header).tolist()
    if any(row[0] for row in table) and (error := problem_of_ranks(cp.mesh, problem, device)):
        raise error
    for column, what in enumerate(
        (
            "labels: some have them, and some have none",
            "model.training",
            "num_items_in_batch: leave average_tokens_across_devices on",
        ),
        start=1,
    ):
        if len({row[column] for row in table}) > 1:
            values = ", ".join(f"{row[column]:g}" for row in table)
            raise ValueError(f"context-parallel ranks differ in {what} (ranks 0-{cp.size - 1}: {values})")
    return [row[len(ours) :] for row in table]


def _gather_rows(cp: ContextParallel, x: Tensor, shapes: list[tuple[int, int]], packed: bool) -> Tensor:
    """``[3, b, s]`` of this rank -> those of all ranks with owners and places: ``[5, size * b, s]`` of their rows or,
    where some are packs, ``[5, 1, s]`` of one row of all documents, whose filling is a document of its own."""
    if packed:
        x, shapes = x.flatten(1)[:, None], [(1, b * s) for b, s in shapes]
    b, s = (max(sizes) for sizes in zip(*shapes, strict=True))
    whose = []
    for rank, (rows, tokens) in enumerate(shapes):  # known here, so they do not travel
        place = torch.arange(rows * tokens, device=x.device).view(rows, tokens)
        whose.append(_filled(torch.stack([torch.full_like(place, rank), place]), b, s, _FILLING[3:]))
    x = torch.cat([gathered(cp.mesh, _filled(x, b, s, _FILLING[:3])[None]).transpose(0, 1), torch.stack(whose, 1)])
    if not packed:
        return _filled(x.flatten(1, 2), cp.size * b, cp.layout.padded(s, cp.size))
    x = torch.cat([x[:, rank, :, :s] for rank, (_, s) in enumerate(shapes)], dim=-1)
    whole = _filled(x, 1, cp.layout.padded(x.size(2), cp.size))
    whole[2, :, x.size(2) : x.size(2) + 1] = 1
    return whole


def _filled(x: Tensor, b: int, s: int, filling: tuple[int, ...] = _FILLING) -> Tensor:
    more = (0, s - x.size(2), 0, b - x.size(1))
    return torch.stack([pad(one, more, value=value) for one, value in zip(x, filling, strict=True)])


@eager
def _to_own_rows(output: Any, where: _Where, training: bool, labelled: bool) -> Any:
    cp = where.cp
    shape = (where.owner.size(0), where.owner.size(1) // cp.size)

    def own(name: str, x: Any) -> Any:
        if isinstance(x, tuple | list):
            return type(x)(own(name, one) for one in x)
        if not isinstance(x, Tensor) or not x.dim():
            return x
        refuse(x.shape[:2] != shape, f"an output `{name}` of {list(x.shape)}, which is not one of {list(shape)} tokens")
        return where.to_rows(x)

    is_tuple = not isinstance(output, Mapping)
    names = (*("loss",) * labelled, "logits", *("output",) * len(output))
    own_outputs = [
        (name, _loss(cp, x, training) if name == "loss" and x is not None else own(name, x))
        for name, x in (zip(names, output, strict=False) if is_tuple else output.items())
        if is_tuple or not (name == "logits" and labelled and training)
    ]
    return tuple(x for _, x in own_outputs) if is_tuple else type(output)(**dict(own_outputs))


def _loss(cp: ContextParallel, loss: Tensor, training: bool) -> Tensor:
    """Give every rank the same value in an evaluation, because some ranks' are not counted in its last batch."""
    if training or cp.size == 1:
        return loss
    mean = gathered(cp.mesh, loss.detach().view(1)).mean(0)
    return loss + (mean - loss).detach()


def starts_of(named: Mapping[str, Any]) -> Tensor:
    """1 where a document begins, int64 like the ids; ValueError for rows that cannot be divided."""
    ids, mask, documents = named["input_ids"], named.get("attention_mask"), named.get("seq_idx")
    refuse(ids.dim() != 2, f"input_ids of {list(ids.shape)}, which are not [b, s]")
    for name, x in named.items():
        if isinstance(x, Tensor) and x.numel() > 1 and name not in (*BOUNDS, ROWS):
            refuse(name not in _TOKENS, f"`{name}` in rows: remove it from them, or in a collate function")
            require_shape(name, x, ids)
    refuse(_uneven(), "even_batches=False of accelerate, by which ranks get different numbers of batches")
    refuse(bool(named.get("logits_to_keep")), "logits_to_keep, which would count from the end of each shard")
    real = torch.ones_like(ids) if mask is None else (mask != 0).long()
    refuse(bool((real.diff(dim=1) > 0).any()), "padding on the left: set the tokenizer's padding_side to right")
    positions, queries, keys = (named.get(key) for key in ("position_ids", *BOUNDS[:2]))
    starts = document_starts(ids, positions, queries, keys, real)
    if documents is not None:
        differ = documents.diff(dim=1) != 0
        refuse(not torch.equal(differ, starts[:, 1:] != 0), "other documents by seq_idx than by position_ids")
    refuse(
        mask is not None and bool(starts[:, 1:].any()),
        "documents and an attention_mask, with which transformers looks for none: leave the mask out",
    )
    return starts
