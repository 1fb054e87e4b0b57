"""Megatron's rotary embeddings and multi-latent attention during generation.

Angles are those of a step's positions instead of a whole sequence's. For multi-latent attention the latent vector is
cached, recorded where it enters the up-projection; where that module includes the norm (Transformer Engine's fused
one), keys and values are cached instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor

from cp_plugin.inference.store import Latent


class Compressed(NamedTuple):
    """The latent vectors of a layer of multi-latent attention in one step."""

    rows: Tensor
    """``[s, b, r]``, after the norm."""
    weight: Tensor
    """The up-projection's: ``[h * (d - p + e), r]``."""
    plain: int
    """d - p: size of the part of a key without RoPE."""
    v_head_dim: int

    def latent(self, k: Tensor) -> Latent:
        """The cache entry; k ``[s, b, h, d]`` has the part with RoPE, the same in every head."""
        weight = self.weight.unflatten(0, (-1, self.plain + self.v_head_dim))
        rows = torch.cat((self.rows, k[:, :, 0, self.plain :]), 2).unsqueeze(2)
        return Latent(rows, weight[:, : self.plain], weight[:, self.plain :])


def changes(
    module: torch.nn.Module, positions: Callable[[], Tensor], found: dict[int, Compressed]
) -> Iterator[tuple[Any, str, Any]]:
    """Attributes to replace in such a module: object, name, value; none in any other.

    Args:
        positions: of the step's tokens: ``[s]``, or ``[s, b]`` where sequences differ.
        found: filled with layer number -> latent vectors of the step.
    """
    up = getattr(module, "linear_kv_up_proj", None)
    if up is not None and getattr(up, "layer_norm_weight", None) is None:
        yield up, "forward", _noting(up.forward, module, up, found)
    if isinstance(module, RotaryEmbedding | YarnRotaryEmbedding):
        yield module, "forward", _rotary(module, positions)


def _noting(
    original: Callable[..., Any], layer: Any, up: torch.nn.Module, found: dict[int, Compressed]
) -> Callable[..., Any]:
    def forward(rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        config = layer.config
        found[layer.layer_number] = Compressed(rows, up.weight, config.qk_head_dim, config.v_head_dim)
        return original(rows, *args, **kwargs)

    return forward


def _rotary(module: RotaryEmbedding | YarnRotaryEmbedding, positions: Callable[[], Tensor]) -> Callable[..., Any]:
    """Angles ``[s, 1 or b, 1, d]``; YaRN's with their factor."""

    def forward(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, float]:
        at = positions()
        first = int(at.min())
        found = module.get_emb(int(at.max()) - first + 1, first)
        angles, *factor = found if isinstance(found, tuple) else (found,)
        rows = angles[(at - first).long()]
        rows = rows if at.dim() == 1 else rows.squeeze(2)
        return (rows, *factor) if factor else rows

    return forward
