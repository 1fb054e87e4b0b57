"""Other numbers of ranks for the same parallel shape: grids, nested rings and head axes in proportion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set

from cp_plugin.cli.examples.config import Value, size
from cp_plugin.core.options import rows_and_columns
from cp_plugin.core.text import in_words

_SIZES = ("cp-head-parallel", "cp-intra-size")


def scaled_shape(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The shape of this many ranks that is closest in its proportions; a size of 1 stays 1.

    Of two equally close shapes, the one that is smaller in front: 2x4 for an 8x8 grid on 8 ranks. Sizes above 1 stay
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


def resized(
    parallel: dict[str, Value], ranks: int, node: tuple[int, int] | None = None, given: Set[str] = frozenset()
) -> dict[str, Value]:
    """The flags for this many context-parallel ranks, with grids, rings and head axes in proportion.

    Args:
        parallel: flags with ``context-parallel-size``; of ``cp-grid``, ``cp-intra-size`` and ``cp-head-parallel`` those
            that it has.
        node: context-parallel ranks of a node, before and now: an inner ring or a head axis that was a node stays one.
            None: there are no nodes.
        given: flags that were chosen for these ranks: they stay.

    Raises:
        ValueError: for sizes that are no whole numbers, 1 or more.
    """
    old = size("context-parallel-size", parallel["context-parallel-size"])
    found: dict[str, Value] = {**parallel, "context-parallel-size": ranks}
    own = {name: size(name, parallel[name]) for name in _SIZES if parallel.get(name) is not None}
    kept = {name: n for name, n in own.items() if name in given}
    if node:
        kept |= {name: node[1] for name in own.keys() - kept if own[name] == node[0] and ranks % node[1] == 0}
    found.update(kept)
    grid = rows_and_columns(str(parallel.get("cp-grid")))
    if ranks == old or (grid and "cp-grid" in given):
        return found
    heads, intra = own.get("cp-head-parallel", 1), own.get("cp-intra-size")
    rest = grid or (old // heads,)
    if not grid and intra is not None:
        rest = (old // heads // intra, intra)
    if "cp-head-parallel" in kept:
        shape = (kept["cp-head-parallel"], *scaled_shape(rest, max(1, ranks // kept["cp-head-parallel"])))
    else:
        shape = scaled_shape((heads, *rest), ranks)
    if "cp-head-parallel" in own:
        found["cp-head-parallel"] = shape[0]
    if "cp-intra-size" in own and "cp-intra-size" not in kept:
        found["cp-intra-size"] = shape[-1]
    if grid:
        found["cp-grid"] = in_words(shape[1:])
    return found


def _factored(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of this many factors."""
    if parts == 1:
        yield (number,)
        return
    for first in (n for n in range(1, number + 1) if number % n == 0):
        yield from ((first, *rest) for rest in _factored(number // first, parts - 1))
