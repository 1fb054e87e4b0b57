"""Segments under the delta rule: a token replaces part of the value that the state has under its key.

    u_t = v_t - k_t^T (a_t * S_(t-1))           what the state lacks
    S_t = a_t * S_(t-1) + k_t (beta_t u_t)^T    so the old state passes (I - beta_t k_t k_t^T) Diag(a_t), no longer
                                                diagonal

DeltaNet (arXiv 2406.06484) has no decay, Gated DeltaNet (arXiv 2412.06464) one per head, Kimi Delta Attention (arXiv
2510.26692) one per key dimension. Within a chunk the u solve a triangular system (the UT transform of arXiv 2406.06484,
section 3.2). With A_ij = beta_j k_i k_j, decayed from j to i, for j before i:

    (I + A) U = V - (read * K) S                linear in S: U = U0 - W S
    o_i      += read_i q_i S + sum_j P_ij beta_j u_j          P_ij = q_i k_j, decayed
    S'        = factor * S + sum_j write_j k_j (beta_j u_j)^T

with ``read``, ``write`` and ``factor`` as in ``decayed``. So a chunk is an affine map of the state, too, whose
``factor`` is a matrix [d, d], and chunks combine as others do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.linear import scan
from cp_plugin.engine.linear.decayed import edges, times
from cp_plugin.engine.linear.products import run_slabs, scores
from cp_plugin.engine.linear.segment import Backward, Forward, Run, Segment, run_gradients
from cp_plugin.engine.linear.tokens import Tokens, fold, group_queries, unfold


class Chunks(NamedTuple):
    """Affine maps of chunks, ``b`` of them."""

    own: Tensor
    """Outputs from a zero state: ``[t, b, g, r, e]``."""
    queries: Tensor
    """What reads the incoming state: ``[t, b, g, r, d]``."""
    left: Tensor
    """``[b, g, d, e]``"""
    factor: Tensor
    """``[b, g, d, d]``"""


class Delta(Segment):
    """A segment under the delta rule, chunk by chunk, of which each has a map of the state and outputs."""

    def _build(self) -> None:
        folded = self.x.each(fold)
        self._number = folded.q.size(1) // self.x.q.size(1)
        self._chunks = run_slabs(_prepare_chunks, folded, _joined)

    @property
    def left(self) -> Tensor:
        return self._from_zero[-1]

    @property
    def factor(self) -> Tensor:
        each = self._split_chunks(self._chunks.factor)
        identity = torch.eye(each.size(-1), dtype=each.dtype, device=each.device).expand(each.shape[1:])
        return scan.states(torch.zeros_like(each), each, identity)[-1]

    def run(self, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs and the state after the segment, as ``segment.Run``."""
        states = self._states(initial)
        return self._add_states(states), states[-1]

    def read(self, incoming: Tensor) -> Tensor:
        each = self._split_chunks(self._chunks.factor)
        nothing = incoming.new_zeros(each.size(0), *incoming.shape)
        return self._unfolded(self._read(scan.states(nothing, each, incoming)))

    def read_back(self, dout: Tensor) -> Tensor:
        q = self._chunks.queries
        folded = fold(dout.to(q.dtype)).unflatten(2, q.shape[2:4])
        grads = self._split_chunks(torch.einsum("tbgrd,tbgre->bgde", q, folded))
        return scan.states(grads.flip(0), self._split_chunks(self._chunks.factor).mT.flip(0))[-1]

    def outputs(self, forward: Forward) -> Tensor:
        return self._add_states(self._from_zero)

    def gradients(
        self, backward: Backward, dout: Tensor, incoming: Tensor, outgoing: Callable[[], Tensor]
    ) -> tuple[Tensor, ...]:
        return run_gradients(lambda x, state: self.run(state), self.x, dout, incoming, outgoing())

    @cached_property
    def _from_zero(self) -> Tensor:
        return self._states()

    def _states(self, initial: Tensor | None = None) -> Tensor:
        """Before each chunk and after the last."""
        return scan.states(self._split_chunks(self._chunks.left), self._split_chunks(self._chunks.factor), initial)

    def _add_states(self, states: Tensor) -> Tensor:
        return self._unfolded(self._chunks.own + self._read(states))

    def _read(self, states: Tensor) -> Tensor:
        return torch.einsum("tbgrd,bgde->tbgre", self._chunks.queries, states[:-1].flatten(0, 1))

    def _split_chunks(self, y: Tensor) -> Tensor:
        return y.unflatten(0, (self._number, -1))

    def _unfolded(self, y: Tensor) -> Tensor:
        return unfold(y.flatten(2, 3), self._number)[: self.x.q.size(0)]


class Widened(Segment):
    """A segment under the delta rule, from one run of a kernel that takes an initial state, on wider values.

    Its maps need the same triangular systems as its outputs. Columns of a state do not mix, so d more columns of
    values, all zero, which start from the identity, have the maps in them:

        values [v | 0]  from the state [0 | I]:    outputs [own | queries]    final state [left | factor]
        from a state S:                            own + queries S            left + factor S
    """

    def __init__(self, run: Run, x: Tokens, kept: tuple[Tensor, ...] | None = None) -> None:
        self._run, self.kept = run, kept or ()
        super().__init__(x, kept)

    def _build(self) -> None:
        if not self.kept:
            x, e, d = self.x, self.x.v.size(3), self.x.k.size(3)
            identity = torch.eye(d, dtype=accumulation_dtype(x.q.dtype), device=x.q.device)
            initial = pad(identity, (e, 0)).expand(*x.k.shape[1:3], d, e + d)
            out, final = self._run(x._replace(v=pad(x.v, (0, d))), initial)
            self._own, queries = out.split((e, d), 3)
            self.left, factor = final.split((e, d), 3)
            self.kept = queries.contiguous(), factor

    @property
    def factor(self) -> Tensor:
        return self.kept[1]

    @property
    def queries(self) -> Tensor:
        return self.kept[0].to(self.factor.dtype).unflatten(2, (self.x.k.size(2), -1))

    def outputs(self, forward: Forward) -> Tensor:
        return self._own.to(self.factor.dtype)

    def gradients(
        self, backward: Backward, dout: Tensor, incoming: Tensor, outgoing: Callable[[], Tensor]
    ) -> tuple[Tensor, ...]:
        return run_gradients(self._run, self.x, dout, incoming, outgoing())


def _joined(slabs: list[Chunks]) -> Chunks:
    own, queries, left, factor = zip(*slabs, strict=True)
    return Chunks(torch.cat(own, 1), torch.cat(queries, 1), torch.cat(left), torch.cat(factor))


def _prepare_chunks(x: Tokens) -> Chunks:
    assert x.beta is not None, "the delta rule needs beta"
    dtype = accumulation_dtype(x.q.dtype)
    q, k, v, beta = group_queries(x).to(dtype), x.k.to(dtype), x.v.to(dtype), x.beta.to(dtype).unsqueeze(-1)
    read, write, factor = edges(x)
    written = k * beta  # beta_j k_j
    reach, within = scores(torch.cat((k.unsqueeze(3), q), 3), written, x).split((1, q.size(3)), 2)  # b g r i j
    sides = torch.cat((v, times(k, read)), 3).permute(1, 2, 0, 3)  # b g t (e + d)
    # Unit triangular: the diagonal is not read, so a token does not reach itself.
    solved = torch.linalg.solve_triangular(reach.squeeze(2), sides, upper=False, unitriangular=True)
    u, w = solved.split((v.size(3), k.size(3)), 3)  # b g t e, b g t d
    own = torch.einsum("bgrij,bgje->ibgre", within, u)
    taken = torch.einsum("bgrij,bgjd->ibgrd", within, w)
    queries = (q if read is None else q * read.unsqueeze(-2)) - taken
    ending = times(written, write)
    left = torch.einsum("tbgd,bgte->bgde", ending, u)
    kept = torch.ones_like(k[0]) if factor is None else factor.expand(k.shape[1:])
    return Chunks(own, queries, left, torch.diag_embed(kept) - torch.einsum("tbgd,bgtf->bgdf", ending, w))
