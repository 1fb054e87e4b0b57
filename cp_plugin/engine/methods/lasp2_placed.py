"""LASP-2 on tokens placed by document (``--cp-layout documents``): only documents that are cut have a state to send.

    rank 0: d0 d0 d0 | d2      M of its part of d0 -+- one AllGather -+- nothing comes before it
    rank 1: d0 | d1 d1 d1      M of its part of d0 -+   (meanwhile    +- S = rank 0's M, for the rows of d0 alone
    rank 2: d3 d3 d3 d4        nothing             -+    o_intra)     +- nothing

A rank's pieces are one segment for the kernel, in which every piece starts from zero. All ranks send as many states as
the rank with the most pieces of cut documents; none if no document is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from cp_plugin.engine.comm import Mesh, Pending
from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.linear import scan, segment
from cp_plugin.engine.linear.rules import rule_of
from cp_plugin.engine.linear.tokens import Tokens
from cp_plugin.engine.methods.protocol import Parts
from cp_plugin.engine.placement.documents import Cut

AXIS = "cp"


@dataclass(frozen=True, slots=True)
class Placed:
    """A ``Scan`` on placed tokens."""

    mesh: Mesh
    parts: Parts

    def forward(self, x: Tokens) -> tuple[Tensor, tuple[Tensor, ...]]:
        cuts = self._own_cuts()
        pieces = self._pieces(x)
        maps = [rule_of(piece).segment(piece) for piece in pieces]
        gathering = self._gather([each.left for each in maps], [each.factor for each in maps], x)  # post
        out = self.parts.kernel.forward(self._apart(x))  # compute
        incoming = self._states_before(gathering.wait(), back=False)  # wait
        for cut, each, state in zip(cuts, maps, incoming, strict=True):
            out[cut.start : cut.stop] += each.read(state)  # add
        return out, tuple(incoming)

    def backward(self, dout: Tensor, x: Tokens, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        cuts = self._own_cuts()
        pieces, douts = self._pieces(x), [dout[cut.start : cut.stop] for cut in cuts]
        maps = [rule_of(piece).segment(piece, ()) for piece in pieces]
        read_back = [each.read_back(dout) for each, dout in zip(maps, douts, strict=True)]
        gathering = self._gather(read_back, [scan.transposed(each.factor) for each in maps], x)  # post
        grads = tuple(grad.clone() for grad in self.parts.kernel.backward(dout, self._apart(x)))  # compute
        outgoing = self._states_before(gathering.wait(), back=True)  # wait
        for cut, each, *of_piece in zip(cuts, maps, douts, kept, outgoing, strict=True):
            for total, grad in zip(grads, each.edge_gradients(*of_piece), strict=True):
                total[cut.start : cut.stop] += grad  # add
        return grads

    def _pieces(self, x: Tokens) -> list[Tokens]:
        return [x.select(slice(cut.start, cut.stop)) for cut in self._own_cuts()]

    def _own_cuts(self) -> list[Cut]:
        """This rank's pieces of cut documents, by number."""
        return sorted(cut for cut in chain(*self._cuts) if cut.rank == self.mesh.index)

    @property
    def _cuts(self) -> tuple[tuple[Cut, ...], ...]:
        assert self.parts.cuts is not None, "built for placed tokens"
        return self.parts.cuts

    def _apart(self, x: Tokens) -> Tokens:
        """The same tokens, with every piece starting from a zero state."""
        assert self.parts.pieces is not None, "built for placed tokens"
        begins = self.parts.pieces.unsqueeze(1).expand(*x.k.shape[:2])
        return x._replace(starts=begins if x.starts is None else begins | x.starts)

    def _gather(
        self, states: Sequence[Tensor], factors: Sequence[Tensor | None], x: Tokens
    ) -> Pending[tuple[Tensor, ...]]:
        """States of all ranks' pieces, ``[ranks * most, b, g, d, e]``, and the factors, sent as further columns."""
        most = most_cuts(self._cuts)
        if not most:
            return Pending.done(())
        b, g, d, e = *x.k.shape[1:], x.v.size(3)
        columns = e, d if rule_of(x).matrix else 1
        message = x.k.new_zeros((most, b, g, d, sum(columns)), dtype=accumulation_dtype(x.q.dtype))
        for slot, state, kept in zip(message, states, factors, strict=False):
            slot[..., :e] = state
            slot[..., e:] = 1 if kept is None else kept
        arriving = self.mesh.all_gather(AXIS, (message,))
        return Pending(lambda: arriving.wait()[0].split(columns, 4))

    def _states_before(self, gathered: tuple[Tensor, ...], *, back: bool) -> list[Tensor]:
        """The state before each of this rank's pieces (back: the gradient after it)."""
        most, by_number = most_cuts(self._cuts), {}
        for document in self._cuts:
            if all(cut.rank != self.mesh.index for cut in document):
                continue
            states, factors = gathered
            carried = torch.zeros_like(states[0])
            for cut in reversed(document) if back else document:
                if cut.rank == self.mesh.index:
                    by_number[cut.number] = carried
                place = cut.rank * most + cut.number
                carried = segment.advance(carried, states[place], factors[place])
        return [by_number[number] for number in sorted(by_number)]


def most_cuts(cuts: tuple[tuple[Cut, ...], ...]) -> int:
    """The largest number of pieces of cut documents on one rank."""
    return max((cut.number + 1 for cut in chain(*cuts)), default=0)
