"""Linear attention behind ``ContextParallel``: a shard's tokens, and the only autograd.Function for any ``Scan``."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_plugin.attention import autocast
from cp_plugin.attention.recompute import once
from cp_plugin.comm import Mesh
from cp_plugin.common.first_order import first_order
from cp_plugin.common.text import shortened
from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.core.problem import Decay
from cp_plugin.core.values import dense
from cp_plugin.linear.tokens import Tokens, tokens_of
from cp_plugin.methods.parts import Parts
from cp_plugin.methods.protocol import Continued, Scan
from cp_plugin.placement.documents import Placement


class Documents(NamedTuple):
    """Where documents begin and end: bool ``[s]``, of this rank's tokens."""

    starts: Tensor
    ends: Tensor


def documents_of(positions: Tensor, cu_seqlens: Tensor, bounds: tuple[int, ...]) -> Documents:
    """First and last tokens of documents among these positions, on the positions' device.

    No host synchronisation: bounds on the CPU are copied once per micro-batch, by its first layer.

    Args:
        bounds: the numbers in ``cu_seqlens``.
    """
    here = cu_seqlens.device == positions.device and cu_seqlens.dtype == positions.dtype
    edges = cu_seqlens if here else _copied(bounds, positions.device)
    first, last = edges[:-1], edges[1:]
    return Documents(_among(positions, first), _among(positions + 1, last))


@lru_cache(maxsize=64)
def check_placed(placement: Placement, bounds: tuple[int, ...]) -> None:
    """ValueError unless documents with these bounds lie within the documents that were placed.

    A state does not pass from one placed document to the next, so a document may not either.
    """
    placed = tuple(accumulate(placement.documents, initial=0))
    missing = sorted(set(placed[1:-1]).difference(bounds))
    if missing:
        raise ValueError(
            f"these tokens were placed by documents with bounds {shortened(placed)}, and cu_seqlens "
            f"{'is missing' if not bounds else f'{shortened(bounds)} lacks {shortened(missing)}'}: pass the cu_seqlens "
            "that the pack was placed with, or place the pack with these"
        )


@lru_cache(maxsize=64)
def _copied(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(bounds, device=device)


def _among(positions: Tensor, edges: Tensor) -> Tensor:
    """``isin`` for increasing edges; torch's sorts, and synchronises for the number of edges."""
    return edges[torch.searchsorted(edges, positions).clamp(max=len(edges) - 1)] == positions


def decay_of(log_decay: Tensor | None, k: Tensor) -> Decay:
    """The kind of a decay tensor; ValueError for a shape that is none."""
    if log_decay is None:
        return "none"
    shapes: dict[tuple[int, ...], Decay] = {
        (k.size(2),): "head",
        (*k.shape[:3],): "token",
        (*k.shape[:3], k.size(3)): "key",
    }
    found = shapes.get(tuple(log_decay.shape))
    if found is None:
        raise ValueError(
            f"log_decay has shape {tuple(log_decay.shape)}; for k {tuple(k.shape)} it must be one of "
            f"{', '.join(map(str, shapes))}: per key/value head, per token and head, or per token, head and dimension"
        )
    return found


def check_beta(beta: Tensor | None, k: Tensor) -> None:
    """ValueError for a beta of another shape than a number for each token and key/value head."""
    if beta is not None and beta.shape != k.shape[:3]:
        raise ValueError(
            f"beta has shape {tuple(beta.shape)}; for k {tuple(k.shape)} it must be {tuple(k.shape[:3])}: one number "
            "per token and key/value head"
        )


def without_padding(x: Tokens, kept: Tensor) -> Tokens:
    """Tokens that leave the state unchanged where ``kept``, bool ``[s, b]``, is False."""
    kept = kept[..., None, None]
    return x._replace(k=x.k * kept, log_decay=None if x.log_decay is None else x.log_decay * kept)


def attend(x: Tokens, scan: Scan, parts: Parts, mesh: Mesh, documents: Documents | None) -> Tensor:
    """Outputs ``[s, b, h, e]`` of a shard in q's dtype; differentiable in all that ``Tokens.differentiable`` has."""
    return _joined(_Linear.apply(scan, mesh, *fold(x, parts, documents)), x, parts)


def directly(inputs: tuple[Tensor | None, ...], dout: Tensor, scan: Scan, parts: Parts) -> tuple[Tensor, ...]:
    """Outputs of a shard and the gradients of its inputs (q, k, v, log_decay and beta), with the scan outside of
    autograd, which on CUDA would deadlock ranks that are threads of one process."""
    x, given = tokens_of(*inputs), [y for y in inputs if y is not None]
    folded = fold(x, parts, None)
    values = folded.each(Tensor.detach)
    with torch.no_grad():
        found, kept = scan.forward(values)
    found = found.to(x.q.dtype).detach().requires_grad_()
    out = _joined(found, x, parts)
    dfound, *beside = torch.autograd.grad(out, (found, *given), dout, allow_unused=True, materialize_grads=True)
    inner = folded.differentiable
    with torch.no_grad():
        grads = scan.backward(dfound.to(accumulation_dtype(x.q.dtype)), values, kept)
    through = torch.autograd.grad(inner, given, [g.to(y.dtype) for g, y in zip(grads, inner, strict=True)])
    return out.detach(), *(a + b for a, b in zip(through, beside, strict=True))


def extend(x: Tokens, scan: Continued, parts: Parts, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs ``[s, b, h, e]`` in q's dtype of tokens that follow ``state``, and the state after them."""
    with torch.no_grad():
        out, after = scan.extend(fold(x, parts, None), state)
        return _joined(out.to(x.q.dtype), x, parts), after


def fold(x: Tokens, parts: Parts, documents: Documents | None) -> Tokens:
    """A shard as a batch of segments."""
    starts = ends = None
    if documents is not None:
        starts, ends = (y.unsqueeze(1).expand(*x.q.shape[:2]) for y in documents)
    return Tokens(*map(parts.fold, x[:-1]), parts.fold(starts, ends))


def _joined(found: Tensor, x: Tokens, parts: Parts) -> Tensor:
    """The outputs of a shard from those of its segments; two directions are summed, counting a token itself once."""
    out = parts.unfold(found)
    if parts.directions == 1:
        return out[0]
    repeat = x.q.size(2) // x.k.size(2)
    itself = (x.q * x.k.repeat_interleave(repeat, 2)).sum(3, keepdim=True) * x.v.repeat_interleave(repeat, 2)
    return out[0] + out[1] - itself


@first_order
class _Linear(torch.autograd.Function):
    """Any scan as one differentiable operation."""

    @staticmethod
    def forward(ctx: Any, scan: Scan, mesh: Mesh, *tokens: Tensor | None) -> Tensor:
        *values, starts = tokens
        x = Tokens(*(None if y is None else dense(y) for y in values), starts)  # type: ignore[arg-type]

        def compute() -> tuple[Tensor, tuple[Tensor, ...]]:
            out, kept = scan.forward(x)
            return out.to(x.q.dtype), kept

        with mesh.ledger.phase("forward"):
            out, kept = once(compute)
        ctx.save_for_backward(*x, *kept)
        ctx.scan, ctx.mesh = scan, mesh
        return out.detach()  # a kept result must not get a history

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        saved, n = ctx.saved_tensors, len(Tokens._fields)  # read once: a checkpoint unpacks tensors a single time
        x, kept = Tokens(*saved[:n]), saved[n:]
        with ctx.mesh.ledger.phase("backward"), autocast.off(dout.device.type):
            grads = iter(ctx.scan.backward(dense(dout).to(accumulation_dtype(x.q.dtype)), x, kept))
        return None, None, *(None if y is None else next(grads).to(y.dtype) for y in x[:-1]), None
