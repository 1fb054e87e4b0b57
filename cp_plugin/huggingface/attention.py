"""A model's division over ranks: what transformers calls in the place of its attention, its masks and linear layers."""

from __future__ import annotations

from copy import deepcopy
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cp_plugin.engine.attention.agreement import Calls
from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.packs import place_documents
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.tree import Tree
from cp_plugin.engine.placement.documents import DOCUMENTS
from cp_plugin.huggingface.masks import Reader, from_tensor

UNSUPPORTED = "context parallelism for transformers models does not support {}"
_numbers = count()


class Call(NamedTuple):
    """What the layers need to know of the call of the model that they are part of."""

    seq_length: int = 0
    """Of the whole sequence."""
    last_position: int | Tensor = 0
    """Largest of all ranks' position_ids."""
    documents: tuple[int, ...] = ()


class ShardMark:
    """Stands for the key/value cache in the batch of a shard: a model that is not divided looks at it, and fails."""

    _ASKED = (
        *("get_query_offset", "get_mask_sizes", "get_seq_length", "get_max_cache_shape", "get_max_length", "update"),
        *("is_compileable", "is_sliding", "is_initialized", "layers", "self_attention_cache", "has_previous_state"),
    )
    """Of caches; frameworks that carry a batch may look for other attributes."""

    def __init__(self, documents: tuple[int, ...] = ()) -> None:
        self.documents = documents
        """Their bounds, known to the host; empty: one document."""

    def __getattr__(self, name: str) -> Any:
        if name not in self._ASKED:
            raise AttributeError(name)
        return self[0]

    def __getitem__(self, index: Any) -> Any:
        raise ValueError(
            "a shard was passed to a model that is not divided: call huggingface.apply(model, cp) first, again after "
            "huggingface.undo or set_attn_implementation, and for each model that takes shards"
        )


class Probe(Protocol):
    """Takes the place of attention while a model is examined."""

    own: bool
    """Whether linear layers then are those of the model that is not divided; else they, too, see one token only."""

    def mask(self, **arguments: Any) -> Tensor | None: ...

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any
    ) -> Tensor:
        """``[b, heads, s, d]`` -> ``[b, s, heads, d]``."""


class Division:
    """Entries of transformers' AttentionInterface and AttentionMaskInterface for one model."""

    def __init__(self, cp: ContextParallel, config: Any) -> None:
        """config: the model's, which names its attention: the division is in force as long as that is this one."""
        from transformers import AttentionInterface, AttentionMaskInterface

        self.cp, self.config, self.before = cp, config, config._attn_implementation
        self.name = f"cp_plugin_{next(_numbers)}"
        self.linear: ContextParallel | None = None
        """For layers of linear attention, on the same tokens."""
        self.calls = Calls()
        self.inside = False
        """Whether a call of the model is running."""
        self.probe: Probe | None = None
        self.required: dict[str, Tensor] = {}
        """The message if something does not hold -> bool on the device: whether it held in each call."""
        self.ignored: set[str] = set()
        """Arguments that did not reach a layer that needs them."""
        self.dtype = torch.float64
        """Of the last queries."""
        self._call: Call | None = None
        self._last = Call()
        self._masks = Reader()
        AttentionInterface.register(self.name, self.attention)
        AttentionMaskInterface.register(self.name, lambda **arguments: self.mask(**arguments))

    @property
    def active(self) -> bool:
        """True if the model is divided, still or again."""
        return bool(self.config._attn_implementation == self.name)

    @property
    def divides_layers(self) -> bool:
        """True if layers other than attention are divided, too: not while a probe asks for their own results."""
        return self.active and not (self.probe is not None and self.probe.own)

    @property
    def call(self) -> Call:
        """The call that runs or, where a backward pass computes a layer again, the last one.

        Raises:
            ValueError: without one: whoever runs layers by themselves has said nothing about documents and positions.
        """
        if self._call is None and torch._C._current_graph_task_id() == -1:
            raise ValueError(
                "a layer of a divided model was run outside of a call of the model: call the model or its base model, "
                "or huggingface.undo(model). A second model must not share a divided model's config"
            )
        return self._last if self._call is None else self._call

    @call.setter
    def call(self, call: Call | None) -> None:
        self._call, self._last = call, call or self._last

    def __deepcopy__(self, memo: dict[int, Any]) -> Division:
        """A copied model is divided over the same ranks, and by itself."""
        config = deepcopy(self.config, memo)
        memo[id(self)] = copied = Division(self.cp, config)
        copied.linear, copied.before = self.linear, self.before
        if self.active:
            config._attn_implementation = copied.name
        return copied

    def __reduce__(self) -> Any:
        raise ValueError(
            "a sharded model cannot be pickled, because process groups cannot: save it with model.save_pretrained(...) "
            "or model.state_dict(), or call huggingface.undo(model) first"
        )

    def mask(self, **arguments: Any) -> Tensor | None:
        """An entry of AttentionMaskInterface."""
        if self.probe is not None:
            return self.probe.mask(**arguments)
        refuse(
            arguments["kv_length"] * self.cp.size != self.call.seq_length,
            f"a mask over {arguments['kv_length']} tokens in a shard of {self.call.seq_length // self.cp.size}",
        )
        return self._masks.stand_in(arguments, self.call.seq_length, self.call.documents)

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """An entry of AttentionInterface."""
        attend = self.attend_over_ranks if self.probe is None else self.probe.attention
        return attend(module, query, key, value, attention_mask, **options), None

    def attend_over_ranks(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        dropout: float | None = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        tree: Tree | None = None,
        **others: Any,
    ) -> Tensor:
        """``[b, heads, s / size, d]`` -> ``[b, s / size, heads, d]``."""
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        refuse_options(others, dropout or 0.0)
        refuse(query.size(2) != key.size(2), "a key/value cache: train with use_cache=False")
        if mask is None:
            refuse(sliding_window is not None and not causal, "a sliding window without a causal mask")
            left = None if sliding_window is None else sliding_window - 1
            seen = Mask(left, 0 if causal else None, self.call.documents)
        else:
            try:
                seen = from_tensor(mask)
            except ValueError as problem:
                raise ValueError(UNSUPPORTED.format(problem)) from None
        if tree is None:
            self.ignored.add("tree")
        self.dtype = query.dtype
        left, right = (-1 if n is None else n for n in (seen.left, seen.right))
        out = placed(self.cp, seen.documents).attention(
            *(x.permute(2, 0, 1, 3) for x in (query, key, value)),
            causal=right == 0,
            window=None if left == -1 and right <= 0 else (left, right),
            cu_seqlens=torch.tensor(seen.documents) if seen.documents else None,
            scale=scaling,
            softcap=softcap,
            sink=s_aux,
            tree=tree,
        )
        return out.transpose(0, 1).contiguous()


def placed(cp: ContextParallel, documents: tuple[int, ...]) -> ContextParallel:
    """Return where the tokens of a pack are: ``cp`` itself, unless its layout is one for documents."""
    if cp.layout == DOCUMENTS and documents:
        return place_documents(cp, torch.tensor(documents))
    return cp


_CHANGES_THE_RESULT = ("position_bias", "indices", "block_indices", "cache", "head_mask", "alibi")


def refuse_options(options: dict[str, Any], dropout: float) -> None:
    """ValueError for options of an attention call that ``ContextParallel.attention`` does not have."""
    refuse(dropout > 0, f"attention dropout of {dropout:g}: set the model's attention_dropout to 0")
    unknown = {name for name in _CHANGES_THE_RESULT if options.get(name) is not None}
    refuse(bool(unknown), ", ".join(sorted(unknown)))


def refuse(wrong: bool, what: str) -> None:
    if wrong:
        raise ValueError(UNSUPPORTED.format(what))
