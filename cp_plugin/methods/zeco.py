"""One state, passed from rank to rank in token order: the fewest bytes, but ranks wait for those before them.

    lasp1 (arXiv 2404.02882)               zeco (arXiv 2507.01004, All-Scan), here in three blocks
    rank 0: abc                            rank 0: a b c
    rank 1:     abc                        rank 1:   a b c
    rank 2:         abc                    rank 2:     a b c

A rank adds its own segment to the state that arrives and passes it on; ``through`` stays where it is, so that the delta
rule sends no more than others. The columns of a state do not mix, so ZeCO passes them in blocks, half as many as there
are ranks: the last of P ranks then waits for the time of three states at most, where in LASP it waits for P - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cp_plugin.comm import Pending
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.linear import segment
from cp_plugin.methods.lasp2 import AXIS, LASP2, States, causal_only, segments_of, state_rows
from cp_plugin.methods.protocol import Formula


@dataclass(frozen=True, slots=True)
class InTurn(States):
    """A ``Scan`` that passes one state through all segments."""

    blocks: int = 1
    """In which a state's columns are passed, at most."""

    def _carry(self, states: Tensor, through: Tensor | None, *, back: bool) -> Pending[Tensor]:
        return Pending(lambda: self._pass(states, through, back=back))

    def _pass(self, states: Tensor, through: Tensor | None, *, back: bool) -> Tensor:
        segments, order = self._segments, self._order(0, back)
        states = states.unflatten(0, (segments, -1))
        through = None if through is None else through.unflatten(0, (segments, -1))
        found = torch.zeros_like(states)
        for place, number in enumerate(order):
            rank, here = divmod(number, segments)
            if rank == self.mesh.index:
                decay = None if through is None else through[here]
                ends = self._other(order, place - 1), self._other(order, place + 1)
                after = self._visit(found[here], states[here], decay, *ends)
                if place + 1 < len(order) and ends[1] is None:
                    torch.cat(after, -1, out=found[order[place + 1] % segments])
        return found.flatten(0, 1)

    def _visit(
        self, before: Tensor, left: Tensor, through: Tensor | None, source: int | None, to: int | None
    ) -> list[Tensor]:
        """Pass the state through a segment; the blocks of the state after it.

        Args:
            before: the state before the segment; filled here if another rank sends it.
            source: that rank; None: none.
            to: the rank that the state after the segment is sent to; None: none.
        """
        afters, sending = list[Tensor](), list[Pending]()
        for arrived, added in zip(self._in_blocks(before), self._in_blocks(left), strict=True):
            passed = afters[-1:]
            if source is not None and to is not None and passed:  # post, wait
                arrived.copy_(self.mesh.exchange(AXIS, passed, to=to, source=source).wait()[0])
            elif source is not None:
                arrived.copy_(self.mesh.receive(AXIS, (added,), source).wait()[0])
            elif to is not None and passed:
                sending.append(self.mesh.send(AXIS, passed, to))
            afters.append(segment.after(arrived, added, through))  # add
        if to is not None:
            sending.append(self.mesh.send(AXIS, afters[-1:], to))
        for message in sending:
            message.wait()
        return afters

    def _in_blocks(self, state: Tensor) -> tuple[Tensor, ...]:
        """Of one size, since what leaves and what arrives at the same time are one exchange."""
        columns = state.size(-1)
        return state.tensor_split(next(n for n in range(self.blocks, 0, -1) if columns % n == 0), -1)

    def _other(self, order: Sequence[int], place: int) -> int | None:
        """The rank of the segment at that place; None for this rank's own, and outside."""
        rank = order[place] // self._segments if 0 <= place < len(order) else self.mesh.index
        return None if rank == self.mesh.index else rank


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
    layouts=("contiguous", "zigzag"),
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
    build=lambda mesh, parts, problem, options: InTurn(mesh, parts, blocks=max(1, problem.size // 2)),
)
PROVIDERS = (ZECO, LASP1)
