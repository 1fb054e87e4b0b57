"""Packs of documents whose tokens are placed by the documents' lengths: see ``cp_plugin.placement``.

    pack = place_documents(cp, cu_seqlens)                 # a front door for this pack
    x = pack.shard(tokens, dim=0)
    y = pack.unshard(pack.attention(q, k, v, cu_seqlens=cu_seqlens))

As many tokens and nearly as much work on every rank; with ``needed`` few keys travel.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.core.mask import document_bounds
from cp_plugin.placement.documents import place


def place_documents(
    cp: ContextParallel, cu_seqlens: Tensor, *, per_host: int = 1, left: int | None = None
) -> ContextParallel:
    """The same front door for the tokens of one pack, which it gives to the ranks by the lengths of its documents.

    Every rank finds the same from the arguments alone; nothing is sent. The last placements are remembered.

    Args:
        cp: of a provider of softmax attention.
        cu_seqlens: int ``[n + 1]``: where the n documents of the whole sequence begin, and its length.
        per_host: neighbouring ranks that share a host: documents are rather cut within one than across several.
        left: how many tokens before itself a token sees, if the work is to be balanced under a sliding window.

    Raises:
        ValueError: for a provider of linear attention, bounds that do not increase from 0, or a length that the number
            of ranks does not divide.
    """
    if cp.provider.kind != "softmax":
        raise ValueError(
            f"provider {cp.provider.name!r} passes states from rank to rank in the order of the tokens: documents can "
            "be placed for softmax attention only"
        )
    bounds = document_bounds(cu_seqlens, int(cu_seqlens[-1]) if len(cu_seqlens) else 0)
    if cp.size == 1:
        return cp
    return cp.with_layout(place([b - a for a, b in pairwise(bounds)], cp.size, per_host=per_host, left=left).layout)
