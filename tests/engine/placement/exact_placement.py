"""Exhaustive search over placements of small packs, the reference of ``cp_plugin.engine.placement.documents``."""

from __future__ import annotations

from collections.abc import Sequence

Rank = tuple[bool, int, int, int, int]
"""Whether it has some of the document, its room in blocks, its work in pairs, the blocks it receives and sends."""


def fewest_blocks(documents: Sequence[int], size: int, block: int, limit: float) -> int | None:
    """The fewest blocks that the busiest rank receives or sends, over all placements whose work is within the limit.

    Exact: branch and bound over every way to put whole blocks on the ranks, equally many on each, under a causal mask.
    Ranks in the same state are tried once, states that failed are not tried again.

    Args:
        documents: lengths in blocks; together a multiple of ``size``.
        block: tokens of a block.
        limit: the most work of a rank, over the mean.

    Returns:
        None where no placement is within the limit.
    """
    lengths = sorted(documents, reverse=True)
    blocks = [(length, b) for length in lengths for b in reversed(range(length))]  # a document's last block first
    work = [_pairs((b + 1) * block) - _pairs(b * block) for _, b in blocks]
    rest = [sum(work[i:]) for i in range(len(work) + 1)]
    most = int(sum(work) * limit / size)
    room, remainder = divmod(len(blocks), size)
    assert not remainder

    def exists(need: int) -> bool:
        failed: set[tuple[int, tuple[Rank, ...]]] = set()

        def go(i: int, ranks: tuple[Rank, ...]) -> bool:
            if i == len(blocks):
                return True
            length, b = blocks[i]
            if b == length - 1:
                ranks = tuple(sorted((False, *rank[1:]) for rank in ranks))
            if (i, ranks) in failed:
                return False
            if sum(most - rank[2] for rank in ranks) >= rest[i]:
                holders = sum(inside for inside, *_ in ranks)  # all of these see the block
                for k, (inside, free, done, received, sent) in enumerate(ranks):
                    sends = sent + holders - inside
                    if not free or done + work[i] > most or sends > need or (k and ranks[k] == ranks[k - 1]):
                        continue
                    receives = received - 1 if inside else received + b
                    taken = (True, free - 1, done + work[i], receives, sends)
                    after = tuple(sorted((*ranks[:k], taken, *ranks[k + 1 :])))
                    # every further block of the document that a rank takes is one less to receive
                    possible = all(
                        received - (min(free, b) if inside else 0) <= need for inside, free, _, received, _ in after
                    )
                    if possible and go(i + 1, after):
                        return True
            failed.add((i, ranks))
            return False

        return go(0, ((False, room, 0, 0, 0),) * size)

    enough = size * len(blocks)
    return next((need for need in range(enough) if exists(need)), None) if exists(enough) else None


def _pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


ON_EIGHT = {
    (8, 8): 6, (6, 5, 4, 3, 3, 2, 1): 4, (6, 5, 5, 3, 2, 2, 1): 4, (6, 6, 4, 3, 1, 1, 1, 1, 1): 4,
    (7, 7, 5, 3, 1, 1): 5, (8, 7, 6, 1, 1, 1): 7, (9, 7, 3, 2, 1, 1, 1): 7, (10, 6, 5, 2, 1): 8, (10, 8, 3, 2, 1): 8,
    (12, 6, 4, 2): 11, (13, 5, 4, 1, 1): 12, (13, 5, 4, 2): 12, (13, 9, 2): 10, (13, 10, 1): 10, (14, 9, 1): 12,
    (15, 3, 3, 3): 13, (15, 5, 3, 1): 13, (16, 5, 3): 14, (16, 7, 1): 14, (17, 5, 2): 14, (18, 4, 2): 15, (19, 5): 16,
    (20, 4): 17, (22, 2): 19, (5, 5, 4, 4, 4, 3, 3, 2, 1, 1): 3, (6, 6, 4, 3, 3, 3, 2, 2, 2, 1): 4,
    (7, 7, 5, 5, 3, 3, 2): 5, (8, 6, 5, 4, 4, 3, 1, 1): 5, (8, 6, 6, 5, 2, 2, 1, 1, 1): 5,
    (8, 7, 5, 4, 3, 2, 1, 1, 1): 5, (8, 8, 4, 4, 2, 2, 2, 1, 1): 6, (8, 8, 5, 5, 2, 2, 1, 1): 5,
    (9, 8, 4, 3, 2, 2, 2, 1, 1): 6, (10, 7, 4, 3, 2, 2, 1, 1, 1, 1): 8, (12, 6, 4, 3, 3, 2, 1, 1): 10,
    (13, 8, 4, 3, 2, 1, 1): 10, (13, 9, 4, 3, 1, 1, 1): 10, (13, 13, 3, 2, 1): 9, (14, 6, 4, 2, 2, 1, 1, 1, 1): 12,
    (16, 8, 3, 2, 2, 1): 13, (16, 9, 5, 2): 13, (17, 6, 5, 2, 1, 1): 14, (18, 4, 4, 3, 2, 1): 15, (31, 1): 27,
}  # fmt: skip
"""Packs of 24 and 32 blocks of 16,384 tokens and their ``fewest_blocks`` on 8 ranks at 1.05 (up to 6 seconds each)."""
