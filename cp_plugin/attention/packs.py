"""Packs of documents whose tokens are placed by the documents' lengths: see ``cp_plugin.placement``.

    pack = place_documents(cp, cu_seqlens)                 # a front door for this pack
    x = pack.shard(tokens, dim=0)
    y = pack.unshard(pack.attention(q, k, v, cu_seqlens=cu_seqlens))

As many tokens and nearly as much work on every rank; with ``needed`` few keys travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.core.mask import document_bounds
from cp_plugin.placement.documents import DOCUMENTS, place


def place_documents(
    cp: ContextParallel, cu_seqlens: Tensor, *, per_host: int | None = None, left: int | None = None
) -> ContextParallel:
    """The same front door for the tokens of one pack, which it gives to the ranks by the lengths of its documents.

    Every rank finds the same from the arguments alone; nothing is sent. The last placements are remembered.

    Args:
        cp: of a provider that runs on the layout ``documents``, whichever layout it has now.
        cu_seqlens: int ``[n + 1]``: where the n documents of the whole sequence begin, and its length.
        per_host: neighbouring ranks that share a host: documents are rather cut within one than across several. None:
            as far as ``cp`` knows, which asks the ranks if it is made with ``layout="documents"``.
        left: how many tokens before itself a token sees, if the work is to be balanced under a sliding window.

    Raises:
        ValueError: for a provider that does not run on that layout, bounds that do not increase from 0, or a length
            that the number of ranks does not divide.
    """
    bounds = document_bounds(cu_seqlens, int(cu_seqlens[-1]) if len(cu_seqlens) else 0)
    return place_lengths(cp, [b - a for a, b in pairwise(bounds)], per_host=per_host, left=left)


def place_lengths(
    cp: ContextParallel, lengths: Sequence[int], *, per_host: int | None = None, left: int | None = None
) -> ContextParallel:
    """``place_documents`` for the lengths of the documents, in the order of the pack."""
    if DOCUMENTS.name not in cp.provider.layouts:
        raise ValueError(
            f"provider {cp.provider.name!r} does not run on the layout {DOCUMENTS.name!r}, only on "
            f"{', '.join(cp.provider.layouts)}: documents cannot be placed for it"
        )
    if cp.size == 1:
        return cp
    return cp.with_layout(place(lengths, cp.size, per_host=per_host or cp.per_host, left=left).layout)
