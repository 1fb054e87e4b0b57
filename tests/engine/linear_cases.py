"""Inputs of linear attention, and the float64 result of the sequential recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from oracle import no_sums_in_half
from torch import Tensor

from cp_plugin import ContextParallel
from cp_plugin.engine.core.problem import Decay, Problem
from cp_plugin.engine.linear import recurrence
from cp_plugin.engine.linear.tokens import Tokens, tokens_of

DECAYS: tuple[Decay, ...] = ("none", "head", "token", "key")
BOUNDARIES = (0.05, 0.3, 0.31, 0.7)
"""Document starts as fractions of the sequence."""


class Values(NamedTuple):
    """Whole sequences, as ``ContextParallel.linear_attention`` takes them, and the gradient of its result."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    dout: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCase(Problem):
    """One problem. Decays range from 1 - 1e-6 to exp(-50); keys of the delta rule have a norm of 1."""

    size: int = 1
    beta: float = 2.0
    """The largest; the smallest is 0."""
    seq_length: int = 96
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int = 6

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Boundaries of the documents."""
        if not self.documents:
            return None
        if self.bounds:
            return torch.tensor(self.bounds)
        starts = [0, *(int(share * self.seq_length) for share in BOUNDARIES)]
        return torch.tensor([*starts, self.seq_length])

    def inputs(self, dtype: torch.dtype = torch.float64) -> Values:
        """The log decay in float64, all others in ``dtype``."""
        g = torch.Generator().manual_seed(0)
        s, b = self.seq_length, self.batch

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

        q, k = normal(s, b, self.heads, self.head_dim), normal(s, b, self.kv_heads, self.head_dim)
        v, dout = normal(s, b, self.kv_heads, self.v_head_dim), normal(s, b, self.heads, self.v_head_dim)
        beta = None
        if self.delta:
            k = torch.nn.functional.normalize(k.double(), dim=3).to(dtype)
            beta = (self.beta * torch.rand(k.shape[:3], generator=g, dtype=torch.float64)).to(dtype)
        shapes = {"head": (self.kv_heads,), "token": k.shape[:3], "key": k.shape}
        if self.decay == "none":
            return Values(q, k, v, None, beta, dout)
        strength = torch.logspace(-6, 1.7, self.head_dim if self.decay == "key" else self.kv_heads, dtype=torch.float64)
        log_decay = -torch.rand(*shapes[self.decay], generator=g, dtype=torch.float64) * strength
        return Values(q, k, v, log_decay, beta, dout)

    @lru_cache(maxsize=8)  # noqa: B019  # cases are few, and compare equal
    def want(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """out, dq, dk, dv and the gradients of the log decay and beta, if any; for inputs rounded to ``dtype``."""
        *inputs, dout = self.inputs(dtype)
        wide = [None if x is None else x.double().requires_grad_() for x in inputs]
        out = self.outputs(*wide)
        return [out.detach(), *torch.autograd.grad(out, [x for x in wide if x is not None], dout.double())]

    def outputs(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None) -> Tensor:
        """The recurrence; without a causal mask also in reverse, counting each token itself once."""
        x = self.make_tokens(q, k, v, log_decay, beta)
        out = recurrence.run(x)[0]
        if self.causal:
            return out
        back = Tokens(*(None if y is None else y.flip(0) for y in x[:5]), self._marks(-1, (1, None)))
        repeat = self.heads // self.kv_heads
        itself = torch.einsum("sbhd,sbhd->sbh", q, k.repeat_interleave(repeat, 2)).unsqueeze(3)
        return out + recurrence.run(back)[0].flip(0) - itself * v.repeat_interleave(repeat, 2)

    def make_tokens(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None) -> Tokens:
        """The whole sequence as one segment."""
        return tokens_of(q, k, v, log_decay, beta)._replace(starts=self._marks(0, (0, -1)))

    def _marks(self, offset: int, part: tuple[int, int | None]) -> Tensor | None:
        """bool ``[s, b]``: first tokens of documents; for offset -1 last tokens, in reverse order."""
        if self.cu_seqlens is None:
            return None
        marks = torch.zeros(self.seq_length, self.batch, dtype=torch.bool)
        marks[self.cu_seqlens[slice(*part)] + offset] = True
        return marks if offset == 0 else marks.flip(0)


def run_on_shards(cp: ContextParallel, case: LinearCase, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Forward and backward on this rank's shards, in the order of ``LinearCase.want``."""
    *inputs, dout = case.inputs(dtype)
    shards = [None if x is None else sharded(cp, x).detach().requires_grad_() for x in inputs]
    with no_sums_in_half(dtype, added=False):  # lasp2 adds two rounded parts of a gradient
        out = cp.linear_attention(*shards[:4], beta=shards[4], causal=case.causal, cu_seqlens=case.cu_seqlens)
        assert out.dtype == dtype
        return [out.detach(), *torch.autograd.grad(out, [x for x in shards if x is not None], cp.shard(dout))]


def sharded(cp: ContextParallel, x: Tensor) -> Tensor:
    """All but a decay per head has tokens."""
    return x if x.dim() == 1 else cp.shard(x)
