"""Linear attention behind ``ContextParallel``: folding segments into the batch, and the only autograd.Function for it.

A shard of several segments, or of two directions, becomes a batch of as many segments (``Segmented.fold``), on which
any ``Scan`` works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from cp_plugin.core.layout import Segments
from cp_plugin.core.problem import Decay, Problem
from cp_plugin.core.values import dense
from cp_plugin.linear.kernels import Kernel
from cp_plugin.linear.passes import Pass
from cp_plugin.linear.tokens import Tokens
from cp_plugin.methods.lasp2 import Lasp2
from cp_plugin.methods.protocol import Scan
from cp_plugin.placement.documents import Cut, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Segmented:
    """``Parts`` around a kernel."""

    order: tuple[int, ...]
    directions: int
    uniform: bool
    kernel: Kernel
    segments: int = 1
    """Of each rank; s = segments * t."""
    cuts: tuple[tuple[Cut, ...], ...] | None = None
    pieces: Tensor | None = None

    def forward(self, x: Tokens) -> Tensor:
        return self.kernel.forward(x)

    def backward(self, dout: Tensor, x: Tokens) -> tuple[Tensor, ...]:
        return self.kernel.backward(dout, x)

    def segment(self, x: Tokens, kept: tuple[Tensor, ...] | None = None) -> Pass:
        return self.kernel.segment(x, kept)

    def fold(self, y: Tensor | None, backwards: Tensor | None = None) -> Tensor | None:
        """Token dimension to batch: ``[s, b, ...] -> [t, directions * segments * b, ...]``.

        backwards: replaces y in the second direction.
        """
        if y is None:
            return None
        split = y.unflatten(0, (self.segments, -1)).transpose(0, 1)
        if self.directions == 1:
            return split.flatten(1, 2)
        other = y if backwards is None else backwards
        other = other.unflatten(0, (self.segments, -1)).transpose(0, 1).flip(0)
        return torch.stack((split, other), 1).flatten(1, 3)

    def unfold(self, y: Tensor) -> tuple[Tensor, ...]:
        """The inverse: one tensor ``[s, b, ...]`` per direction."""
        split = y.unflatten(1, (self.directions, self.segments, -1)).unbind(1)
        split = (split[0], *(other.flip(0) for other in split[1:]))
        return tuple(part.transpose(0, 1).flatten(0, 1) for part in split)


def parts_of(problem: Problem, segments: Sequence[Segments], kernel: Kernel) -> Segmented:
    """The parts that a method is built around.

    Args:
        segments: the positions of every rank's tokens.
    """
    length = min(len(s) for rank in segments for s in rank)  # adjacent segments of a rank may have been merged
    numbered = [start for rank in segments for s in rank for start in s[::length]]
    return Segmented(
        order=tuple(sorted(range(len(numbered)), key=lambda i: numbered[i])),
        directions=1 if problem.causal or problem.summed else 2,
        uniform=problem.decay in ("none", "head") and not (problem.delta or problem.documents),
        kernel=kernel,
        segments=len(numbered) // len(segments),
    )


def placed_parts(placement: Placement, index: int, kernel: Kernel, device: torch.device) -> Segmented:
    """``parts_of`` on tokens placed by document; index: of this rank."""
    mine = placement.rank == index
    lengths = placement.stop[mine] - placement.start[mine]
    pieces = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    pieces[torch.from_numpy(lengths.cumsum() - lengths)] = True
    return Segmented(
        order=tuple(range(placement.size)),
        directions=1,
        uniform=False,
        kernel=kernel,
        cuts=placement.cuts(),
        pieces=pieces.to(device),
    )


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


def is_delta(beta: Tensor | None, k: Tensor) -> bool:
    """Whether there is a beta; ValueError for one of another shape than a number for each token and key/value head."""
    if beta is not None and beta.shape != k.shape[:3]:
        raise ValueError(
            f"beta has shape {tuple(beta.shape)}; for k {tuple(k.shape)} it must be {tuple(k.shape[:3])}: one number "
            "per token and key/value head"
        )
    return beta is not None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    scan: Scan,
    parts: Segmented,
    mesh: Mesh,
    documents: Documents | None,
) -> Tensor:
    """Outputs ``[s, b, h, e]`` in q's dtype; differentiable in q, k, v, log_decay and beta."""
    x = _tokens(q, k, v, log_decay, beta, parts, documents)
    return _joined(_Linear.apply(scan, mesh, *x), q, k, v, parts)


def directly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    dout: Tensor,
    scan: Scan,
    parts: Segmented,
    mesh: Mesh,
) -> tuple[Tensor, ...]:
    """out and the gradients of q, k, v, log_decay and beta, with the scan outside of autograd, which on CUDA would
    deadlock ranks that are threads of one process."""
    given = [y for y in (q, k, v, log_decay, beta) if y is not None]
    x = _tokens(q, k, v, log_decay, beta, parts, None)
    values = Tokens(*(None if y is None else y.detach() for y in x))
    with torch.no_grad():
        found, kept = scan.forward(values)
    found = found.to(q.dtype).detach().requires_grad_()
    out = _joined(found, q, k, v, parts)
    dfound, *beside = torch.autograd.grad(out, (found, *given), dout, allow_unused=True, materialize_grads=True)
    inner = x.differentiable
    with torch.no_grad():
        grads = scan.backward(dfound.to(accumulation_dtype(q.dtype)), values, kept)
    through = torch.autograd.grad(inner, given, [g.to(y.dtype) for g, y in zip(grads, inner, strict=True)])
    return out.detach(), *(a + b for a, b in zip(through, beside, strict=True))


def _joined(found: Tensor, q: Tensor, k: Tensor, v: Tensor, parts: Segmented) -> Tensor:
    """The outputs of a shard from those of its segments; two directions are summed, counting a token itself once."""
    out = parts.unfold(found)
    if parts.directions == 1:
        return out[0]
    repeat = q.size(2) // k.size(2)
    itself = (q * k.repeat_interleave(repeat, 2)).sum(3, keepdim=True) * v.repeat_interleave(repeat, 2)
    return out[0] + out[1] - itself


def final_state(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    parts: Segmented,
    mesh: Mesh,
    documents: Documents | None,
) -> Tensor:
    """The state after the last token, on every rank: ``[b, g, d, e]`` in the accumulation dtype."""
    with torch.no_grad():
        return Lasp2(mesh, parts).final(_tokens(k, k, v, log_decay, beta, parts, documents))


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    parts: Segmented,
    mesh: Mesh,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[s, b, h, e]`` in q's dtype of tokens that follow ``state``, and the state after them."""
    with torch.no_grad():
        out, after = Lasp2(mesh, parts).extend(_tokens(q, k, v, log_decay, beta, parts, None), state)
        return _joined(out.to(q.dtype), q, k, v, parts), after


def refuse_placed(parts: Segmented) -> None:
    """ValueError for documents placed on the ranks, where the state after the last token is asked for."""
    if parts.cuts is not None:
        raise ValueError("the documents layout leaves no single final state: use another layout")


def of_tokens(k: Tensor, log_decay: Tensor) -> Tensor:
    """A per-head decay expanded to every token, ``[s, b, g]``; others as they are."""
    return log_decay.expand(*k.shape[:3]) if log_decay.dim() == 1 else log_decay


def without_padding(k: Tensor, log_decay: Tensor | None, kept: Tensor) -> tuple[Tensor, Tensor | None]:
    """Keys and decays that leave the state unchanged where ``kept``, bool ``[s, b]``, is False."""
    if log_decay is not None:
        log_decay = of_tokens(k, log_decay)
        log_decay = log_decay * kept.view(*kept.shape, *(1,) * (log_decay.dim() - 2))
    return k * kept[..., None, None], log_decay


def _tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    parts: Segmented,
    documents: Documents | None,
) -> Tokens:
    """This rank's shard as a batch of segments."""
    if log_decay is not None:
        log_decay = of_tokens(k, log_decay)
        log_decay = log_decay.unsqueeze(3) if log_decay.dim() == 3 else log_decay
    starts = ends = None
    if documents is not None:
        starts, ends = (y.unsqueeze(1).expand(*q.shape[:2]) for y in documents)
    return Tokens(*(parts.fold(y) for y in (q, k, v, log_decay, beta)), parts.fold(starts, ends))


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
