"""Other numbers of ranks for the same parallel shape: grids, nested rings and head axes in proportion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from cp_plugin.examples.config import Value


def scaled_shape(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """So many ranks in the shape that is nearest in its proportions; what is 1 stays 1.

    Of two that are as near the one that is smaller in front, as 2x4 for an 8x8 grid on 8 ranks. Sizes above 1 stay
    above 1 where the number of ranks allows it.
    """
    wide = [n for n in sizes if n > 1]
    if not wide:
        return (*sizes[:-1], ranks)
    shrink = (math.log(math.prod(wide)) - math.log(ranks)) / len(wide)

    def distance(shape: tuple[int, ...]) -> tuple[int, float, tuple[int, ...]]:
        off = sum((math.log(new) - math.log(old) + shrink) ** 2 for new, old in zip(shape, wide, strict=True))
        return shape.count(1), round(off, 9), shape

    best = iter(min(_factored(ranks, len(wide)), key=distance))
    return tuple(next(best) if n > 1 else 1 for n in sizes)


def resized(parallel: dict[str, Value], ranks: int, node: tuple[int, int] | None = None) -> dict[str, Value]:
    """The flags with so many context-parallel ranks, and what has to be divided over them in proportion.

    Args:
        parallel: flags with ``context-parallel-size``; of ``cp-grid``, ``cp-intra-size`` and ``cp-head-parallel`` those
            that it has.
        node: context-parallel ranks of a node, before and now: an inner ring or a head axis that was a node stays one.
            None: there are no nodes.
    """
    old = _number(parallel["context-parallel-size"])
    found: dict[str, Value] = {**parallel, "context-parallel-size": ranks}
    names = [name for name in ("cp-head-parallel", "cp-intra-size") if parallel.get(name) is not None]
    kept = {name: node[1] for name in names if node and parallel[name] == node[0] and ranks % node[1] == 0}
    found.update(kept)
    if ranks == old:
        return found
    heads = _number(parallel.get("cp-head-parallel") or 1)
    grid, intra = parallel.get("cp-grid"), parallel.get("cp-intra-size")
    rest = (old // heads,)
    if isinstance(grid, str) and "x" in grid:
        rest = tuple(int(n) for n in grid.split("x"))
    elif intra is not None:
        rest = (old // heads // _number(intra), _number(intra))
    if "cp-head-parallel" in kept:
        shape = (node[1], *scaled_shape(rest, ranks // node[1])) if node else ()
    else:
        shape = scaled_shape((heads, *rest), ranks)
    if "cp-head-parallel" in names:
        found["cp-head-parallel"] = shape[0]
    if "cp-intra-size" in names and "cp-intra-size" not in kept:
        found["cp-intra-size"] = shape[-1]
    if isinstance(grid, str) and "x" in grid:
        found["cp-grid"] = f"{shape[1]}x{shape[2]}"
    return found


def _factored(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many."""
    if parts == 1:
        yield (number,)
        return
    for first in (n for n in range(1, number + 1) if number % n == 0):
        yield from ((first, *rest) for rest in _factored(number // first, parts - 1))


def _number(value: Value) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value}: a whole number is needed")
    return value
