"""Is the loss the cross entropy of next tokens, and do the ranks' losses add up to it?"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from cp_plugin.attention.agreement import gathered
from cp_plugin.huggingface.attention import Call, Division
from cp_plugin.huggingface.batch import IGNORED, shard
from cp_plugin.huggingface.structure import TOKENS, Alone, not_next_token, probing, tokens, unchanged

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LIMIT = 1e-4
"""Relative difference of two losses of the same logits, in float32."""


def require_next_token_loss(model: PreTrainedModel, division: Division) -> None:
    """Compare losses with cross entropies of the logits from the same call: on one rank, and over all; collective.

    Raises:
        ValueError: for a head with another loss, or one that ignores ``shift_labels`` or ``num_items_in_batch``.
    """
    if "labels" not in inspect.signature(type(model).forward).parameters:
        return
    size = division.on((0, TOKENS * division.cp.size)).layout.padded(TOKENS * division.cp.size, division.cp.size)
    ids = tokens(model, size)[:2]
    labels = ids.flip(0).roll(3, 1).clone()
    labels[:, : size // 3] = IGNORED  # ranks then have different numbers of labels
    count = int((labels[:, 1:] != IGNORED).sum())
    for training in (False, True):
        with probing(model, division, Alone()):
            model.train(training)
            division.call = Call(size, size - 1)
            _alone(model, ids, labels, count)
    batch = shard(division.cp, ids, labels)
    for items in (count, 2 * count, None):
        with unchanged(model):
            result = model.eval()(**batch | {"num_items_in_batch": items}, use_cache=False)
        losses = gathered(division.cp.mesh, result.loss.detach().double().view(1))
        cp = division.on((0, size))
        logits = cp.unshard(result.logits, 1)
        want = _cross_entropy(logits, labels, items or count)
        _compare(
            model, losses.sum(), want, f"the losses of {cp.size} ranks, with num_items_in_batch={items}, add up to"
        )


def _alone(model: PreTrainedModel, ids: Tensor, labels: Tensor, count: int) -> None:
    for items in (None, 2 * count):
        more: dict[str, Any] = {} if items is None else {"num_items_in_batch": items}
        try:
            result = model(input_ids=ids, labels=labels, use_cache=False, **more)
            loss, logits = result.loss, result.logits
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            raise not_next_token(model, f"calling it with labels fails: {error}") from error
        if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape or loss is None or loss.dim():
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise not_next_token(model, f"for input_ids {list(ids.shape)} its logits are {shape}")
        want = _cross_entropy(logits, labels, items or count)
        how = "" if items is None else f", with num_items_in_batch={items},"
        _compare(model, loss, want, f"its loss on one rank{how} is")


def _cross_entropy(logits: Tensor, labels: Tensor, items: int) -> Tensor:
    following = pad(labels[:, 1:], (0, 1), value=IGNORED)
    return (
        cross_entropy(logits.float().flatten(0, 1), following.flatten(), ignore_index=IGNORED, reduction="sum") / items
    )


def _compare(model: PreTrainedModel, loss: Tensor, want: Tensor, whose: str) -> None:
    got, expected = loss.item(), want.item()
    if not abs(got - expected) <= _LIMIT * abs(expected):
        raise not_next_token(model, f"{whose} {got:.6g}, and the cross entropy of its logits is {expected:.6g}")
