"""Hugging Face transformers: distribute a model's attention over the ranks of a ``ContextParallel``.

    cp = cp_plugin.ContextParallel("striped", group=group)
    huggingface.apply(model, cp)
    loss = model(**huggingface.shard(cp, input_ids)).loss     # this rank's summand of the mean over all tokens

The ranks' losses add up to the loss, and their gradients to its gradient. DistributedDataParallel and FSDP average
over ranks: multiply the loss by their number. Use ``shard_tree`` instead of ``shard`` for packed sequences with common
prefixes. Needs transformers 5: pip install 'cp-plugin[huggingface]'.
"""

from __future__ import annotations

import inspect
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from cp_plugin.attention.api import ContextParallel
from cp_plugin.core.tree import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORED = -100
"""Label of a token that is not predicted, as in transformers."""
_CHECKED_TOKENS = 16
_numbers = count()


def shard(cp: ContextParallel, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
    """This rank's part of a replicated batch, as keyword arguments of a causal language model.

    Args:
        input_ids: int ``[b, s]``.
        labels: int ``[b, s]``, not shifted; -100 is not counted. None: the input.

    Returns:
        ``input_ids``, ``position_ids`` and ``labels`` ``[b, s / size]``, the last shifted over the whole sequence, and
        what keeps the model from shifting them again and from dividing by its own count of tokens.

    Raises:
        ValueError: for other shapes, or a length that cannot be divided.
    """
    labels = input_ids if labels is None else labels
    if input_ids.dim() != 2 or labels.shape != input_ids.shape:
        raise ValueError(f"input_ids and labels must be [b, s], got {list(input_ids.shape)} and {list(labels.shape)}")
    following = pad(labels[:, 1:], (0, 1), value=IGNORED)
    mine = cp.shard(following, 1)
    positions = cp.positions(input_ids.size(1), input_ids.device)
    return {
        "input_ids": cp.shard(input_ids, 1),
        "position_ids": positions.expand(input_ids.size(0), -1),
        "labels": mine,
        "shift_labels": mine,
        "num_items_in_batch": (following != IGNORED).sum(),
    }


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
        found = f"{list(input_ids.shape)} and {list(labels.shape)}"
        raise ValueError(f"input_ids and labels must be [b, {tree.seq_length}], the tokens of the tree, got {found}")
    device = input_ids.device
    rows, targets = tree.predictions(cp.positions(tree.seq_length, device))
    of_all_ranks = tree.predictions(torch.arange(tree.seq_length, device=device))[1]
    mine = labels[:, targets]
    return {
        "input_ids": cp.shard(input_ids, 1),
        "position_ids": cp.shard(tree.position_ids().to(device)).expand(input_ids.size(0), -1),
        "labels": mine,
        "shift_labels": mine,
        "num_items_in_batch": (labels[:, of_all_ranks] != IGNORED).sum(),
        "logits_to_keep": rows,
        "tree": tree,
    }


def apply(model: PreTrainedModel, cp: ContextParallel, *, check: bool = True) -> None:
    """Distribute the model's attention over the ranks of ``cp``; collective. It takes shards only from then on.

    ``model.set_attn_implementation("sdpa")`` undoes it.

    Args:
        check: first compare the model's output for a few tokens with its own attention's. This finds layers that mix
            tokens by other means than attention, which would be wrong without an error.

    Raises:
        ImportError: without transformers.
        ValueError: for a model that is not text only, that cannot exchange its attention, or whose output differs.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as missing:
        raise ImportError("needs transformers 5 or newer: pip install 'cp-plugin[huggingface]'") from missing
    config = model.config
    if config.is_encoder_decoder or config.sub_configs:
        raise ValueError(f"{type(model).__name__}: only models of text alone, without an encoder, can be divided")
    if getattr(config, "output_router_logits", False):
        raise ValueError("output_router_logits: each rank would balance its own tokens only; set it to False")
    name, before = f"cp_plugin_{next(_numbers)}", config._attn_implementation
    attention = _Attention(cp, name)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _refuse_masks)
    whole = _check_input(model, cp)
    want = _output(model, input_ids=whole) if check else None
    try:
        model.set_attn_implementation(name)
        if config._attn_implementation != name:
            raise ValueError(
                f"{type(model).__name__} does not take its attention from transformers' AttentionInterface"
            )
        if want is not None and (error := _difference(model, cp, whole, want)) > (limit := _allowed(want.dtype)):
            raise ValueError(
                f"{type(model).__name__} differs between {cp.size} ranks and one (relative error {error:.1e}, allowed "
                f"{limit:g}): something in it mixes tokens by other means than attention"
            )
    except BaseException:
        model.set_attn_implementation(before)
        raise
    model.register_forward_pre_hook(attention.before, with_kwargs=True)
    model.register_forward_hook(attention.after, with_kwargs=True)


class _Attention:
    """An entry of transformers' AttentionInterface, and hooks around a model that uses it."""

    def __init__(self, cp: ContextParallel, name: str) -> None:
        self.cp, self.name = cp, name
        self.without_tree = 0
        """Calls that were given none."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        tree: Tree | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """query, key, value ``[b, heads, s / size, d]`` -> ``[b, s / size, heads, d]``."""
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        others = {name: x for name, x in others.items() if name in _CHANGES_THE_RESULT and x is not None}
        _refuse(attention_mask is not None, "a mask of your own")
        _refuse(dropout > 0, f"attention dropout of {dropout:g}: set the model's attention_dropout to 0")
        _refuse(query.size(2) != key.size(2), "a cache of keys and values: training only, with use_cache=False")
        _refuse(sliding_window is not None and not causal, "a sliding window without a causal mask")
        _refuse(bool(others), ", ".join(others))
        kinds = getattr(getattr(module, "config", None), "layer_types", None)
        kind = kinds[module.layer_idx] if kinds else "full_attention"
        _refuse(kind not in _WINDOWED, f"a layer of {kind}")
        _refuse(_WINDOWED.get(kind, False) and sliding_window is None, "a sliding window that only its mask knows")
        self.without_tree += tree is None
        out = self.cp.attention(
            *(x.permute(2, 0, 1, 3) for x in (query, key, value)),
            causal=causal,
            scale=scaling,
            window=None if sliding_window is None else (sliding_window - 1, 0),
            tree=tree,
            sink=s_aux,
        )
        return out.transpose(0, 1).contiguous(), None

    def before(self, model: PreTrainedModel, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Refuse what would be wrong without an error."""
        if model.config._attn_implementation != self.name:
            return
        self.without_tree = 0
        tree, positions = given.get("tree"), given.get("position_ids")
        if positions is None or not self._are_here(positions, tree):
            raise ValueError(
                "position_ids must be those of this rank's tokens: call model(**huggingface.shard(cp, ...))"
            )
        if given.get("labels") is not None and given.get("shift_labels") is None:
            raise ValueError("labels would be shifted inside each shard: call model(**huggingface.shard(cp, ...))")
        if tree is not None and "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise ValueError(
                f"{type(model).__name__} takes no logits_to_keep, by which the end of a prompt predicts several "
                "answers: it cannot train on a tree"
            )

    def after(self, model: PreTrainedModel, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
        """A model may swallow an argument that it does not know."""
        if model.config._attn_implementation == self.name and "tree" in given and self.without_tree:
            raise ValueError(f"{type(model).__name__} does not pass `tree` on to its attention: it cannot train on one")

    def _are_here(self, positions: Tensor, tree: Tree | None) -> bool:
        cp, tokens = self.cp, positions.size(-1) * self.cp.size
        if tree is None:
            here = cp.positions(tokens)
        elif tree.seq_length == tokens:
            here = cp.shard(tree.position_ids())
        else:
            return False
        return torch.equal(positions.cpu(), here.expand(positions.shape))


_CHANGES_THE_RESULT = (
    "softcap",
    "position_bias",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "indices",
    "block_indices",
    "cache",
)
_WINDOWED = {"full_attention": False, "sliding_attention": True}
"""Kind of layer -> whether it has a sliding window."""


def _refuse(wrong: bool, what: str) -> None:
    if wrong:
        raise ValueError(f"context parallelism over a transformers model cannot do this: {what}")


def _refuse_masks(*, attention_mask: Tensor | None = None, use_vmap: bool = False, **others: Any) -> None:
    """An entry of transformers' AttentionMaskInterface: allows only masks that the plugin does not need."""
    _refuse(attention_mask is not None and not bool(attention_mask.all()), "padding: pack or cut the sequences")
    _refuse(use_vmap, "a mask function of the model's own")


def _check_input(model: PreTrainedModel, cp: ContextParallel) -> Tensor:
    tokens = torch.arange(_CHECKED_TOKENS * cp.size, device=model.device) * 7919  # a prime: they differ
    return (tokens % model.config.vocab_size)[None]


def _output(model: PreTrainedModel, **batch: Tensor) -> Tensor:
    """Logits, or what a model without a head returns, of whole sequences or a shard."""
    training = model.training
    try:
        with torch.no_grad():
            return model.eval()(**batch, use_cache=False)[0]
    finally:
        model.train(training)


def _difference(model: PreTrainedModel, cp: ContextParallel, whole: Tensor, want: Tensor) -> float:
    batch = shard(cp, whole)
    mine = _output(model, input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    got = cp.unshard(mine, 1)
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def _allowed(dtype: torch.dtype) -> float:
    """Far above rounding, far below the effect of wrong mixing."""
    return 0.05 if dtype.itemsize < 4 else 1e-3
