"""Linear attention by ``ContextParallel``: the public calls, and the scan behind them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cp_plugin.attention import agreement, autocast, linear
from cp_plugin.attention.inputs import check_numbers
from cp_plugin.attention.tokens import Sharding
from cp_plugin.common.eager import eager
from cp_plugin.common.recent import Recent
from cp_plugin.core.mask import document_bounds
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.core.spelling import as_called
from cp_plugin.linear import kernels
from cp_plugin.linear.tokens import tokens_of
from cp_plugin.methods.parts import Parts
from cp_plugin.methods.protocol import Continued, Kind, Provider, Scan
from cp_plugin.placement.documents import placement_of


class LinearAttention(Sharding):
    """Linear attention over sharded sequences; ``ContextParallel`` has the provider and the options."""

    provider: Provider
    options: Options
    from_python: bool
    """Whether messages write options as arguments: it was made in Python, not from the flags of a training."""
    _calls: agreement.Calls
    _scans: Recent[Hashable, tuple[Scan, Parts]]

    @abstractmethod
    def problem(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Problem:
        """Describe a call."""

    @abstractmethod
    def refuse(self, problem: Problem) -> None:
        """ValueError for a problem that the provider does not support."""

    @abstractmethod
    def _is_for(self, kind: Kind) -> None:
        """ValueError for a provider of another kind."""

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
                not increase from 0 to the length of the sequence or lack some of the placed documents', a log_decay
                above 0, or a problem the provider does not support.
        """
        problem = self._linear_problem(q, k, v, log_decay, beta, causal=causal, cu_seqlens=cu_seqlens, scale=scale)
        scan, parts = self.scan(problem, q.device)
        documents = self._documents(problem.seq_length, cu_seqlens, q.device)
        return linear.attend(tokens_of(q * scale, k, v, log_decay, beta), scan, parts, self.mesh, documents)

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
            x = linear.without_padding(x, kept)
            problem = replace(problem, decay="token" if problem.decay == "head" else problem.decay)
        return linear.extend(x, *self._continued(problem, k.device), state)

    @as_called
    def scan(self, problem: Problem, device: torch.device) -> tuple[Scan, Parts]:
        """The composed method for a problem of linear attention, and the parts it is built around; ValueError for a
        problem the provider does not support."""

        def composed() -> tuple[Scan, Parts]:
            placement = placement_of(self.layout, problem.seq_length, self.size) if self.size > 1 else None
            self.refuse(problem if placement is None else replace(problem, placed=self.layout))
            packed = problem.documents or placement is not None
            kernel = kernels.choose(self.options.backend, device, replace(problem, documents=packed)).kernel
            if placement is None:
                segments = [self.layout.segments(problem.seq_length, self.size, number) for number in self.numbers]
                parts = Parts.of_segments(problem, segments, kernel)
            else:
                parts = Parts.of_placement(placement, self.index, kernel, device)
            return self.provider.build(self.mesh, parts, problem, self.options), parts

        return self._scans.get((problem, device, self.options), composed)

    def _continued(self, problem: Problem, device: torch.device) -> tuple[Continued, Parts]:
        """``scan`` for generation; ValueError for one that does not have the state after the last token."""
        scan, parts = self.scan(problem, device)
        if not isinstance(scan, Continued):
            raise ValueError(f"the {self.layout.name} layout leaves no single final state: use another layout")
        return scan, parts

    def _documents(self, seq_length: int, cu_seqlens: Tensor | None, device: torch.device) -> linear.Documents | None:
        """Which of this rank's tokens begin and end documents.

        ValueError for bounds that are none, or under which a document reaches into another of this pack's layout.
        """
        bounds = document_bounds(cu_seqlens, seq_length)
        placement = placement_of(self.layout, seq_length, self.size) if self.size > 1 else None
        if placement is not None:
            linear.check_placed(placement, bounds)
        if cu_seqlens is None:
            return None
        return linear.documents_of(self.positions(seq_length, device), cu_seqlens, bounds)

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
        with agreement.of_call(self, "linear_attention", tensors) as settings:
            self._is_for("linear")
            check_numbers(scale)
            problem = self.problem(q, k, v, causal=causal)
            decay = linear.decay_of(log_decay, k)
            linear.check_beta(beta, k)
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
