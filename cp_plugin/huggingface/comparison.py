"""Attention over all ranks against the attention that the model had, layer by layer, on the same numbers.

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

from cp_plugin.huggingface.attention import Call, Division
from cp_plugin.huggingface.masks import Reader
from cp_plugin.huggingface.structure import MOST_TOKENS, TOKENS, WINDOWS, allowed, body, lengths, probing, tokens
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
        mine = division.over_ranks(module, cp.shard(q, 2), cp.shard(k, 2), cp.shard(v, 2), read, **options)
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
