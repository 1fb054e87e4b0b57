"""Hidden states and log-probabilities of whole rows, for losses of one's own (DPO, GRPO, distillation, value heads).

The logits of all tokens are never in memory: the head runs on a few tokens at a time, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.huggingface.attention import placed, refuse
from cp_plugin.huggingface.batch import IGNORED, shard
from cp_plugin.huggingface.rows import ASKED

if TYPE_CHECKING:
    from cp_plugin.huggingface.model import Forward

_AT_ONCE = 2048
"""Tokens whose logits are in memory at once."""


def hidden_states(
    model: nn.Module,
    cp: ContextParallel,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor:
    """The last hidden states of whole rows, on every rank; collective.

    Differentiable, as a replicated tensor is: every rank computes the same from it, and the parameters' gradients are
    summed over the ranks. DistributedDataParallel and FSDP average them: multiply the loss by the number of ranks.

    Args:
        model: a divided model, or a wrapper around one.
        cp: that it is divided by.
        input_ids: int ``[b, s]``, the same on every rank; s of any length.
        attention_mask: ``[b, s]``, 0 for padding on the left or right, where the result is 0. Positions count from a
            row's first token.
        position_ids, cu_seq_lens_q: of packs, as for ``shard``.

    Returns:
        ``[b, s, hidden size]`` in the model's dtype.

    Raises:
        ValueError: for a model that is not divided by ``cp``, or arguments that do not fit.
    """
    packs = {"position_ids": position_ids, "cu_seq_lens_q": cu_seq_lens_q}
    return _score_rows(model, cp, input_ids, None, attention_mask, packs)


def log_probabilities(
    model: nn.Module,
    cp: ContextParallel,
    input_ids: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = 1.0,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor:
    """The log-probability of each token of whole rows, given those before it, on every rank; collective.

    Logits are computed for 2048 tokens at a time, and again in the backward. Otherwise like ``hidden_states``.

    Args:
        labels: int ``[b, s]``, not shifted: the tokens to ask for; where -100, the result is 0. None: the input. In a
            pack the first label of each document should be -100.
        temperature: divides the logits.

    Returns:
        float32 ``[b, s - 1]``: at t that of ``labels[:, t + 1]``.
    """
    labels = input_ids if labels is None else labels
    packs = {"position_ids": position_ids, "cu_seq_lens_q": cu_seq_lens_q}
    return _score_rows(model, cp, input_ids, labels, attention_mask, packs, temperature)[:, :-1]


def _score_rows(
    model: nn.Module,
    cp: ContextParallel,
    ids: Tensor,
    labels: Tensor | None,
    mask: Tensor | None,
    packs: dict[str, Any],
    temperature: float = 1.0,
) -> Tensor:
    targets, padding, order = (ids if labels is None else labels), None, None
    if mask is not None:
        refuse(mask.shape != ids.shape, f"an attention_mask of {list(mask.shape)} for {list(ids.shape)}")
        refuse(any(x is not None for x in packs.values()), "packs that are padded by an attention_mask")
        padding = mask == 0
        runs = (pad((~padding).long(), (1, 0)).diff(dim=1) > 0).sum(1)
        refuse(bool((runs > 1).any()), "an attention_mask with zeros between ones")
        order = padding.sort(dim=1, stable=True).indices
        ids, targets = ids.gather(1, order), targets.masked_fill(padding, IGNORED).gather(1, order)
    batch = shard(cp, ids, targets, **packs)
    own_targets = batch.pop("labels")
    del batch["shift_labels"], batch["num_items_in_batch"]
    request = _Request(cp, None if labels is None else own_targets, temperature)
    output = model(**batch, use_cache=False, **{ASKED: request})
    refuse(not isinstance(output, dict) or ASKED not in output, "a model that is not divided: call apply first")
    result = placed(cp, batch["past_key_values"].documents).unshard(output[ASKED], 1)[:, : ids.size(1)]
    if padding is None or order is None:
        return result
    if labels is None:
        order, padding = order[..., None].expand(result.shape), padding[..., None]
    return result.new_zeros(result.shape).scatter(1, order, result).masked_fill(padding, 0)


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """What a divided model is asked for, instead of its output; it travels through wrappers as one of its arguments."""

    cp: ContextParallel
    targets: Tensor | None
    """``[b, s / size]``: whose log-probabilities; None: hidden states."""
    temperature: float

    def compute(self, forward: Forward, named: dict[str, Any]) -> dict[str, Tensor]:
        model, kept = forward.model, []
        refuse(forward.division.cp is not self.cp, "another ContextParallel than the one of apply")
        head, inner = model.get_output_embeddings(), getattr(model, model.base_model_prefix, None)
        if head is None or inner is None:
            refuse(self.targets is not None, f"log-probabilities of {type(model).__name__}, which has no head")
            return {ASKED: forward.run(named)[0]}
        handles = [
            inner.register_forward_hook(lambda _, args, output: kept.append(output[0])),
            head.register_forward_pre_hook(lambda _, args: (args[0][:, :1], *args[1:])),
        ]
        try:
            logits = forward.run(named).logits
        finally:
            for handle in handles:
                handle.remove()
        refuse(len(kept) != 1, f"{type(model).__name__}, whose head is not applied once to its inner model's output")
        (x,) = kept
        if self.targets is None:
            return {ASKED: x}
        with torch.no_grad():
            again = self._logits(forward, x[:, :1])
        same = again.shape == logits.shape and bool(torch.isclose(again, logits.float(), rtol=1e-2, atol=1e-2).all())
        refuse(not same, f"{type(model).__name__}, whose logits are not a function of its inner model's output")
        n = max(1, _AT_ONCE // len(x))
        pairs = zip(x.split(n, 1), self.targets.split(n, 1), strict=True)
        return {ASKED: torch.cat([checkpoint(self._some, forward, *pair, use_reentrant=False) for pair in pairs], 1)}

    def _some(self, forward: Forward, x: Tensor, targets: Tensor) -> Tensor:
        logits = self._logits(forward, x) / self.temperature
        chosen = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0] - logits.logsumexp(-1)
        return chosen.masked_fill(targets == IGNORED, 0)

    @staticmethod
    def _logits(forward: Forward, x: Tensor) -> Tensor:
        """Run the model's own head, with all that it, or a later wrapper of its forward, does to logits; float32."""
        model, division = forward.model, forward.division
        name, inside = model.base_model_prefix, division.inside
        done = nn.Module()  # an inner model that has run already
        done.forward = lambda *args, **named: _Output((x,))
        usual, model._modules[name], division.inside = model._modules[name], done, True
        try:
            ids = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
            return model.forward(input_ids=ids, use_cache=False).logits.float()
        finally:
            model._modules[name], division.inside = usual, inside


class _Output(tuple):
    """An inner model's output, with hidden states only."""

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None
