"""ATTENTION2D (arXiv 2503.15758): queries and keys on a grid of R x C ranks.

    ranks, column by column:      row r gathers Q:      column c gathers K, V:      rank (r, c) computes
        0  2  4                   queries = r mod R     keys = c mod C              queries r  x  keys c
        1  3  5      R = 2, C = 3

Every rank receives C - 1 shards of Q and R - 1 of K, V, where a ring receives P - 1 of K, V. Keys arrive in the right
column by one exchange (Algorithm 1, line 1): the shard with the row-major number r*C + c goes to rank (r, c). It is
made once and kept for the backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cp_plugin.mesh import WHOLE, Mesh, Pending, coordinates, flat_index
from cp_plugin.methods.gather import GatherKV, GatherQ
from cp_plugin.moves import Kept, Move, Moved
from cp_plugin.pipeline import best_groups, groups_do_not_divide, in_head_groups
from cp_plugin.problem import Options, Problem
from cp_plugin.protocol import At, Attend, Choice, Formula, Provider
from cp_plugin.text import in_bytes, in_words

Q, KV = "q", "kv"
"""The axes along which queries and keys are gathered: a rank's row and column of the grid."""


@dataclass(frozen=True, slots=True)
class Transpose(Move):
    """Exchange K, V between the column-major and the row-major numbering of the grid."""

    mesh: Mesh

    def bring_kv(self, tensors: Pending, at: At) -> tuple[Pending, At]:
        me = self.mesh.index
        moved = self.mesh.permute(tensors.wait(), to=self._holder(me), source=self._held(me))
        return moved, lambda rank: at(self._held(rank))

    def return_dkv(self, dkv: Pending) -> Pending:
        me = self.mesh.index
        return self.mesh.permute(dkv.wait(), to=self._held(me), source=self._holder(me))

    def _held(self, rank: int) -> int:
        """The shard that a rank is to hold: the one whose column-major number is this rank's row-major number."""
        axes, at = self.mesh.axes, coordinates(self.mesh.axes, rank)
        column, row = divmod(at[KV] * axes[Q] + at[Q], axes[KV])
        return flat_index(axes, {**at, Q: column, KV: row})

    def _holder(self, shard: int) -> int:
        """The rank that is to hold a shard: the inverse."""
        axes, at = self.mesh.axes, coordinates(self.mesh.axes, shard)
        row, column = divmod(at[Q] * axes[KV] + at[KV], axes[Q])
        return flat_index(axes, {**at, Q: column, KV: row})


def _axes(size: int, options: Options) -> dict[str, int]:
    rows, columns = options.grid or (1, size)
    return {Q: columns, KV: rows}


def _build(mesh: Mesh, local: Attend, problem: Problem, options: Options) -> Attend:
    grid = in_head_groups(options.head_groups, Moved((GatherQ(mesh, Q), GatherKV(mesh, KV)), local))
    return Kept((Transpose(mesh),), grid)


def _traffic(problem: Problem, options: Options, index: int) -> Formula:
    """Queries and outputs along the rows, keys and values along the columns; ranks on the diagonal do not transpose."""
    axes, item = _axes(problem.size, options), problem.dtype.itemsize
    column, row = divmod(index, axes[KV])
    transposed = 0 if row * axes[Q] + column == index else problem.kv_elements * item
    shard = (problem.q_elements + problem.out_elements) * item
    sums = problem.q_elements * problem.wide
    found = {
        ("forward", WHOLE): transposed,
        ("forward", Q): (axes[Q] - 1) * (shard + problem.row_bytes),
        ("forward", KV): (axes[KV] - 1) * problem.kv_elements * item,
        ("backward", WHOLE): transposed,
        ("backward", Q): (axes[Q] - 1) * (shard + 2 * problem.row_bytes + sums),
        ("backward", KV): (axes[KV] - 1) * problem.kv_elements * (item + problem.wide),
    }
    return {line: sent for line, sent in found.items() if sent}


def grid_bytes(problem: Problem, grid: tuple[int, int]) -> int:
    """Bytes that the busiest rank of a grid sends, forward and backward."""
    options = Options(grid=grid)
    return max(sum(_traffic(problem, options, index).values()) for index in range(problem.size))


def _choose(problem: Problem, options: Options) -> Choice:
    options, why = _choose_grid(problem, options)
    if options.head_groups is None:
        groups = best_groups(problem) if problem.size > 1 else 1
        options = replace(options, head_groups=groups)
        why = (*why, f"{groups} groups of heads overlap communication and computation") if groups > 1 else why
    return Choice(options, why)


def _choose_grid(problem: Problem, options: Options) -> Choice:
    size = problem.size
    if options.grid is None:
        sent = {grid: grid_bytes(problem, grid) for grid in _grids(size, problem.causal)}
        best = min(sent, key=lambda grid: sent[grid])
        square = min(sent, key=lambda grid: (abs(grid[0] - grid[1]), grid))
        reason = (
            f"grid {in_words(best)} (rows x columns): the fewest bytes ({in_bytes(sent[best])} from each rank) for "
            f"{problem.heads} query and {problem.kv_heads} key/value heads"
        )
        if square != best:
            reason += f"; {in_words(square)} would send {sent[square] / sent[best]:.2f}x"
        return Choice(replace(options, grid=best), (reason,) if size > 1 else ())
    rows, columns = options.grid
    if rows < 1 or columns < 1 or rows * columns != size:
        raise ValueError(
            f"--cp-grid {in_words(options.grid)} does not hold {size} context-parallel ranks: use one of "
            f"{', '.join(map(in_words, _grids(size, False)))}"
        )
    return Choice(options)


def _unsupported(problem: Problem, options: Options) -> str | None:
    grid = options.grid or (1, problem.size)
    if problem.causal and grid not in _grids(problem.size, True):
        legal = sorted(_grids(problem.size, True), key=lambda other: abs(other[0] - grid[0]))[:3]
        shown = ", ".join(f"{in_words(other)} ({in_bytes(grid_bytes(problem, other))})" for other in legal)
        return (
            f"--cp-grid {in_words(grid)} under a causal mask: neither side divides the other, so its work would fall "
            f"into many small pieces. The nearest that fit, with the bytes each rank sends: {shown}"
        )
    return groups_do_not_divide(problem, options)


def _grids(size: int, causal: bool) -> list[tuple[int, int]]:
    """Rows and columns; for a causal mask one must divide the other."""
    grids = [(rows, size // rows) for rows in range(1, size + 1) if size % rows == 0]
    return [(r, c) for r, c in grids if not causal or r % c == 0 or c % r == 0]


PROVIDERS = (
    Provider(
        name="attention2d",
        summary="ATTENTION2D (arXiv 2503.15758): queries gathered along rows, keys and values along columns of a grid",
        layouts=("striped", "zigzag", "contiguous"),
        options=("grid", "head_groups"),
        axes=_axes,
        build=_build,
        traffic=_traffic,
        choose=_choose,
        unsupported=_unsupported,
        extra_groups=(WHOLE,),
    ),
)
