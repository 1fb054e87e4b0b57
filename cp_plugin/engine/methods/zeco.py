"""One state, passed from rank to rank in token order: the fewest bytes, but ranks wait for those before them.

    lasp1 (arXiv 2404.02882)               zeco (arXiv 2507.01004, All-Scan), here in three blocks
    rank 0: abc                            rank 0: a b c
    rank 1:     abc                        rank 1:   a b c
    rank 2:         abc                    rank 2:     a b c

A rank adds its own segment to the state that arrives and passes it on; the segment's factor stays where it is, so the
delta rule sends no more than others. The columns of a state do not mix, so ZeCO passes them in n blocks: the last of P
ranks waits for P - 2 + n hops of a block each, where in LASP it waits for P - 1 of the whole state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cp_plugin.engine.comm import Pending
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.linear import segment
from cp_plugin.engine.methods.lasp2 import AXIS, LASP2, Lasp2, causal_only, segments_of, state_rows
from cp_plugin.engine.methods.protocol import Formula


@dataclass(frozen=True, slots=True)
class InTurn(Lasp2):
    """A ``Scan`` that passes one state through all segments."""

    blocks: int = 1
    """In which a state's columns are passed, at most."""

    def _carry(self, states: Tensor, factor: Tensor | None, *, back: bool) -> Pending[Tensor]:
        return Pending(lambda: self._pass(states, factor, back=back))

    def _pass(self, states: Tensor, factor: Tensor | None, *, back: bool) -> Tensor:
        segments, order = self._segments, self._order(0, back)
        states = states.unflatten(0, (segments, -1))
        factor = None if factor is None else factor.unflatten(0, (segments, -1))
        incoming = torch.empty_like(states)
        after = list[Tensor]()
        for place, number in enumerate(order):
            rank, slot = divmod(number, segments)
            if rank == self.mesh.index:
                decay = None if factor is None else factor[slot]
                before, after = self._visit(after, states[slot], decay, *self._neighbours(order, place))
                torch.cat(before, -1, out=incoming[slot]) if before else incoming[slot].zero_()
        return incoming.flatten(0, 1)

    def _visit(
        self, before: list[Tensor], left: Tensor, factor: Tensor | None, source: int | None, to: int | None, ends: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Pass the state through a segment; the blocks of the state before it and after it. None: a state of zeros.

        Args:
            before: the state before the segment, if this rank has it.
            source: the rank that sends it; None: none.
            to: the rank that the state after the segment is sent to; None: none.
            ends: nobody asks for the state after the segment.
        """
        arrived, afters, sending = list[Tensor](), list[Tensor](), list[Pending]()
        for number, added in enumerate(self._split_blocks(left)):
            passed = afters[-1:]
            if source is not None and to is not None and passed:  # post, wait
                arrived += self.mesh.exchange(AXIS, passed, to=to, source=source).wait()
            elif source is not None:
                arrived += self.mesh.receive(AXIS, (added,), source).wait()
            elif before:
                arrived.append(before[number])
            if source is None and to is not None and passed:
                sending.append(self.mesh.send(AXIS, passed, to))
            if not ends:
                afters.append(segment.advance(arrived[-1], added, factor) if arrived else added)  # add
        if to is not None:
            sending.append(self.mesh.send(AXIS, afters[-1:], to))
        for message in sending:
            message.wait()
        return arrived, afters

    def _split_blocks(self, state: Tensor) -> tuple[Tensor, ...]:
        """Split into blocks of one size, since what leaves and what arrives at the same time are one exchange."""
        columns = state.size(-1)
        return state.tensor_split(next(n for n in range(min(self.blocks, columns), 0, -1) if columns % n == 0), -1)

    def _neighbours(self, order: Sequence[int], place: int) -> tuple[int | None, int | None, bool]:
        """The other ranks that have the segments before and after the one at that place; whether it is the last."""
        ranks = [order[at] // self._segments if 0 <= at < len(order) else None for at in (place - 1, place + 1)]
        source, to = (None if rank == self.mesh.index else rank for rank in ranks)
        return source, to, ranks[1] is None


_HOP_BYTES = {"nccl": 2**21, "gloo": 2**17}
"""What a link carries while the host posts a hop and waits for it. Estimates: 50 us at 40 GB/s; 0.1 ms at 1.2 GB/s."""


def blocks_of(problem: Problem) -> int:
    """The number of blocks with which the last rank waits least.

    It waits for P - 2 + n hops. The host takes ``c`` for each, whatever it carries; a link that takes ``s`` for a state
    takes s / n for a block of it. So it waits (P - 2 + n) (c + s / n), which is least at n = sqrt((P - 2) s / c).
    """
    state = state_rows(problem) * problem.v_head_dim * problem.wide
    best = math.sqrt(max(0, problem.size - 2) * state / _HOP_BYTES[problem.transport.network])
    return max(1, round(best))


def _traffic(problem: Problem, options: Options, index: int) -> Formula:
    """One state for each segment whose successor is on another rank."""
    first, last = index == 0, index == problem.size - 1
    hops = {"forward": int(not last), "backward": int(not first)}
    if segments_of(options) == 2:
        hops = dict.fromkeys(hops, int(not last) + int(not first))
    state = state_rows(problem) * problem.v_head_dim * problem.wide
    return {(phase, AXIS): n * state for phase, n in hops.items() if n}


LASP1 = replace(
    LASP2,
    name="lasp1",
    summary="LASP (arXiv 2404.02882): one state, passed from rank to rank; a baseline",
    build=lambda mesh, parts, problem, options: InTurn(mesh, parts),
    traffic=_traffic,
    unsupported=causal_only,
    collective_axes=(),
)
ZECO = replace(
    LASP1,
    name="zeco",
    summary="ZeCO (arXiv 2507.01004): one state, passed from rank to rank in blocks of columns",
    build=lambda mesh, parts, problem, options: InTurn(mesh, parts, blocks=blocks_of(problem)),
)
PROVIDERS = (ZECO, LASP1)
