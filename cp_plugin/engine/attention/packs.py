"""Packs of documents whose tokens are placed by the documents' lengths (``engine.placement``).

    pack = place_documents(cp, cu_seqlens)                 # a ContextParallel for this pack
    x = pack.shard(tokens, dim=0)
    y = pack.unshard(pack.attention(q, k, v, cu_seqlens=cu_seqlens))

Every rank gets the same number of tokens and nearly the same work; with ``needed`` few keys travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from cp_plugin.engine.attention import agreement
from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.core.mask import document_bounds
from cp_plugin.engine.placement.documents import DOCUMENTS, place


def place_documents(
    cp: ContextParallel, cu_seqlens: Tensor, *, per_host: int | None = None, left: int | None = None
) -> ContextParallel:
    """The same ``ContextParallel`` on tokens placed for one pack of documents.

    Every rank computes the same placement; nothing is sent, unless one refuses. Recent placements are cached.

    Args:
        cp: of a provider that supports the layout ``documents``, on any layout.
        cu_seqlens: int ``[n + 1]``: bounds of the n documents of the whole sequence.
        per_host: neighbouring ranks per host: documents are preferably cut within a host. None: as far as ``cp``
            knows; it asks the ranks if made with ``layout="documents"``.
        left: how many tokens before itself a token sees, to balance the work of a sliding window.

    Raises:
        ValueError: for a provider that does not support the layout, bounds that do not increase from 0, or a length
            that the number of ranks does not divide; on all ranks that compare their next call.
    """
    try:
        bounds = document_bounds(cu_seqlens, None)
        return place_lengths(cp, [b - a for a, b in pairwise(bounds)], per_host=per_host, left=left)
    except ValueError:
        with agreement.compare_call(cp, "place_documents", ()):  # which the others do not wait for in vain
            raise


def place_lengths(
    cp: ContextParallel, lengths: Sequence[int], *, per_host: int | None = None, left: int | None = None
) -> ContextParallel:
    """``place_documents`` for the documents' lengths, in pack order."""
    if DOCUMENTS.name not in cp.provider.layouts:
        raise ValueError(
            f"provider {cp.provider.name!r} does not run on the layout {DOCUMENTS.name!r}, only on "
            f"{', '.join(cp.provider.layouts)}: documents cannot be placed for it"
        )
    if cp.size == 1:
        return cp
    return cp.with_layout(place(lengths, cp.size, per_host=per_host or cp.per_host, left=left).layout)
