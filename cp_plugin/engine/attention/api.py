"""``ContextParallel``: the public API for plain torch. One object shards sequences, knows positions, and attends.

    cp = cp_plugin.ContextParallel("striped", group=group)
    x = cp.shard(tokens, dim=0)                   # this rank's tokens
    y = cp.unshard(cp.attention(q, k, v, causal=True))  # q [s/cp, b, h, d], k and v [s/cp, b, g, d]

``attention`` is one autograd.Function, whatever the method.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cp_plugin.engine.attention import agreement, autocast, softmax
from cp_plugin.engine.attention.inputs import UNSET, Group, check_numbers, mask_of, process_group, typical_call
from cp_plugin.engine.attention.linear import LinearAttention
from cp_plugin.engine.attention.recompute import to_be_repeated
from cp_plugin.engine.attention.tokens import token_order
from cp_plugin.engine.comm import GroupMesh, Mesh
from cp_plugin.engine.common.eager import eager
from cp_plugin.engine.common.recent import Recent
from cp_plugin.engine.core.block import PLAIN, Scores
from cp_plugin.engine.core.layout import Layout, Segments
from cp_plugin.engine.core.mask import Mask, Window, document_bounds
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.scaling import Scaling
from cp_plugin.engine.core.spelling import as_called
from cp_plugin.engine.core.tree import Tree
from cp_plugin.engine.core.values import Owners
from cp_plugin.engine.kernels import backends, blocks
from cp_plugin.engine.kernels.backends import BlockKernel
from cp_plugin.engine.linear import kernels
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.gradient_dtype import float32_unless_told
from cp_plugin.engine.methods.local import Local
from cp_plugin.engine.methods.protocol import Attend, Parts, Provider, Scan

_PLANS, _OTHERS = 256, 32
"""Cache sizes of a ``ContextParallel``: composed methods, one per kind of call; copies on other layouts."""


class ContextParallel(LinearAttention):
    """Context-parallel attention over the ranks of a process group, each of which holds a shard (``Sharding``)."""

    def __init__(
        self,
        provider: str | Provider | providers.Resolved = "ring",
        *,
        group: Group | None = UNSET,
        mesh: Mesh | None = None,
        problem: Problem | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            provider: a registered name, a ``Provider``, or a ``Resolved`` from ``providers.settle`` (no options then).
            group: the context-parallel process group, or a ``DeviceMesh`` with one dimension, such as ``mesh["cp"]``;
                None is this rank alone, and may be left out where torch.distributed has no other ranks. Collective over
                the group, whose ranks must give the same provider and options.
            mesh: instead of a group, a mesh with the provider's axes.
            problem: a typical call, such as ``Problem(size=8, heads=32, kv_heads=8)``, by which the provider chooses
                what the options leave open; by default, equal numbers of query and key/value heads. A provider that
                must know them (usp) asks for it.
            options: as in ``cp_plugin.Options``: layout, backend, and providers' options, such as grid.

        Raises:
            ValueError: for an unknown name or option, options that do not fit each other or the number of ranks, a
                mesh with other axes, a group that does not contain this rank, a ``DeviceMesh`` with several dimensions,
                no group where there are several ranks, or other settings than other ranks have.
        """
        self.from_python = not isinstance(provider, providers.Resolved)
        self._calls = agreement.Calls(compared=self.from_python)
        self._planned = blocks.Planned()
        self.group = None if mesh is not None and group is UNSET else process_group(group)
        resolved = self._resolved(provider, mesh, problem, options)
        self.provider, self.options, self.why = resolved.provider, resolved.options, resolved.why
        if mesh is None:
            chosen = self.provider
            mesh = GroupMesh.from_group(resolved.axes, self.group, chosen.extra_groups, chosen.collective_axes)
        if mesh.axes != resolved.axes:
            raise ValueError(f"provider {self.provider.name!r} needs the mesh axes {resolved.axes}, got {mesh.axes}")
        self.mesh, self.per_host = mesh, resolved.problem.transport.per_host
        self._place(resolved.problem.placed or providers.layout_for(self.provider, self.options))

    @as_called
    def _resolved(
        self,
        provider: str | Provider | providers.Resolved,
        mesh: Mesh | None,
        problem: Problem | None,
        options: dict[str, Any],
    ) -> providers.Resolved:
        """The provider and its completed options."""
        if isinstance(provider, providers.Resolved):
            if options or problem not in (None, provider.problem):
                raise ValueError("a Resolved already has options and a problem: pass neither")
            return provider
        with agreement.compare_in_group(self.group if mesh is None else None) as settings:
            chosen = providers.get(provider)
            told = float32_unless_told(chosen, Options(**options))
            (kernels if chosen.kind == "linear" else backends).check_name(told.backend)
            settings |= {"provider": chosen.name, "layout": told.layout, "options": told.items, "problem": problem}
        return providers.settle(chosen, typical_call(chosen, told, self.group, mesh, problem), told)

    def _place(self, layout: Layout) -> None:
        """Place tokens in this layout, with empty caches of plans."""
        self.layout = layout
        self._number(token_order(self.mesh.axes, self.provider.beside, layout))
        self._plans: Recent[Hashable, Attend] = Recent(_PLANS)
        self._scans: Recent[Hashable, tuple[Scan, Parts]] = Recent(_PLANS)
        self._others: Recent[tuple[Layout, Options], ContextParallel] = Recent(_OTHERS)

    def __repr__(self) -> str:
        """The provider, ranks, layout and options, and a line for each choice that was made for the user."""
        chosen = providers.order_choices(replace(self.options, layout=None))
        ranks = f"rank {self.index} of {self.size}" if self.size > 1 else "one rank"
        parts = [repr(self.provider.name), ranks, f"layout={self.layout.name!r}"]
        lines = [f"ContextParallel({', '.join([*parts, *(f'{name}={value!r}' for name, value in chosen.items())])})"]
        return "\n    ".join([*lines, *self.why])

    def with_layout(self, layout: Layout) -> ContextParallel:
        """The same on another layout, such as one made for a pack of documents."""

        def made() -> ContextParallel:
            other = copy.copy(self)
            other._place(layout)
            return other

        return self._others.get((layout, self.options), made)

    def without_fp8(self) -> ContextParallel:
        """The same with everything computed, and sent, in the model's dtype."""
        other, chosen = copy.copy(self), self.options
        backend = "auto" if chosen.fp8 == "compute" else chosen.backend
        other.options = Options(layout=chosen.layout, backend=backend, items=chosen.items, fp8=None)
        return other

    @eager
    @autocast.cast("q", "k", "v")
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        softcap: float | None = None,
        window: Window | None = None,
        cu_seqlens: Tensor | None = None,
        tree: Tree | None = None,
        sink: Tensor | None = None,
        scaling: Scaling | None = None,
    ) -> Tensor:
        """Softmax attention over the whole sequence; every rank passes its shard.

        Args:
            q: ``[s, b, h, d]``; k: ``[s, b, g, d]`` with g dividing h; v: ``[s, b, g, e]``. Same dtype and device.
            causal: a token sees the tokens up to and including itself; otherwise all.
            scale: factor on the scores; default ``d ** -0.5``.
            softcap: cap c on the scaled scores s, which become ``c * tanh(s / c)`` (Gemma 2).
            window: how many tokens before and after itself a token sees, -1: all. The second number has no meaning
                under a causal mask.
            cu_seqlens: int ``[n + 1]``: bounds of the n documents of the whole sequence. A token sees its own document
                only.
            tree: instead: packed sequences with common prefixes, such as a prompt and its answers, each of which sees
                the prompt and itself. Only under a causal mask, and without a window.
            sink: ``[h]``: one more score for each head, with no value behind it (gpt-oss, "off by one" where it is 0).
            scaling: with ``fp8="compute"``, the calling layer's FP8 scaling, which gives the kernel its scales and
                records new ones where gradients are wanted. None: current scaling, without memory.

        Returns:
            ``[s, b, h, e]`` in q's dtype, under autocast in its; gradients flow to q, k, v and sink, the last as this
            rank's share of a sum over all ranks. Partial results are accumulated in float32.

        Raises:
            ValueError: for shapes, dtypes or devices that do not fit, a problem the provider does not support, or
                (compared in the first calls, and rarely after) ranks with other settings.
        """
        with agreement.compare_call(self, "attention", (q, k, v, sink)) as settings:
            check_numbers(scale, window, softcap)
            documents = document_bounds(cu_seqlens, q.size(0) * self.size)
            settings |= {"causal": causal, "window": window, "documents": documents, "tree": tree}
            settings |= {"scale": scale, "softcap": softcap}
        if scaling is not None and not (torch.is_grad_enabled() or to_be_repeated()):
            scaling = scaling.reader()
        tensors = tuple(None if x is None else (x.shape, x.dtype, x.device) for x in (q, k, v, sink))
        kind = (tensors, causal, window, documents, tree, scale, softcap, scaling, self.options)

        def composed() -> Attend:
            self._is_for("softmax")
            problem = self.problem(q, k, v, causal=causal)
            packed, capped = bool(documents) or tree is not None, softcap is not None
            problem = replace(problem, window=window, documents=packed, sink=sink is not None, softcap=capped)
            mask = mask_of(problem, documents, tree)
            self.refuse(problem)
            if sink is not None and not (
                sink.shape == q.shape[2:3] and sink.is_floating_point() and sink.device == q.device
            ):
                raise ValueError(
                    f"sink must be [{q.size(2)}], one number per query head, on {q.device}: got {sink.shape}"
                )
            if scaling is not None and self.options.fp8 != "compute":
                raise ValueError(
                    'scaling only applies to kernels that compute in FP8: add fp8="compute", or leave it out'
                )
            return self.method(problem, q.device, Scores.from_call(q, scale, softcap), mask, scaling)

        return softmax.Attention.apply(q, k, v, sink, self._plans.get(kind, composed), self.mesh)

    @as_called
    def method(
        self,
        problem: Problem,
        device: torch.device,
        scores: Scores,
        mask: Mask | None = None,
        scaling: Scaling | None = None,
        segments: Callable[[Owners], Segments] | None = None,
        keys: Callable[[Owners], Segments] | None = None,
    ) -> Attend:
        """The composed method for a problem, around the local kernel that the options choose.

        Args: mask, segments, keys: as for ``build_around``.
        """
        alike = keys is None and not (mask is not None and mask.documents)  # calls of a problem have the same shapes
        kernel = self.kernel(problem, device, scaling, plans=alike and problem in self._planned)
        return self.build_around(kernel, problem, scores, mask, segments, keys)

    def kernel(
        self, problem: Problem, device: torch.device, scaling: Scaling | None = None, *, plans: bool = True
    ) -> BlockKernel:
        """The kernel that the options choose; a trace of the planner records calls in its place."""
        return blocks.choose(self.options, problem, device, scaling, plans=plans).kernel

    def build_around(
        self,
        kernel: BlockKernel,
        problem: Problem,
        scores: Scores = PLAIN,
        mask: Mask | None = None,
        segments: Callable[[Owners], Segments] | None = None,
        keys: Callable[[Owners], Segments] | None = None,
    ) -> Attend:
        """The provider's method around any kernel.

        Args:
            mask: None: the problem's, without documents.
            segments, keys: positions of the tokens in q, and in k and v; None: as the layout has them.
        """
        segments = segments or partial(self.segments, problem.seq_length)
        mask = problem.mask() if mask is None else mask
        local = Local(kernel=kernel, segments=segments, keys=keys or segments, mask=mask, scores=scores)
        return self.provider.build(self.mesh, local, problem, self.options)
