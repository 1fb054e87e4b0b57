"""Is the loss the cross entropy of next tokens, and do the ranks' losses add up to it?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from cp_plugin.attention.agreement import gathered
from cp_plugin.huggingface.attention import Call, Division
from cp_plugin.huggingface.batch import IGNORED, shard
from cp_plugin.huggingface.model import forwards
from cp_plugin.huggingface.structure import TOKENS, Alone, Plain, not_next_token, probing, tokens, unchanged

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LIMIT = 1e-4
"""Relative difference of two losses of the same logits, in float32."""


def require_next_token_loss(model: PreTrainedModel, division: Division) -> None:
    """Compare losses with cross entropies of the logits from the same call: on one rank, and over all; collective.
    ValueError for a head with another loss, or one that ignores ``shift_labels`` or ``num_items_in_batch``."""
    if "labels" not in forwards(model)[0].parameters():
        return
    size = division.on((0, TOKENS * division.cp.size)).layout.padded(TOKENS * division.cp.size, division.cp.size)
    ids = tokens(model, size)[:2]
    labels = ids.flip(0).roll(3, 1).clone()
    labels[:, : size // 3] = IGNORED  # ranks then have different numbers of labels
    count = int((labels[:, 1:] != IGNORED).sum())
    batch = shard(division.cp, ids, labels)
    mine = {key: batch[key] for key in ("input_ids", "position_ids", "labels", "shift_labels")}
    for training in (False, True):
        with probing(model, division, Alone()), Plain(False):
            model.train(training)
            division.call = Call(size, size - 1)
            _alone(model, ids, labels, count)
            result = model(**mine, num_items_in_batch=2 * count, use_cache=False)
            logits = _logits(model, result, mine["input_ids"], mine["position_ids"])
        _over_ranks(model, division, result.loss, logits, labels, 2 * count)
    for items in (count, None):
        with unchanged(model):
            result = model.eval()(**batch | {"num_items_in_batch": items}, use_cache=False)
        _over_ranks(model, division, result.loss, result.logits, labels, items)


def _over_ranks(
    model: PreTrainedModel, division: Division, loss: Tensor, logits: Tensor, labels: Tensor, items: int | None
) -> None:
    losses = gathered(division.cp.mesh, loss.detach().double().view(1))
    count = items or int((labels[:, 1:] != IGNORED).sum())
    want = _cross_entropy(division.on((0, labels.size(1))).unshard(logits, 1), labels, count)
    how = f"the losses of {division.cp.size} ranks, with num_items_in_batch={items}, add up to"
    _compare(model, losses.sum(), want, how)


def _logits(model: PreTrainedModel, result: Any, ids: Tensor, positions: Tensor | None = None) -> Any:
    """Those of the call, or of another, where training fuses the head with the loss and makes none."""
    if result.logits is not None or not model.training:
        return result.logits
    model.eval()
    try:
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits
    finally:
        model.train()


def _alone(model: PreTrainedModel, ids: Tensor, labels: Tensor, count: int) -> None:
    for items in (None, 2 * count):
        more: dict[str, Any] = {} if items is None else {"num_items_in_batch": items}
        try:
            result = model(input_ids=ids, labels=labels, use_cache=False, **more)
            loss, logits = result.loss, _logits(model, result, ids)
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
