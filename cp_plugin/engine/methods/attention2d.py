"""ATTENTION2D (arXiv 2503.15758): queries and keys on a grid of R x C ranks.

    ranks, column by column:      row r gathers Q:      column c gathers K, V:      rank (r, c) computes
        0  2  4                   queries = r mod R     keys = c mod C              queries r  x  keys c
        1  3  5      R = 2, C = 3

Every rank receives C - 1 shards of Q and R - 1 of K, V, where a ring receives P - 1 of K, V.

The drawing has keys in the paper's columns, which takes one exchange (Algorithm 1, line 1: the shard with row-major
number r*C + c goes to rank (r, c)), made once and kept for the backward. Its only purpose is to balance causal work,
so it is left out where the work is balanced anyway: under a full mask, and on zigzag tokens, where any two shards make
the same work. Column c then has the keys c*R .. c*R + R - 1, and any R and C will do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cp_plugin.engine.comm import WHOLE, Mesh, Pending, coordinates, flat_index
from cp_plugin.engine.comm.mesh import Tensors
from cp_plugin.engine.comm.shards import arriving
from cp_plugin.engine.common.text import show_bytes, show_option
from cp_plugin.engine.core.options import Option, Options, grids, not_a_grid, rows_and_columns
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.spelling import spelled
from cp_plugin.engine.core.values import KeyValues
from cp_plugin.engine.methods.gather import GatherKV, GatherQ
from cp_plugin.engine.methods.gradient_dtype import REDUCE_SCATTER, with_gradient_dtype
from cp_plugin.engine.methods.moves import HEAD_GROUPS, Move, Moved, best_groups, groups_do_not_divide
from cp_plugin.engine.methods.protocol import Attend, Choice, Formula, Provider

Q, KV = "q", "kv"
"""Axes along which queries and keys are gathered: a rank's row and column of the grid."""

_LAYOUTS = ("zigzag", "striped", "contiguous", "documents")


@dataclass(frozen=True, slots=True)
class Transpose(Move):
    """Exchange K, V between the column-major and the row-major numbering of the grid."""

    mesh: Mesh

    def bring_kv(self, kv: Pending[KeyValues]) -> Pending[KeyValues]:
        held, me = kv.wait(), self.mesh.index
        moved = self.mesh.exchange(WHOLE, held.tensors, to=self._holder(me), source=self._held(me))
        owners = held.owners
        return arriving(KeyValues, moved, lambda rank: owners(self._held(rank)))

    def return_dkv(self, dkv: Pending[Tensors]) -> Pending[Tensors]:
        me = self.mesh.index
        return self.mesh.exchange(WHOLE, dkv.wait(), to=self._held(me), source=self._holder(me))

    def _held(self, rank: int) -> int:
        """The shard a rank holds after the exchange: its column-major number is the rank's row-major number."""
        axes, at = self.mesh.axes, coordinates(self.mesh.axes, rank)
        column, row = divmod(at[KV] * axes[Q] + at[Q], axes[KV])
        return flat_index(axes, {**at, Q: column, KV: row})

    def _holder(self, shard: int) -> int:
        """The rank that holds a shard after the exchange; the inverse of ``_held``."""
        axes, at = self.mesh.axes, coordinates(self.mesh.axes, shard)
        row, column = divmod(at[Q] * axes[KV] + at[KV], axes[Q])
        return flat_index(axes, {**at, Q: column, KV: row})


def _axes(size: int, options: Options) -> dict[str, int]:
    rows, columns = options.grid or (1, size)
    return {Q: columns, KV: rows}


def _build(mesh: Mesh, local: Attend, problem: Problem, options: Options) -> Attend:
    grid = Moved((GatherQ(mesh, Q), GatherKV(mesh, KV)), local, groups=options.head_groups or 1)
    return grid if _even(problem, options) else Moved((Transpose(mesh),), grid, kept=True)


def _even(problem: Problem, options: Options) -> bool:
    """Return True if every pair of shards makes the same work."""
    return not problem.causal or (options.layout or _LAYOUTS[0]) == "zigzag"


def _traffic(problem: Problem, options: Options, index: int) -> Formula:
    """Queries and outputs along rows, keys and values along columns; shards on the diagonal stay in place."""
    axes, kv = _axes(problem.size, options), problem.kv_bytes
    column, row = divmod(index, axes[KV])
    stays = _even(problem, options) or row * axes[Q] + column == index
    transposed = 0 if stays else kv
    shard = problem.q_bytes + problem.out_bytes
    sums = problem.q_elements * problem.sum_bytes
    formula = {
        ("forward", WHOLE): transposed,
        ("forward", Q): (axes[Q] - 1) * (shard + problem.row_bytes),
        ("forward", KV): (axes[KV] - 1) * kv,
        ("backward", WHOLE): transposed,
        ("backward", Q): (axes[Q] - 1) * (shard + 2 * problem.row_bytes + sums),
        ("backward", KV): (axes[KV] - 1) * (kv + problem.kv_elements * problem.sum_bytes),
    }
    return {line: sent for line, sent in formula.items() if sent}


def grid_bytes(problem: Problem, options: Options, grid: tuple[int, int]) -> int:
    """Bytes that the busiest rank of a grid sends, forward and backward."""
    options = replace(options, grid=grid)
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
        sent = {grid: grid_bytes(problem, options, grid) for grid in _grids(problem, options)}
        best = min(sent, key=lambda grid: sent[grid])
        square = min(sent, key=lambda grid: (abs(grid[0] - grid[1]), grid))
        reason = (
            f"grid {show_option(best)} (rows x columns): the fewest bytes ({show_bytes(sent[best])} from each rank) "
            f"for {problem.heads} query and {problem.kv_heads} key/value heads"
        )
        if square != best and sent[best]:  # 0 if a rank has no token, which is refused later
            reason += f"; {show_option(square)} would send {sent[square] / sent[best]:.2f}x"
        return Choice(replace(options, grid=best), (reason,) if size > 1 else ())
    GRID.check_ranks(options.grid, size)
    return Choice(options)


def _unsupported(problem: Problem, options: Options) -> str | None:
    grid = options.grid or (1, problem.size)
    legal = _grids(problem, options)
    if grid in grids(problem.size) and grid not in legal:
        near = sorted(legal, key=lambda other: abs(other[0] - grid[0]))[:3]
        shown = ", ".join(f"{show_option(one)} ({show_bytes(grid_bytes(problem, options, one))})" for one in near)
        return (
            f"{spelled('grid', grid)} with a causal mask and {options.layout} tokens: neither side divides the other, "
            f"so the work would fall into many small pieces. Use {spelled('layout', 'zigzag')}, or one of the nearest "
            f"grids that fit, with the bytes each rank sends: {shown}"
        )
    return groups_do_not_divide(problem, options)


def _grids(problem: Problem, options: Options) -> list[tuple[int, int]]:
    """Grids that suit mask and tokens: where work is uneven, one side must divide the other."""
    even = _even(problem, options)
    return [(r, c) for r, c in grids(problem.size) if even or r % c == 0 or c % r == 0]


GRID = Option(
    "grid",
    metavar="RxC",
    meaning="rows and columns of the grid of ranks",
    default="the grid that sends the fewest bytes",
    read=rows_and_columns,
    write="rows x columns, such as 8x8",
    every=grids,
    misfit=not_a_grid,
)
PROVIDERS = (
    with_gradient_dtype(
        Provider(
            name="attention2d",
            summary="ATTENTION2D (arXiv 2503.15758): queries gathered along rows, keys and values along columns of a "
            "grid of ranks",
            layouts=_LAYOUTS,
            options=(GRID, HEAD_GROUPS),
            axes=_axes,
            build=_build,
            traffic=_traffic,
            choose=_choose,
            unsupported=_unsupported,
            extra_groups=(WHOLE,),
            collective_axes=(Q, KV),
        ),
        lambda options: REDUCE_SCATTER,
    ),
)
