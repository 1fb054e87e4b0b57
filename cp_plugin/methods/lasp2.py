"""LASP-2 (arXiv 2502.07563): each segment's state is gathered once, and everybody puts together what precedes him.

    rank 0: M0 -+                 +- S = 0                        o_inter = q S
    rank 1: M1 -+- one AllGather -+- S = M0
    rank 2: M2 -+   (meanwhile    +- S = through1 M0 + M1         the backward: the same with q dout^T in the place of
    rank 3: M3 -+    o_intra)     +- S = ...                      k v^T, and the sequence read from its end

Bytes do not depend on the sequence length. The paper has no decay; with one, each segment also sends what is left of a
state that passes through it, and the sum of states becomes a scan. A segment need not be a rank: zigzag ranks have two.

The baseline ``lasp1`` (arXiv 2404.02882) hands one state from segment to segment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from cp_plugin.comm import Mesh, Pending
from cp_plugin.core.layout import Layout
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.linear import scan, segment
from cp_plugin.linear.segment import Tokens
from cp_plugin.methods.lasp2_placed import AXIS, Placed, most_cuts
from cp_plugin.methods.protocol import Formula, Parts, Provider, Scan
from cp_plugin.placement.documents import DOCUMENTS, placement_of
from cp_plugin.placement.layouts import get_layout


@dataclass(frozen=True, slots=True)
class Lasp2:
    """A ``Scan``: all states to everybody, in one AllGather in each pass."""

    mesh: Mesh
    parts: Parts

    def forward(self, x: Tokens) -> tuple[Tensor, tuple[Tensor, ...]]:
        read, write, through = segment.edges(x)
        gathering = self._gather(segment.state(x, write), through)  # post
        out = self.parts.forward(x)  # compute
        incoming = self._before(gathering.wait(), back=False)  # wait
        del gathering  # the states of all ranks
        return out + segment.read(x, read, incoming), (incoming,)  # add

    def backward(self, dout: Tensor, x: Tokens, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        read, _, through = segment.edges(x)
        gathering = self._gather(segment.read_back(x, read, dout), through)
        inside = self.parts.backward(dout, x)
        outgoing = self._before(gathering.wait(), back=True)
        del gathering
        return _both(inside, segment.at_edges(dout, x, kept[0], outgoing))

    def final(self, x: Tokens) -> Tensor:
        """The state after the last token of the sequence, on every rank: ``[b, g, d, e]``."""
        _, write, through = segment.edges(x)
        return self._scan(self._gather(segment.state(x, write), through).wait())[1]

    def extend(self, x: Tokens, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """For generation: outputs of causal tokens, and the state after the last of them, on every rank. One AllGather.

        initial: the state before the first of them, ``[b, g, d, e]``; None: zero.
        """
        read, write, through = segment.edges(x)
        gathering = self._gather(segment.state(x, write), through)
        out = self.parts.forward(x)
        before, final = self._scan(gathering.wait(), initial=initial)
        return out + segment.read(x, read, torch.cat(before)), final

    def _gather(self, states: Tensor, through: Tensor | None) -> Pending:
        """The states of the segments of all ranks; where there is decay, also what passes through them.

        Args:
            states: what this rank's segments leave behind, ``[directions * segments * b, g, d, e]``.
            through: what is left of a state that passes through them, ``[directions * segments * b, g, x]``; None: all.
        """
        if through is None:
            return self.mesh.all_gather(AXIS, (states,))
        if self.parts.uniform:
            gathering, everywhere = self.mesh.all_gather(AXIS, (states,)), through.repeat(self.mesh.axes[AXIS], 1, 1)
            return Pending(lambda: (*gathering.wait(), everywhere))
        column = through.expand(*states.shape[:3]).unsqueeze(3)
        message = self.mesh.all_gather(AXIS, (torch.cat((states, column), 3),))
        return Pending(lambda: (message.wait()[0][..., :-1], message.wait()[0][..., -1]))

    def _before(self, gathered: tuple[Tensor, ...], *, back: bool) -> Tensor:
        """The state before each of this rank's segments, in each direction (back: after it, of gradients)."""
        directions = range(self.parts.directions)
        return torch.cat([state for i in directions for state in self._scan(gathered, i, back=back)[0]])

    def _scan(
        self, gathered: tuple[Tensor, ...], direction: int = 0, *, back: bool = False, initial: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """The states before this rank's segments, by a scan over those of all ranks, and the state after the last."""
        ranks, directions = self.mesh.axes[AXIS], self.parts.directions
        segments, order = len(self.parts.order) // ranks, _order(self.parts, direction, back)
        by_segment = (y.unflatten(0, (ranks, directions, segments, -1))[:, direction].flatten(0, 1) for y in gathered)
        found = scan.states(*(_in_order(y, order) for y in by_segment), initial=initial)
        return [found[order.index(self.mesh.index * segments + i)] for i in range(segments)], found[-1]


@dataclass(frozen=True, slots=True)
class Lasp1:
    """A ``Scan``: one state, from rank to rank in token order: as few bytes as can be, but each waits for all before
    it."""

    mesh: Mesh
    parts: Parts

    def forward(self, x: Tokens) -> tuple[Tensor, tuple[Tensor, ...]]:
        read, write, through = segment.edges(x)
        left = segment.state(x, write)
        out = self.parts.forward(x)  # compute
        incoming = self._in_turn(left, through, back=False)  # wait, hand on
        del left
        return out + segment.read(x, read, incoming), (incoming,)  # add

    def backward(self, dout: Tensor, x: Tokens, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        read, _, through = segment.edges(x)
        left = segment.read_back(x, read, dout)
        inside = self.parts.backward(dout, x)
        outgoing = self._in_turn(left, through, back=True)
        del left
        return _both(inside, segment.at_edges(dout, x, kept[0], outgoing))

    def _in_turn(self, left: Tensor, through: Tensor | None, *, back: bool) -> Tensor:
        """The state before each of this rank's segments (back: after it, of gradients); shaped like ``left``."""
        segments = len(self.parts.order) // self.mesh.axes[AXIS]
        states = left.unflatten(0, (self.parts.directions, segments, -1))
        through = None if through is None else through.unflatten(0, (self.parts.directions, segments, -1))
        found, sent = torch.zeros_like(states), []
        for direction in range(self.parts.directions):
            order = _order(self.parts, direction, back)
            carried = found[direction, 0]
            for place, number in enumerate(order):
                rank, here = divmod(number, segments)
                if rank != self.mesh.index:
                    continue
                if place > 0 and (source := order[place - 1] // segments) != rank:
                    (carried,) = self.mesh.receive(AXIS, (carried,), source).wait()
                found[direction, here] = carried
                decay = None if through is None else through[direction, here]
                carried = segment.after(carried, states[direction, here], decay)
                if place + 1 < len(order) and (to := order[place + 1] // segments) != rank:
                    sent.append(self.mesh.send(AXIS, (carried,), to))
        for message in sent:
            message.wait()
        return found.flatten(0, 2)


@dataclass(frozen=True, slots=True)
class Summed:
    """A ``Scan`` for both directions without decay: every token reads the one sum of all states (the paper's Algorithms
    1 and 3)."""

    mesh: Mesh
    parts: Parts

    def forward(self, x: Tokens) -> tuple[Tensor, tuple[Tensor, ...]]:
        total = self._sum(segment.state(x, None))
        return segment.read(x, None, total), (total,)

    def backward(self, dout: Tensor, x: Tokens, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return segment.at_edges(dout, x, kept[0], self._sum(segment.read_back(x, None, dout)))

    def _sum(self, states: Tensor) -> Tensor:
        """Of all segments of all ranks, for each of this rank's segments."""
        ranks = self.mesh.axes[AXIS]
        segments = len(self.parts.order) // ranks
        (gathered,) = self.mesh.all_gather(AXIS, (states.unflatten(0, (segments, -1)).sum(0),)).wait()
        return gathered.unflatten(0, (ranks, -1)).sum(0).repeat(segments, 1, 1, 1)


def _both(inside: tuple[Tensor, ...], at_edges: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients through the tokens of a segment, and through the states at its ends."""
    return tuple(a + b for a, b in zip(inside, at_edges, strict=True))


def _order(parts: Parts, direction: int, back: bool) -> tuple[int, ...]:
    """The numbers of the segments as a state passes through them; in a backward from the other end."""
    return parts.order[:: -1 if back != (direction == 1) else 1]


def _in_order(y: Tensor, order: tuple[int, ...]) -> Tensor:
    """The segments ``[n, b, ...]`` in that order."""
    return y if order == tuple(range(len(order))) else y.index_select(0, _index(order, y.device))


@lru_cache(maxsize=64)
def _index(order: tuple[int, ...], device: torch.device) -> Tensor:
    """On the device, where it stays: a new one would be copied there, and waited for, in every pass of every layer."""
    return torch.tensor(order, device=device)


def _axes(size: int, options: Options) -> dict[str, int]:
    return {AXIS: size}


def _build_lasp2(mesh: Mesh, parts: Parts, problem: Problem, options: Options) -> Scan:
    if parts.cuts is not None:
        return Placed(mesh, parts)
    return Summed(mesh, parts) if problem.summed else Lasp2(mesh, parts)


def _build_lasp1(mesh: Mesh, parts: Parts, problem: Problem, options: Options) -> Scan:
    return Lasp1(mesh, parts)


def _traffic_lasp2(problem: Problem, options: Options, index: int) -> Formula:
    """Each rank's states to all others, in each pass, with what is left of those passing through where that varies."""
    if problem.size == 1:
        return {}
    placement = placement_of(_layout(problem, options), problem.seq_length, problem.size)
    if placement is not None:
        sent = (problem.size - 1) * most_cuts(placement.cuts()) * _rows(problem) * (problem.v_head_dim + 1)
        return {(phase, AXIS): sent * problem.wide for phase in ("forward", "backward") if sent}
    columns = problem.v_head_dim + (problem.decay in ("token", "key") or problem.documents)
    states = 1 if problem.summed else _segments(options) * (1 if problem.causal else 2)
    sent = (problem.size - 1) * states * _rows(problem) * columns * problem.wide
    return {("forward", AXIS): sent, ("backward", AXIS): sent}


def _traffic_lasp1(problem: Problem, options: Options, index: int) -> Formula:
    """One state for each segment that is followed by one on another rank."""
    first, last = index == 0, index == problem.size - 1
    hops = {"forward": int(not last), "backward": int(not first)}
    if _segments(options) == 2:
        hops = dict.fromkeys(hops, int(not last) + int(not first))
    state = _rows(problem) * problem.v_head_dim * problem.wide
    return {(phase, AXIS): n * state for phase, n in hops.items() if n}


def _layout(problem: Problem, options: Options) -> Layout:
    return problem.placed or get_layout(options.layout or LASP2.layouts[0])


def _placed_causal_only(problem: Problem, options: Options) -> str | None:
    if problem.causal or _layout(problem, options).name != DOCUMENTS.name:
        return None
    return f"on the layout {DOCUMENTS.name!r} it runs under a causal mask only"


def _segments(options: Options) -> int:
    return 2 if options.layout == "zigzag" else 1


def _rows(problem: Problem) -> int:
    """Rows of one rank's state, over batch and heads."""
    return problem.batch * problem.kv_heads * problem.head_dim


def causal_only(problem: Problem, options: Options) -> str | None:
    """Why not, for a method that is defined from the first token to the last."""
    return None if problem.causal else "it is defined under a causal mask only: use lasp2"


LASP2 = Provider(
    name="lasp2",
    kind="linear",
    summary="LASP-2 (arXiv 2502.07563): one AllGather of the segments' states in each pass",
    layouts=("contiguous", "zigzag", "documents"),
    axes=_axes,
    build=_build_lasp2,
    traffic=_traffic_lasp2,
    unsupported=_placed_causal_only,
)
PROVIDERS = (
    LASP2,
    replace(
        LASP2,
        name="lasp1",
        layouts=("contiguous", "zigzag"),
        summary="LASP (arXiv 2404.02882): one state, from rank to rank; a baseline",
        build=_build_lasp1,
        traffic=_traffic_lasp1,
        unsupported=causal_only,
    ),
)
