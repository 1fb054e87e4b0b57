"""Rotary angles of generation: those of a step's own positions, instead of those of a whole sequence cut to a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from torch import Tensor


def forward_of(module: torch.nn.Module, rows: Callable[[], Tensor]) -> Callable[..., Any] | None:
    """What to call in the place of a rotary embedding's ``forward``; None for any other module.

    rows: the step's positions, ``[s]``, or ``[s, b]`` where sequences differ; angles are ``[s, 1 or b, 1, d]``.
    """
    if isinstance(module, YarnRotaryEmbedding):

        def with_factor(*args: Any, **kwargs: Any) -> tuple[Tensor, float]:
            positions = rows()
            angles, factor = module.get_emb(*_span(positions))
            return _of(angles, positions), factor

        return with_factor
    if isinstance(module, RotaryEmbedding):

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            positions = rows()
            return _of(module.get_emb(*_span(positions)), positions)

        return forward
    return None


def _span(positions: Tensor) -> tuple[int, int]:
    first = int(positions.min())
    return int(positions.max()) - first + 1, first


def _of(angles: Tensor, positions: Tensor) -> Tensor:
    """Rows of ``[n, 1, 1, d]``, the first of which is that of the smallest position."""
    found = angles[(positions - positions.min()).long()]
    return found if positions.dim() == 1 else found.squeeze(2)
