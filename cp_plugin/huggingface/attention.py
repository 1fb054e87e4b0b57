"""A model's division over ranks: what transformers calls in the place of its attention, its masks and linear layers."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.packs import place_documents
from cp_plugin.core.tree import Tree
from cp_plugin.huggingface.masks import Reader, Sight, unreadable
from cp_plugin.placement.documents import DOCUMENTS


class Call(NamedTuple):
    """What the layers need to know of the call of the model that they are part of."""

    seq_length: int = 0
    """Of the whole sequence."""
    last_position: int = 0
    """Largest of all ranks' position_ids."""
    documents: tuple[int, ...] = ()


class Probe(Protocol):
    """Takes the place of attention while a model is examined."""

    def mask(self, **arguments: Any) -> Tensor | None: ...

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any
    ) -> Tensor:
        """``[b, heads, s, d]`` -> ``[b, s, heads, d]``."""


class Division:
    """Entries of transformers' AttentionInterface and AttentionMaskInterface for one model."""

    def __init__(self, cp: ContextParallel, name: str, before: str) -> None:
        self.cp, self.name, self.before = cp, name, before
        self.linear: ContextParallel | None = None
        """For layers of linear attention, on the same tokens."""
        self.call = Call()
        self.probe: Probe | None = None
        self.ignored: set[str] = set()
        """Arguments that did not reach a layer that needs them."""
        self._masks = Reader()

    def __deepcopy__(self, memo: dict[int, Any]) -> Division:
        """A copied model attends over the same ranks."""
        return self

    def __reduce__(self) -> Any:
        raise ValueError(
            "a sharded model cannot be pickled, because process groups cannot: save it with model.save_pretrained(...) "
            "or model.state_dict(), or call huggingface.undo(model) first"
        )

    def on(self, documents: tuple[int, ...]) -> ContextParallel:
        """Where the tokens of this pack are."""
        return placed(self.cp, documents)

    def mask(self, **arguments: Any) -> Tensor | None:
        """An entry of AttentionMaskInterface."""
        if self.probe is not None:
            return self.probe.mask(**arguments)
        refuse(
            arguments["kv_length"] * self.cp.size != self.call.seq_length,
            f"a mask over {arguments['kv_length']} tokens in a shard of {self.call.seq_length // self.cp.size}",
        )
        if arguments.get("use_vmap"):
            return unreadable("a mask function of the model's own")
        try:
            sight = self._masks.read(arguments["mask_function"], self.call.seq_length)
        except ValueError as problem:
            return unreadable(str(problem))
        return Sight(sight.left, sight.right, self.call.documents).as_tensor()

    def attention(
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
        """An entry of AttentionInterface: ``[b, heads, s / size, d]`` -> ``[b, s / size, heads, d]``."""
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if self.probe is not None:
            options = {"scaling": scaling, "dropout": dropout, "is_causal": is_causal, "s_aux": s_aux, **others}
            options["sliding_window"] = sliding_window
            return self.probe.attention(module, query, key, value, attention_mask, **options), None
        refuse_options(others, dropout)
        refuse(query.size(2) != key.size(2), "a key/value cache: train with use_cache=False")
        if attention_mask is None:
            refuse(sliding_window is not None and not causal, "a sliding window without a causal mask")
            documents = self.call.documents
            sight = Sight(None if sliding_window is None else sliding_window - 1, 0 if causal else None, documents)
        else:
            sight = self.sight(attention_mask)
        if tree is None:
            self.ignored.add("tree")
        return self.attend(sight, query, key, value, scaling=scaling, sink=s_aux, tree=tree), None

    def attend(self, sight: Sight, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        out = self.on(sight.documents).attention(
            *(x.permute(2, 0, 1, 3) for x in (query, key, value)),
            causal=sight.causal,
            window=sight.window,
            cu_seqlens=torch.tensor(sight.documents) if sight.documents else None,
            **{"scale": options.pop("scaling"), **options},
        )
        return out.transpose(0, 1).contiguous()

    @staticmethod
    def sight(mask: Tensor) -> Sight:
        try:
            sight = Sight.from_tensor(mask)
        except ValueError as problem:
            refuse(True, str(problem))
        refuse(sight is None, "a custom mask")
        assert sight is not None
        return sight


def placed(cp: ContextParallel, documents: tuple[int, ...]) -> ContextParallel:
    """Where the tokens of a pack are: ``cp`` itself, unless its layout is one for documents."""
    if cp.layout == DOCUMENTS and documents:
        return place_documents(cp, torch.tensor(documents))
    return cp


_CHANGES_THE_RESULT = ("softcap", "position_bias", "indices", "block_indices", "cache", "head_mask", "alibi")


def refuse_options(options: dict[str, Any], dropout: float) -> None:
    """ValueError for options of an attention call that ``ContextParallel.attention`` does not have."""
    refuse(dropout > 0, f"attention dropout of {dropout:g}: set the model's attention_dropout to 0")
    unknown = {name for name in _CHANGES_THE_RESULT if options.get(name) is not None}
    refuse(bool(unknown), ", ".join(sorted(unknown)))


def refuse(wrong: bool, what: str) -> None:
    if wrong:
        raise ValueError(f"context parallelism for transformers models does not support {what}")
