"""Document placement against zigzag over the pack, for the table of ``docs/methods/needed.md``; and its speed.

    python ci/perf/placement.py     PASS or FAIL: 5 ms for a pack on 64 ranks

Packs of three kinds on 8 ranks (131,072 tokens) and 64 (1,048,576). "balance" is the busiest rank's work over the mean;
"bytes" are the keys the busiest rank receives or sends, whichever are more, over a ring's. The kinds are parametrised
such that zigzag comes near earlier measurements of such packs: balance 2.1, 1.5 and 2.0 on 8 ranks, 3.8, 3.3 and 2.3 on
64; bytes 0.09, 0.53 and 0.51, and 0.02, 0.10 and 0.11. ``tests/engine/placement/test_placement.py`` has the limits.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.placement.documents import Placement, get_layout, place
from cp_plugin.tools.bench.cases import LENGTHS, TOKENS

PER_HOST = 8
SECONDS = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Placements of all packs of a kind, in the same order."""

    kind: str
    size: int
    zigzag: list[Placement]
    placed: list[Placement]

    def bytes(self, placements: list[Placement]) -> list[float]:
        """Return the keys of the busiest rank over a ring's."""
        return [p.most / (p.seq_length - p.seq_length // p.size) for p in placements]


def zigzag(lengths: tuple[int, ...], size: int) -> Placement:
    """Place the tokens as zigzag over the whole pack does."""
    mask = Mask(None, 0, tuple(accumulate(lengths, initial=0)))
    pieces = [
        (d, s.start + part.start - mask.documents[d], s.start + part.stop - mask.documents[d], rank)
        for rank in range(size)
        for s in get_layout("zigzag").segments(sum(lengths), size, rank)
        for d, part in mask.pieces(s)
    ]
    return Placement(lengths, size, 1, None, *np.array(pieces).T)


def measured(packs: int) -> Iterator[Result]:
    """Place packs of every kind on 8 and on 64 ranks."""
    for kind, drawn in LENGTHS.items():
        for size in (8, 64):
            lengths = [drawn.pack(TOKENS * size, seed) for seed in range(packs)]
            placed = [place(pack, size, per_host=PER_HOST) for pack in lengths]
            yield Result(kind=kind, size=size, zigzag=[zigzag(pack, size) for pack in lengths], placed=placed)


def main() -> bool:
    """Print the median time of a placement on 64 ranks for every kind; whether one takes too long."""
    place((5, 3), 2)  # warm up imports
    slow = False
    for kind, drawn in LENGTHS.items():
        seconds = []
        for seed in range(16):
            pack, start = drawn.pack(TOKENS * 64, seed), time.process_time()
            place(pack, 64, per_host=PER_HOST)
            seconds.append(time.process_time() - start)
        slow |= statistics.median(seconds) > SECONDS
        print(f"{kind}: {1e3 * statistics.median(seconds):.1f} ms, at most {1e3 * max(seconds):.1f}")
    print("FAIL" if slow else "PASS")
    return slow


if __name__ == "__main__":
    sys.exit(main())
