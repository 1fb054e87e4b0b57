"""Generation with multi-latent attention: what is kept is the vector that keys and values are made of.

Megatron's layer makes them itself; what it makes them of is read where it enters the up-projection. Where the norm is
inside of that (Transformer Engine's fused module), keys and values are kept instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_plugin.inference.store import Latent


class Compressed(NamedTuple):
    """Of one layer and step."""

    rows: Tensor
    """``[s, b, r]``, behind the norm."""
    weight: Tensor
    """Of the up-projection: ``[h * (d - p + e), r]``."""
    plain: int
    """d - p: the part of a key that is not rotated."""
    v_head_dim: int


def changes(module: torch.nn.Module, found: dict[int, Compressed]) -> Iterator[tuple[Any, str, Any]]:
    """What is another in a layer of multi-latent attention meanwhile; nothing in any other module."""
    up = getattr(module, "linear_kv_up_proj", None)
    if up is None or getattr(up, "layer_norm_weight", None) is not None:
        return
    yield up, "forward", _noting(up.forward, module, up, found)


def latent(of: Compressed | None, k: Tensor) -> Latent | None:
    """What to keep; k ``[s, b, h, d]`` has the rotated part, the same in every head."""
    if of is None:
        return None
    weight = of.weight.unflatten(0, (-1, of.plain + of.v_head_dim))
    rows = torch.cat((of.rows, k[:, :, 0, of.plain :]), 2).unsqueeze(2)
    return Latent(rows, weight[:, : of.plain], weight[:, of.plain :])


def _noting(
    original: Callable[..., Any], layer: Any, up: torch.nn.Module, found: dict[int, Compressed]
) -> Callable[..., Any]:
    def forward(rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        config = layer.config
        found[layer.layer_number] = Compressed(rows, up.weight, config.qk_head_dim, config.v_head_dim)
        return original(rows, *args, **kwargs)

    return forward
