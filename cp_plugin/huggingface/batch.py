"""A rank's part of a batch, as keyword arguments of a causal language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.convolution import copied
from cp_plugin.engine.core.mask import document_bounds
from cp_plugin.engine.core.tree import Tree
from cp_plugin.engine.placement.documents import DOCUMENTS
from cp_plugin.huggingface.attention import ShardMark, placed, refuse

IGNORED = -100
"""Label of a token that is not predicted, as in transformers."""
DIGEST = "cp_digest"
"""Key of the digests of the whole input and labels, by which the ranks compare their batches."""


def shard(
    cp: ContextParallel,
    input_ids: Tensor,
    labels: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    attention_mask: Tensor | None = None,
) -> dict[str, Any]:
    """This rank's part of a replicated batch, as keyword arguments of a causal language model.

    Packed documents are described as by transformers' ``DataCollatorWithFlattening``: by position_ids that restart, by
    cu_seq_lens_q, or by both.

    Args:
        input_ids: int ``[b, s]``, of any length: what fills it up on the right, until the ranks can divide it, has no
            labels and is a document of its own in a pack.
        labels: int ``[b, s]``, not shifted; -100 is not counted. None: the input. In a pack the first label of each
            document, which the end of another one would predict, should be -100.
        position_ids: int ``[b, s]`` or ``[1, s]``; wherever they do not go up by one, a document begins. None: from 0
            in each document.
        cu_seq_lens_q: int ``[n + 1]``: bounds of the n documents, from 0 to s. None: by position_ids.
        cu_seq_lens_k: None, or the same.
        max_length_q, max_length_k: not needed; transformers' collator adds them.
        attention_mask: None, or ones.

    Returns:
        ``input_ids``, ``position_ids`` and ``labels`` ``[b, filled up / size]``, the last shifted over the whole
        sequence, what keeps the model from shifting them again and from dividing by its own count of tokens, the bounds
        of documents, and digests of the whole batch.

    Raises:
        ValueError: for other shapes, padding in the mask, or documents that differ between rows.
    """
    labels = input_ids if labels is None else labels
    if input_ids.dim() != 2 or labels.shape != input_ids.shape:
        raise ValueError(f"input_ids and labels must be [b, s], got {list(input_ids.shape)} and {list(labels.shape)}")
    if attention_mask is not None:
        refuse(not bool(attention_mask.all()), "padding: pack or truncate the sequences")
    s, following = input_ids.size(1), pad(labels[:, 1:], (0, 1), value=IGNORED)
    if position_ids is not None:
        require_shape("position_ids", position_ids, input_ids)
        one = (position_ids == position_ids[:1]).all()
        refuse(not bool(one), "documents that begin at different tokens in different rows: pack a single row")
        position_ids = position_ids[:1]
    begins = document_starts(input_ids[:1], position_ids, cu_seq_lens_q, cu_seq_lens_k)
    bounds: tuple[int, ...] = (*begins[0].nonzero().flatten().tolist(), s)
    if len(bounds) == 2 and not (cp.layout == DOCUMENTS and cp.size > 1):
        bounds = ()
    more = cp.layout.padded(s, cp.size) - s
    if more:
        input_ids, following = pad(input_ids, (0, more)), pad(following, (0, more), value=IGNORED)
        bounds = (*bounds, s + more) if bounds else ()
    running = position_ids is not None and bool((position_ids.diff(dim=1) == 1).all())
    return part(cp, input_ids, following, bounds, running)


def part(
    cp: ContextParallel, input_ids: Tensor, following: Tensor | None, bounds: tuple[int, ...], running: bool = False
) -> dict[str, Any]:
    """Return what ``shard`` returns, for labels ``[b, s]`` that are shifted already, or for none.

    running: whether positions go on from document to document.
    """
    cp, positions = placed(cp, bounds), torch.arange(input_ids.size(1))
    if bounds and not running:
        positions -= starts(bounds, positions)
    batch: dict[str, Any] = {
        "input_ids": cp.shard(input_ids, 1),
        "position_ids": cp.shard(positions.to(input_ids.device).expand(input_ids.shape), 1),
        "past_key_values": ShardMark(bounds),
    }
    if following is not None:
        batch["labels"] = batch["shift_labels"] = cp.shard(following, 1)
        batch["num_items_in_batch"] = (following != IGNORED).sum()
    batch[DIGEST] = torch.stack([digest(input_ids), digest(input_ids if following is None else following)])
    if bounds:
        batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.tensor(bounds, dtype=torch.int32)
    return batch


def shard_tree(cp: ContextParallel, input_ids: Tensor, tree: Tree, labels: Tensor | None = None) -> dict[str, Any]:
    """``shard`` for a pack of sequences with common prefixes: an answer is predicted from its prompt and itself.

    A token that several sequences share is computed, and counts in the loss, once; the first token of each answer is
    predicted from the end of the prompt.

    Args:
        input_ids: int ``[b, s]``: in each row a pack of the tree's ``s`` tokens, node after node.
        labels: int ``[b, s]``: each token's own label; -100 is not counted. None: the input.

    Returns:
        What ``shard`` returns, with the tree for the attention, position_ids that count along paths, labels
        ``[b, predictions]``, and in ``logits_to_keep`` the tokens that predict them: the end of a prompt once per
        answer.

    Raises:
        ValueError: for other shapes, or a length that cannot be divided.
    """
    labels = input_ids if labels is None else labels
    if input_ids.dim() != 2 or input_ids.size(1) != tree.seq_length or labels.shape != input_ids.shape:
        shapes = f"{list(input_ids.shape)} and {list(labels.shape)}"
        raise ValueError(f"input_ids and labels must be [b, {tree.seq_length}], the tokens of the tree, got {shapes}")
    device = input_ids.device
    rows, targets = tree.predictions(cp.positions(tree.seq_length, device))
    every_target = tree.predictions(torch.arange(tree.seq_length, device=device))[1]
    return {
        "input_ids": cp.shard(input_ids, 1),
        "position_ids": cp.shard(tree.position_ids().to(device)).expand(input_ids.size(0), -1),
        **dict.fromkeys(("labels", "shift_labels"), labels[:, targets]),
        "num_items_in_batch": (labels[:, every_target] != IGNORED).sum(),
        "logits_to_keep": rows,
        "tree": tree,
        DIGEST: torch.stack([digest(input_ids), digest(labels)]),
        "past_key_values": ShardMark(),
    }


def digest(x: Tensor) -> Tensor:
    """int64: almost surely another for other integers or shapes; on x's device, without waiting for it."""
    weights = torch.arange(1, x.numel() + 1, device=x.device) * 0x1E3779B97F4A7C15 + x.size(-1)
    return ((x.flatten() + 0x2545F491) * (weights ^ (weights >> 31))).sum()


def starts(bounds: tuple[int, ...], positions: Tensor) -> Tensor:
    """The first position of each token's document."""
    edges = copied(torch.tensor(bounds), positions.device)
    return edges[torch.searchsorted(edges, positions, right=True) - 1]


def require_shape(name: str, x: Tensor, input_ids: Tensor) -> None:
    """ValueError for what is not of all rows or, if positions, of one."""
    shapes = (input_ids.shape, (1, input_ids.size(1))) if name == "position_ids" else (input_ids.shape,)
    refuse(x.shape not in shapes, f"`{name}` of {list(x.shape)} for input_ids of {list(input_ids.shape)}")


def document_starts(
    input_ids: Tensor,
    position_ids: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    real: Tensor | None = None,
) -> Tensor:
    """1 where a document of rows ``[b, s]`` begins, int64 like them; bounds are of all rows, one behind the other.

    real: 0 where there is padding; None: nowhere. ValueError for what does not describe documents.
    """
    starts, real = torch.zeros_like(input_ids), torch.ones_like(input_ids) if real is None else real
    if position_ids is not None:
        starts[:, 1:] = (position_ids.expand(starts.shape).diff(dim=1) != 1) & (real[:, 1:] != 0)
    if cu_seq_lens_q is not None:
        bounds, by_positions = document_bounds(cu_seq_lens_q, starts.numel()), starts
        other = cu_seq_lens_k is not None and document_bounds(cu_seq_lens_k, starts.numel()) != bounds
        refuse(other, "other cu_seq_lens_k than _q")
        starts = torch.zeros_like(input_ids)
        starts.view(-1)[list(bounds[:-1])] = 1
        starts[:, 0] = 0
        apart = bool(by_positions.any()) and not torch.equal(by_positions, starts)
        refuse(apart, "other documents by position_ids than by bounds")
    starts[:, 0] = 1
    if position_ids is not None:
        index = torch.arange(starts.size(1), device=starts.device).expand(starts.shape)
        counted = index - (index * starts).cummax(dim=1).values
        known = (counted, index) if cu_seq_lens_q is not None else (counted,)
        wrong = all(bool(((position_ids != count) & (real != 0)).any()) for count in known)
        refuse(wrong, "position_ids that do not count from 0 in each document")
    return starts
