"""Attention and the loss over all ranks against those that the model had.

Attention is compared layer by layer, on the same numbers.

Each layer's own call is kept (its mask, scale, window, sinks), but queries, keys and values are drawn anew, in float32
and large enough that caps and sinks are felt: so no error is hidden by the rest of the model, by its initialisation or
by its dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from cp_plugin.attention.agreement import gathered
from cp_plugin.huggingface.attention import Call, Division
from cp_plugin.huggingface.batch import IGNORED, shard
from cp_plugin.huggingface.masks import Reader
from cp_plugin.huggingface.model import forwards
from cp_plugin.huggingface.structure import (
    MOST_TOKENS,
    TOKENS,
    WINDOWS,
    Alone,
    Plain,
    allowed,
    body,
    lengths,
    not_next_token,
    probing,
    tokens,
    unchanged,
)
from cp_plugin.placement.documents import DOCUMENTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Both:
    """Compares the two, and answers with the model's own numbers."""

    def __init__(self, division: Division, model: PreTrainedModel) -> None:
        self.division, self.model, self.reader, self.layers = division, model, Reader(), 0
        self.masks: dict[int, tuple[Tensor, Tensor]] = {}
        """By its id, a mask of the model's own attention, and what the division reads of it."""

    def mask(self, **arguments: Any) -> Tensor | None:
        """The mask of the model's own attention."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        read = self.reader.stand_in(arguments, arguments["kv_length"], self.division.call.documents)
        expanded = ALL_MASK_ATTENTION_FUNCTIONS[self.division.before](
            **arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        )
        if isinstance(expanded, Tensor):
            self.masks[id(expanded)] = expanded, read
        return expanded

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Tensor:
        division, self.layers = self.division, self.layers + 1
        own = _own(division.before, module)
        generator = torch.Generator().manual_seed(self.layers)
        dtype = query.dtype if "flash" in division.before or query.dtype == torch.float64 else torch.float32
        q, k, v = (
            (torch.randn(x.shape, generator=generator) * std).to(x.device, dtype)
            for x, std in ((query, 3), (key, 1), (value, 1))
        )
        cp, read = division.on(division.call.documents), self.masks.get(id(mask), (mask, mask))[1]
        mine = division.over_ranks(module, *(cp.shard(x, 2) for x in (q, k, v)), read, **options)
        got = cp.unshard(mine, 1)
        mask_of_q = mask
        if mask is not None and mask.is_floating_point():
            mask_of_q = mask.to(dtype).clamp_min(torch.finfo(dtype).min)
        want = own(module, q, k, v, mask_of_q, **options)[0]
        error = ((got - want).double().norm(dim=-1) / want.double().norm(dim=-1).clamp_min(1e-3)).max().item()
        if not error <= (limit := allowed(dtype)):
            kinds = getattr(getattr(module, "config", None), "layer_types", None)
            index = getattr(module, "layer_idx", None)
            kind = f", a layer of {kinds[index]}" if kinds and isinstance(index, int) and index < len(kinds) else ""
            raise ValueError(
                f"{type(self.model).__name__}: attention differs between {cp.size} ranks and one in "
                f"{type(module).__name__} {self.layers} of {q.size(2)} tokens{kind} (relative error {error:.1e}, "
                f"allowed {limit:g}): it does something unknown to the plugin"
            )
        return own(module, query, key, value, mask, **options)[0]


def require_same_attention(model: PreTrainedModel, division: Division) -> None:
    """On whole sequences as long as the largest window in the config; collective. ValueError naming the layer."""
    cp, both = division.cp, Both(division, model)
    longest = max((n for n in lengths(model.config, WINDOWS) if n <= MOST_TOKENS), default=0)
    size = max(TOKENS * cp.size, longest + longest // 2)
    size = cp.layout.padded(size, cp.size)
    with probing(model, division, both):
        model.eval()
        division.call = Call(size, size - 1, (0, size) if cp.layout == DOCUMENTS else ())
        body(model, input_ids=tokens(model, size)[:1])


def _own(before: str, module: nn.Module) -> Callable[..., Any]:
    """transformers' function of that name for a layer."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    default = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get(before, default)


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
