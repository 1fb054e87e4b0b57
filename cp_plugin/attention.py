"""The front door for plain torch: one object that shards, positions and attends.

    cp = cp_plugin.ContextParallel("striped", group=group)
    x = cp.shard(tokens, dim=0)                   # this rank's tokens
    out = cp.attention(q, k, v, causal=True)      # q [s/cp, b, h, d], k and v [s/cp, b, g, d]
    y = cp.unshard(out, dim=0)

``attention`` is the only autograd.Function for softmax attention in this package, whatever the method.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from cp_plugin import backends, providers
from cp_plugin.dtypes import accumulation_dtype
from cp_plugin.layout import Segments, join_adjacent
from cp_plugin.local import Local
from cp_plugin.mesh import GroupMesh, Mesh
from cp_plugin.protocol import At, Attend, Options, Partial, Problem, Provider


class ContextParallel:
    """Context-parallel attention over the ranks of one process group."""

    def __init__(
        self,
        provider: str | Provider = "ring",
        *,
        group: dist.ProcessGroup | None = None,
        mesh: Mesh | None = None,
        layout: str | None = None,
        backend: str = "auto",
    ) -> None:
        """
        Args:
            provider: a registered name, or a ``Provider``.
            group: the context-parallel process group; None is one rank on its own.
            mesh: instead of a group, a mesh with the provider's axes.
            layout: token layout; None is the provider's default.
            backend: attention kernel, see ``cp_plugin.backends.names()``.

        Raises:
            ValueError: for an unknown name, a layout the provider does not run on, or a mesh with other axes.
        """
        self.provider = provider if isinstance(provider, Provider) else providers.get(provider)
        self.options = Options(layout=layout, backend=backend)
        self.layout = providers.layout_for(self.provider, self.options)
        backends.check_name(backend)
        if mesh is None:
            axes = self.provider.axes(group.size() if group is not None else 1, self.options)
            mesh = GroupMesh.from_group(axes, group)
        elif mesh.axes != self.provider.axes(mesh.size, self.options):
            raise ValueError(
                f"provider {self.provider.name!r} on {mesh.size} ranks needs the mesh axes "
                f"{self.provider.axes(mesh.size, self.options)}, got {mesh.axes}"
            )
        self.mesh = mesh

    @property
    def size(self) -> int:
        """Number of context-parallel ranks."""
        return self.mesh.size

    @property
    def index(self) -> int:
        """This rank's number among them."""
        return self.mesh.index

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's tokens of ``x``, whose dimension ``dim`` is the whole sequence; differentiable."""
        return self.layout.shard(x, dim, self.size, self.index)

    def unshard(self, x: Tensor, dim: int = 0) -> Tensor:
        """The whole tensor from every rank's shard, on every rank.

        Differentiable with the whole tensor taken as replicated: each rank keeps its own slice of the gradient.
        """
        return _Unshard.apply(x, dim % x.dim(), self)

    def positions(self, seq_length: int) -> Tensor:
        """Global positions of this rank's tokens: int64 ``[seq_length / size]``, on the CPU."""
        return self.layout.positions(seq_length, self.size, self.index)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None) -> Tensor:
        """Softmax attention over the whole sequence, of which every rank passes its shard.

        Args:
            q: ``[s, b, h, d]``; k: ``[s, b, g, d]`` with g dividing h; v: ``[s, b, g, e]``. Same dtype and device.
            causal: a token sees the tokens up to and including itself; otherwise all.
            scale: factor on the scores; default ``d ** -0.5``.

        Returns:
            ``[s, b, h, e]`` in q's dtype; gradients flow to q, k and v. Partial results are accumulated in float32.

        Raises:
            ValueError: for shapes, dtypes or devices that do not fit, or a problem the provider does not support.
        """
        problem = self.problem(q, k, v, causal=causal)
        reason = self.provider.unsupported(problem)
        if reason is not None:
            raise ValueError(f"provider {self.provider.name!r} cannot do this: {reason}")
        scale = q.size(-1) ** -0.5 if scale is None else scale
        return _Attention.apply(q, k, v, self.method(problem, q.device, scale), self.mesh)

    def problem(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Problem:
        """Describe an attention call, after checking that the three tensors fit together (ValueError if not)."""
        _check(q, k, v)
        s, b, h, d = q.shape
        return Problem(
            seq_length=s * self.size,
            size=self.size,
            heads=h,
            kv_heads=k.size(2),
            head_dim=d,
            v_head_dim=v.size(3),
            batch=b,
            dtype=q.dtype,
            causal=causal,
        )

    def method(self, problem: Problem, device: torch.device, scale: float) -> Attend:
        """The composed method for a problem: the provider's, around the local kernel."""
        backend, _ = backends.choose(self.options.backend, device, problem.dtype, problem.head_dim, problem.v_head_dim)
        segments = partial(self._segments, problem.seq_length)
        local = Local(backend=backend, segments=segments, causal=problem.causal, scale=scale)
        return self.provider.build(self.mesh, local, self.options)

    def _segments(self, seq_length: int, at: At) -> Segments:
        return join_adjacent([s for rank in at for s in self.layout.segments(seq_length, self.size, rank)])


class _Attention(torch.autograd.Function):
    """Any composed method as one differentiable operation."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, method: Attend, mesh: Mesh) -> Tensor:
        with mesh.ledger.phase("forward"):
            total = method.forward(q, k, v, (mesh.index,), (mesh.index,))
        out, lse = total if total is not None else _nothing_seen(q, v)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.method, ctx.mesh = method, mesh
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        wide = accumulation_dtype(q.dtype)
        delta = (dout.to(wide) * out.to(wide)).sum(-1)
        at = (ctx.mesh.index,)
        with ctx.mesh.ledger.phase("backward"):
            grads = ctx.method.backward(dout, q, k, v, lse, delta, at, at)
        if grads is None:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None, None
        return grads.dq.to(q.dtype), grads.dk.to(k.dtype), grads.dv.to(v.dtype), None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, dim: int, cp: ContextParallel) -> Tensor:
        ctx.dim, ctx.cp = dim, cp  # type: ignore[attr-defined]
        shards = [x.movedim(dim, 0)]
        for axis in reversed(cp.mesh.axes):  # fastest axis first, so that the order is that of the flat index
            shards = list(cp.mesh.all_gather(axis, shards).wait())
        return cp.layout.unshard(shards[0].chunk(cp.size), 0).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.cp.shard(grad, ctx.dim), None, None


def _nothing_seen(q: Tensor, v: Tensor) -> Partial:
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype))
    return Partial(q.new_zeros((*q.shape[:3], v.size(3))), lse)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"attention needs [tokens, batch, heads, head size] tensors, got {shapes}")
    if not (q.shape[:2] == k.shape[:2] == v.shape[:2] and q.size(3) == k.size(3) and k.size(2) == v.size(2)):
        raise ValueError(f"q, k and v do not fit together: {shapes}")
    if q.size(2) % k.size(2):
        raise ValueError(f"the number of query heads must be a multiple of the number of key/value heads, got {shapes}")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ValueError(f"q, k and v must share dtype and device, got {q.dtype}, {k.dtype}, {v.dtype}, {q.device}")
