"""LASP-2 (arXiv 2502.07563): all-gather of chunk states, then a local prefix scan.

    rank 0: M0 -+                 +- S = 0                        o_inter = q S
    rank 1: M1 -+- one AllGather -+- S = M0
    rank 2: M2 -+   (meanwhile    +- S = factor1 M0 + M1          backward: the same with q dout^T in place of k v^T,
    rank 3: M3 -+    o_intra)     +- S = ...                      scanned from the end of the sequence

Bytes do not depend on the sequence length. The paper has no decay; with one, each segment also sends the factor by
which a state decays on its way through it, and the sum of states becomes a scan. Under the delta rule the factor is a
matrix, as large as a state. A rank has one segment, on zigzag tokens two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cp_plugin.engine.comm import Mesh, Pending
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.linear import scan
from cp_plugin.engine.linear.tokens import Tokens
from cp_plugin.engine.methods.protocol import Formula, Parts, Provider, Scan

AXIS = "cp"


@dataclass(frozen=True, slots=True)
class Lasp2:
    """A ``Scan`` that carries states between segments while the local kernel runs.

    One all-gather of all states in each pass, then a prefix scan on every rank; ``_carry`` may be another way.
    """

    mesh: Mesh
    parts: Parts

    def forward(self, x: Tokens) -> tuple[Tensor, tuple[Tensor, ...]]:
        kernel = self.parts.kernel
        if len(self.parts.order) == 1:  # no state comes before it, and none is missed after it
            return kernel.forward(x), ()
        segment = kernel.segment(x)
        arriving = self._carry(segment.left, segment.factor, back=False)  # post
        out = segment.outputs(kernel.forward)  # compute
        incoming = arriving.wait()  # wait
        return out + segment.read(incoming), (incoming, *segment.kept)  # add

    def backward(self, dout: Tensor, x: Tokens, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kernel = self.parts.kernel
        if len(self.parts.order) == 1:
            return kernel.backward(dout, x)
        segment = kernel.segment(x, kept[1:])
        arriving = self._carry(segment.read_back(dout), scan.transposed(segment.factor), back=True)  # post
        return segment.gradients(kernel.backward, dout, kept[0], arriving.wait)  # compute, wait, add

    def extend(self, x: Tokens, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        segment = self.parts.kernel.segment(x)
        gathering = self._gather(segment.left, segment.factor)
        out = segment.outputs(self.parts.kernel.forward)
        before, final = self._scan(gathering.wait(), initial=initial)
        return out + segment.read(torch.cat(before)), final

    def _carry(self, states: Tensor, factor: Tensor | None, *, back: bool) -> Pending[Tensor]:
        """The state before each of this rank's segments (back: the gradient after it), shaped like ``states``.

        Args:
            states: what the segments add, ``[directions * segments * b, g, d, e]``.
            factor: what becomes of a state on its way through each, as ``Segment.factor``.
        """
        gathering = self._gather(states, factor)

        def scan_gathered() -> Tensor:
            gathered, directions = gathering.wait(), range(self.parts.directions)
            return torch.cat([state for i in directions for state in self._scan(gathered, i, back=back)[0]])

        return Pending(scan_gathered)

    @property
    def _segments(self) -> int:
        """Segments of a rank."""
        return len(self.parts.order) // self.mesh.axes[AXIS]

    def _order(self, direction: int, back: bool) -> tuple[int, ...]:
        """Segment numbers in the order in which a state passes through them; reversed in a backward."""
        return self.parts.order[:: -1 if back != (direction == 1) else 1]

    def _gather(self, states: Tensor, factor: Tensor | None) -> Pending[tuple[Tensor, ...]]:
        """All-gather the segments' states and, where it differs between them, their ``factor``."""
        if factor is None:
            return self.mesh.all_gather(AXIS, (states,))
        if self.parts.uniform:
            gathering, everywhere = self.mesh.all_gather(AXIS, (states,)), factor.repeat(self.mesh.axes[AXIS], 1, 1, 1)
            return Pending(lambda: (*gathering.wait(), everywhere))
        sizes = states.size(3), factor.size(3)
        columns = torch.cat((states, factor.expand(*states.shape[:3], sizes[1])), 3)
        message = self.mesh.all_gather(AXIS, (columns,))
        return Pending(lambda: message.wait()[0].split(sizes, 3))

    def _scan(
        self, gathered: tuple[Tensor, ...], direction: int = 0, *, back: bool = False, initial: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """The states before this rank's segments, by a scan over all segments, and the state after the last one."""
        ranks, segments = self.mesh.axes[AXIS], self._segments
        order = self._order(direction, back)
        shape = (ranks, self.parts.directions, segments, -1)
        by_segment = (y.unflatten(0, shape)[:, direction].flatten(0, 1) for y in gathered)
        states = scan.states(*(_reorder(y, order) for y in by_segment), initial=initial)
        return [states[order.index(self.mesh.index * segments + i)] for i in range(segments)], states[-1]


class Summed(Lasp2):
    """Both directions without decay: every token reads the sum of all states (the paper's Algorithms 1 and 3)."""

    def forward(self, x: Tokens) -> tuple[Tensor, tuple[Tensor, ...]]:
        segment = self.parts.kernel.segment(x)
        total = self._carry(segment.left, None, back=False).wait()
        return segment.read(total), (total,)

    def backward(self, dout: Tensor, x: Tokens, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        segment = self.parts.kernel.segment(x, ())
        total = self._carry(segment.read_back(dout), None, back=True).wait()
        return segment.edge_gradients(dout, kept[0], total)

    def _carry(self, states: Tensor, factor: Tensor | None, *, back: bool) -> Pending[Tensor]:
        """The sum of all ranks' states, once for each of this rank's segments."""
        ranks, segments = self.mesh.axes[AXIS], self._segments
        gathering = self.mesh.all_gather(AXIS, (states.unflatten(0, (segments, -1)).sum(0),))
        return Pending(lambda: gathering.wait()[0].unflatten(0, (ranks, -1)).sum(0).repeat(segments, 1, 1, 1))


def _reorder(y: Tensor, order: tuple[int, ...]) -> Tensor:
    return y if order == tuple(range(len(order))) else y.index_select(0, _index(order, y.device))


@lru_cache(maxsize=64)
def _index(order: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept on the device: a new one would be copied, and waited for, in every pass of every layer."""
    return torch.tensor(order, device=device)


def _build(mesh: Mesh, parts: Parts, problem: Problem, options: Options) -> Scan:
    return Summed(mesh, parts) if problem.summed else Lasp2(mesh, parts)


def _traffic(problem: Problem, options: Options, index: int) -> Formula:
    """Each rank's states to all others in each pass, with ``factor`` where it varies."""
    if problem.size == 1:
        return {}
    states = 1 if problem.summed else segments_of(options) * (1 if problem.causal else 2)
    columns = problem.v_head_dim + problem.transit_columns
    sent = (problem.size - 1) * states * state_rows(problem) * columns * problem.wide
    return {(phase, AXIS): sent for phase in ("forward", "backward")}


def _unsupported(problem: Problem, options: Options) -> str | None:
    return "the delta rule is only defined with a causal mask" if problem.delta and not problem.causal else None


def segments_of(options: Options) -> int:
    """Number of segments of a rank."""
    return 2 if options.layout == "zigzag" else 1


def state_rows(problem: Problem) -> int:
    """Rows of a rank's state, over batch and heads."""
    return problem.batch * problem.kv_heads * problem.head_dim


def causal_only(problem: Problem, options: Options) -> str | None:
    """Return why a method that scans from the first token to the last cannot do this; None if it can."""
    return None if problem.causal else "it is only defined with a causal mask: use lasp2"


LASP2 = Provider(
    name="lasp2",
    kind="linear",
    summary="LASP-2 (arXiv 2502.07563): one all-gather of chunk states in each pass",
    layouts=("contiguous", "zigzag"),
    build=_build,
    traffic=_traffic,
    unsupported=_unsupported,
    collective_axes=(AXIS,),
)
PROVIDERS = (LASP2,)
