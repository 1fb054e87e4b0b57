"""Attention sinks: one more score per head, with no value behind it (StreamingLLM, arXiv 2309.17453; gpt-oss).

    lse' = logaddexp(lse, sink)        out' = exp(lse - lse') out

Applied where all keys of a query have been merged, so methods and kernels need not know: their backward is right with
lse' and out' in place of lse and out. The sink's probability is ``exp(sink - lse')`` and its value 0, so its gradient
is ``-exp(sink - lse') * delta``, summed over the queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_plugin.methods.moves import Move


def held(heads: int, moves: Sequence[Move]) -> slice:
    """The query heads this rank has behind these moves, outermost first."""
    first, count = 0, heads
    for move in moves:
        kept = move.heads(count)
        first, count = first + kept.start, kept.stop - kept.start
    return slice(first, first + count)


def apply(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Add these heads' sinks ``[h]`` to merged attention ``[s, b, h, e]`` and ``[s, b, h]``."""
    total = torch.logaddexp(lse, sink.to(lse.dtype))
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))
    return out.to(lse.dtype) * weight.unsqueeze(-1), total


def gradient(sink: Tensor, heads: slice, lse: Tensor, delta: Tensor) -> Tensor:
    """Gradient of all sinks ``[h]`` from this rank's queries and heads; lse and delta include the sink."""
    found = torch.zeros_like(sink)
    found[heads] = -(torch.exp(sink[heads].to(lse.dtype) - lse) * delta).sum((0, 1)).to(sink.dtype)
    return found
