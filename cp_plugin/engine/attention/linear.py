"""Linear attention of ``ContextParallel``: the public calls, a shard's tokens, and the only autograd.Function for any
``Scan``.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_plugin.engine.attention import agreement, autocast
from cp_plugin.engine.attention.inputs import check_numbers
from cp_plugin.engine.attention.recompute import once
from cp_plugin.engine.attention.tokens import Sharding
from cp_plugin.engine.comm import Mesh
from cp_plugin.engine.common.eager import eager
from cp_plugin.engine.common.first_order import first_order
from cp_plugin.engine.common.recent import Recent
from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.core.mask import document_bounds
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Decay, Problem
from cp_plugin.engine.core.spelling import as_called
from cp_plugin.engine.core.values import dense
from cp_plugin.engine.linear import kernels
from cp_plugin.engine.linear.tokens import Tokens, tokens_of
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.protocol import Kind, Parts, Provider, Scan


class Documents(NamedTuple):
    """Where documents begin and end: bool ``[s]``, of this rank's tokens."""

    starts: Tensor
    ends: Tensor


@lru_cache(maxsize=64)  # once per micro-batch, by its first layer
def _copied(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(bounds, device=device)


def _is_edge(positions: Tensor, edges: Tensor) -> Tensor:
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
    kind = shapes.get(tuple(log_decay.shape))
    if kind is None:
        raise ValueError(
            f"log_decay has shape {tuple(log_decay.shape)}; for k {tuple(k.shape)} it must be one of "
            f"{', '.join(map(str, shapes))}: per key/value head, per token and head, or per token, head and dimension"
        )
    return kind


def fold(x: Tokens, parts: Parts, documents: Documents | None) -> Tokens:
    """A shard as a batch of segments."""
    starts = ends = None
    if documents is not None:
        starts, ends = (y.unsqueeze(1).expand(*x.q.shape[:2]) for y in documents)
    return Tokens._make((*map(parts.fold, x[:-1]), parts.fold(starts, ends)))


def _joined(folded: Tensor, x: Tokens, parts: Parts) -> Tensor:
    """The outputs of a shard from those of its segments; two directions are summed, counting a token itself once."""
    out = parts.unfold(folded)
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
        x = Tokens._make((*(None if y is None else dense(y) for y in values), starts))

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


class LinearAttention(Sharding):
    """Linear attention over sharded sequences; ``ContextParallel`` has the provider and the options."""

    provider: Provider
    options: Options
    from_python: bool
    """Whether messages write options as arguments: it was made in Python, not from the flags of a training run."""
    _calls: agreement.Calls
    _scans: Recent[Hashable, tuple[Scan, Parts]]

    def problem(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Problem:
        """Describe a call with such shards; ValueError unless q, k and v fit together."""
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if not q.dim() == k.dim() == v.dim() == 4:
            raise ValueError(f"attention needs [tokens, batch, heads, head size] tensors, got {shapes}")
        (s, b, h, d), (_, _, g, e) = q.shape, v.shape
        if not (q.shape[:2] == k.shape[:2] == v.shape[:2] and k.shape[2:] == (g, d)):
            raise ValueError(f"q, k and v do not match: {shapes}")
        if h % g:
            raise ValueError(
                f"the number of query heads must be a multiple of the number of key/value heads, got {shapes}"
            )
        if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
            raise ValueError(f"q, k and v must share dtype and device, got {q.dtype}, {k.dtype}, {v.dtype}, {q.device}")
        return Problem(
            seq_length=s * self.size,
            size=self.size,
            heads=h,
            kv_heads=g,
            head_dim=d,
            v_head_dim=e,
            batch=b,
            dtype=q.dtype,
            causal=causal,
        )

    @as_called
    def refuse(self, problem: Problem) -> None:
        """ValueError for a problem that the provider does not support."""
        reason = providers.unsupported(self.provider, problem, self.options)
        if reason is not None:
            raise ValueError(f"provider {self.provider.name!r} cannot do this: {reason}")

    def _is_for(self, kind: Kind) -> None:
        """ValueError for a provider of another kind."""
        if self.provider.kind != kind:
            raise ValueError(
                f"provider {self.provider.name!r} is for {self.provider.kind} attention: for {kind} attention use one "
                f"of {', '.join(providers.names(kind))}"
            )

    @eager
    @autocast.cast("q", "k", "v")
    def linear_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None = None,
        *,
        beta: Tensor | None = None,
        causal: bool = True,
        scale: float = 1.0,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Linear attention over the whole sequence; every rank passes its shard, with feature maps already applied.

        ``S_t = exp(log_decay_t) * S_(t-1) + k_t v_t^T``, ``o_t = S_t^T q_t``. Without a causal mask the same from the
        last token back is added, counting each token's own key and value once. With beta by the delta rule, causal
        only (``linear.delta``): ``beta_t (v_t - (exp(log_decay_t) * S_(t-1))^T k_t)`` takes the place of v_t.

        Args:
            q: ``[s, b, h, d]``; k: ``[s, b, g, d]`` with g dividing h; v: ``[s, b, g, e]``. Same dtype and device.
            log_decay: at most 0: ``[g]``, ``[s, b, g]`` or ``[s, b, g, d]``; None is no decay. On CUDA the values are
                looked at where ranks compare their calls, as the host must wait for them.
            beta: ``[s, b, g]``, the share that is replaced, from 0 to 1 (or 2); keys should have a norm of 1.
            scale: factor on q.
            cu_seqlens: int ``[n + 1]``: as for ``attention``.

        Returns:
            ``[s, b, h, e]`` in q's dtype; gradients flow to q, k, v, log_decay and beta. States are in float32.

        Raises:
            ValueError: for a provider of softmax attention, shapes, dtypes or devices that do not fit, bounds that do
                not increase from 0 to the length of the sequence, a log_decay above 0, or a problem or layout the
                provider does not support.
        """
        problem = self._linear_problem(q, k, v, log_decay, beta, causal=causal, cu_seqlens=cu_seqlens, scale=scale)
        scan, parts = self.scan(problem, q.device)
        documents = self._documents(problem.seq_length, cu_seqlens, q.device)
        x = tokens_of(q * scale, k, v, log_decay, beta)
        return _joined(_Linear.apply(scan, self.mesh, *fold(x, parts, documents)), x, parts)

    @eager
    @autocast.cast("q", "k", "v")
    def extend_linear(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None = None,
        *,
        beta: Tensor | None = None,
        scale: float = 1.0,
        state: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Causal linear attention of the next chunk of a sequence, for generation; not differentiable.

        Built-in providers' ranks gather each other's states here, as ``lasp2`` does, since all of them need the state.

        Args:
            q, k, v, log_decay, beta, scale: as in ``linear_attention``: this rank's tokens of the chunk.
            state: as returned for the chunk before; None at the start.
            kept: bool ``[s, b]``: False for padding, which leaves the state unchanged. None: no padding.

        Returns:
            ``[s, b, h, e]`` in q's dtype, and the state ``[b, g, d, e]`` in the accumulation dtype, on every rank.
        """
        problem = self._linear_problem(q, k, v, log_decay, beta, causal=True, scale=scale, kept=kept)
        x = tokens_of(q * scale, k, v, log_decay, beta)
        if kept is not None:
            kept = kept[..., None, None]
            x = x._replace(k=x.k * kept, log_decay=None if x.log_decay is None else x.log_decay * kept)
            problem = replace(problem, decay="token" if problem.decay == "head" else problem.decay)
        scan, parts = self.scan(problem, k.device)
        with torch.no_grad():
            out, after = scan.extend(fold(x, parts, None), state)
            return _joined(out.to(x.q.dtype), x, parts), after

    @as_called
    def scan(self, problem: Problem, device: torch.device) -> tuple[Scan, Parts]:
        """The composed method for a problem of linear attention, and the parts it is built around; ValueError for a
        problem or a layout that the provider does not support."""

        def composed() -> tuple[Scan, Parts]:
            providers.check_layout(self.provider, self.layout)
            self.refuse(problem)
            kernel = kernels.choose(self.options.backend, device, problem).kernel
            segments = [self.layout.segments(problem.seq_length, self.size, number) for number in self.numbers]
            parts = Parts.from_segments(problem, segments, kernel)
            return self.provider.build(self.mesh, parts, problem, self.options), parts

        return self._scans.get((problem, device, self.options), composed)

    def _documents(self, seq_length: int, cu_seqlens: Tensor | None, device: torch.device) -> Documents | None:
        """Which of this rank's tokens begin and end documents, without waiting for the device; ValueError for bounds
        that are none."""
        bounds = document_bounds(cu_seqlens, seq_length)
        if cu_seqlens is None:
            return None
        positions = self.positions(seq_length, device)
        usable = cu_seqlens.device == positions.device and cu_seqlens.dtype == positions.dtype
        edges = cu_seqlens if usable else _copied(bounds, positions.device)
        return Documents(_is_edge(positions, edges[:-1]), _is_edge(positions + 1, edges[1:]))

    def _linear_problem(
        self,
        *tensors: Any,
        causal: bool,
        cu_seqlens: Tensor | None = None,
        scale: float = 1.0,
        kept: Tensor | None = None,
    ) -> Problem:
        """tensors: q, k, v, log_decay and beta."""
        q, k, v, log_decay, beta = tensors
        with agreement.compare_call(self, "linear_attention", tensors) as settings:
            self._is_for("linear")
            check_numbers(scale)
            problem = self.problem(q, k, v, causal=causal)
            decay = decay_of(log_decay, k)
            if beta is not None and beta.shape != k.shape[:3]:
                raise ValueError(
                    f"beta has shape {tuple(beta.shape)}; for k {tuple(k.shape)} it must be {tuple(k.shape[:3])}: one "
                    "number per token and key/value head"
                )
            if kept is not None and (kept.shape != k.shape[:2] or kept.dtype != torch.bool):
                raise ValueError(f"kept must be bool {tuple(k.shape[:2])}, got {kept.dtype} {tuple(kept.shape)}")
            self._refuse_growth(log_decay)
            documents = document_bounds(cu_seqlens, problem.seq_length)
            settings |= {"causal": causal, "documents": documents, "scale": scale}
        return replace(problem, decay=decay, delta=beta is not None, documents=cu_seqlens is not None)

    def _refuse_growth(self, log_decay: Tensor | None) -> None:
        """ValueError for a decay above 0. CUDA is asked where ranks compare their calls, as the host must wait."""
        if log_decay is None or log_decay.is_meta:
            return
        if log_decay.device.type == "cuda" and not agreement.may_wait(self):
            return
        if (log_decay.detach() > 0).any():
            raise ValueError(
                f"log_decay must be at most 0, got {log_decay.max().item():.3g}: with a decay rate, pass its negative; "
                "with a factor on the state, from 0 to 1, its logarithm"
            )
