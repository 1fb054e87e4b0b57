"""Reference attention: textbook formulas for any device, floating dtype and tile.

Materializes the scores, so memory grows with queries * keys. Query heads are grouped under their key/value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.core.problem import CallInfo


@dataclass(frozen=True, slots=True)
class Reference:
    """Plain attention in the accumulation dtype."""

    name: str = "reference"
    oracle: ClassVar = True
    caps: ClassVar = True
    any_diagonal: bool = True

    def unsupported(self, call: CallInfo) -> str | None:
        return None if call.dtype.is_floating_point else f"{call.dtype} is not a floating-point type"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, diagonal: int, scores: Scores) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v, _hidden_above(diagonal, q, k), scores)
        return out.to(q.dtype), lse

    def row_term(self, dout: Tensor, delta: Tensor) -> Tensor:
        return delta

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, term: Tensor, diagonal: int, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        made = _scores(q, k, _hidden_above(diagonal, q, k), scores)
        p = _probabilities(made, _split_groups(lse, k.size(2)))
        slope = scores.scale
        if scores.softcap is not None:
            slope = slope * (1 - (made / scores.softcap).square()).masked_fill(made == -torch.inf, 0)
        do = _grouped(dout, k.size(2)).to(p.dtype)
        dv = torch.einsum("bgnqk,qbgne->kbge", p, do)
        dp = torch.einsum("qbgne,kbge->bgnqk", do, v.to(p.dtype))
        ds = p * (dp - _split_groups(term, k.size(2))) * slope
        dq = torch.einsum("bgnqk,kbgd->qbgnd", ds, k.to(p.dtype)).flatten(2, 3)
        dk = torch.einsum("bgnqk,qbgnd->kbgd", ds, _grouped(q, k.size(2)).to(p.dtype))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Attention of all queries to all keys that are not hidden.

    Args:
        q, k, v: ``[s_q, b, h, d]``, ``[s_k, b, g, d]`` and ``[s_k, b, g, e]``.
        hidden: keys that a query does not see: bool ``[q, k]``, or ``[b, 1, 1, q, k]`` if sequences differ.

    Returns:
        out ``[s_q, b, h, e]`` and lse ``[s_q, b, h]`` in the accumulation dtype; 0 and -inf where a query sees nothing.
    """
    made = _scores(q, k, hidden, scores)
    lse = made.logsumexp(-1)
    p = _probabilities(made, lse.unsqueeze(-1))
    return torch.einsum("bgnqk,kbge->qbgne", p, v.to(p.dtype)).flatten(2, 3), _rows(lse)


def _hidden_above(diagonal: int, q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.size(0), k.size(0), dtype=torch.bool, device=q.device).triu(diagonal + 1)


def _scores(q: Tensor, k: Tensor, hidden: Tensor, scores: Scores) -> Tensor:
    """Scaled and capped scores ``[b, g, n, q, k]``, -inf for hidden keys; n = query heads per key head."""
    dtype = accumulation_dtype(q.dtype)
    made = torch.einsum("qbgnd,kbgd->bgnqk", _grouped(q, k.size(2)).to(dtype), k.to(dtype)) * scores.scale
    if scores.softcap is not None:
        made = (made / scores.softcap).tanh() * scores.softcap
    return made.masked_fill(hidden, -torch.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), and 0 for hidden keys, even in rows that see none (lse -inf)."""
    return torch.where(scores == -torch.inf, 0.0, torch.exp(scores - lse))


def _grouped(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(2, (groups, x.size(2) // groups))


def _split_groups(rows: Tensor, groups: int) -> Tensor:
    """``[s, b, h]`` as ``[b, g, n, s, 1]``."""
    return _grouped(rows, groups).permute(1, 2, 3, 0).unsqueeze(-1)


def _rows(x: Tensor) -> Tensor:
    """``[b, g, n, s]`` as ``[s, b, h]``."""
    return x.permute(3, 0, 1, 2).flatten(2, 3)


BACKEND = Reference()
