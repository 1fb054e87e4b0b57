"""Packed documents (Megatron's THD format: ``--sft``, ``--dataloader-inter-document-masking``).

    whole pack    [ document 0 | document 1         | document 2 ]     cu_seqlens: where each begins, and the end
    each rank     its tokens of the whole pack, by the layout; the mask and the positions follow from cu_seqlens

The layout divides the pack, not each document, so documents may have any length. (Megatron with Transformer Engine
divides documents where they allow it; where they do not, 0.19 divides the pack as well, but attends as if it had not.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from cp_plugin.megatron import runtime

_BOUNDS = "_cp_plugin_bounds"


@dataclass(frozen=True, slots=True)
class _Found:
    """The bounds that were read from a ``PackedSeqParams``, and the tensors they were read from."""

    given: tuple[Tensor | None, ...]
    versions: tuple[int, ...]
    tokens: int
    bounds: Tensor

    def of(self, packed: PackedSeqParams, tokens: int) -> bool:
        """Whether they are still what ``packed`` says: the same tensors, and nothing was written to them since."""
        given = _given(packed)
        same = all(a is b for a, b in zip(given, self.given, strict=True))
        return same and tokens == self.tokens and _versions(given) == self.versions


def bounds(packed: PackedSeqParams, tokens: int) -> Tensor:
    """Where documents begin, and the end of the pack: int64, on the CPU; read from the device once for all layers.

    Padding between documents, and after the last one, counts as documents of its own. What was read is kept with the
    ``PackedSeqParams``, as long as nobody writes to its tensors: a buffer that gets the next micro-batch is read again.

    Args:
        packed: of one micro-batch, the same on every rank.
        tokens: of the whole pack.

    Raises:
        ValueError: for queries and keys that are packed differently, or more tokens in documents than in the pack.
    """
    found: _Found | None = getattr(packed, _BOUNDS, None)
    if found is None or not found.of(packed, tokens):
        given = _given(packed)
        found = _Found(given, _versions(given), tokens, _read(packed, tokens))
        if not any(x is not None and x.is_inference() for x in given):  # these do not say when they are written to
            setattr(packed, _BOUNDS, found)
    return found.bounds


def _given(packed: PackedSeqParams) -> tuple[Tensor | None, ...]:
    return packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded


def _versions(given: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    return tuple(-1 if x is None or x.is_inference() else x._version for x in given)


def _read(packed: PackedSeqParams, tokens: int) -> Tensor:
    real = _same(packed.cu_seqlens_q, packed.cu_seqlens_kv, "cu_seqlens")
    padded = _same(packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded, "padded cu_seqlens")
    if real is None and padded is None:
        raise ValueError("the PackedSeqParams of this batch have no cu_seqlens_q")
    starts = real if padded is None else padded
    places = [*starts.tolist(), tokens]
    if padded is not None and real is not None:
        places += (padded[:-1] + real.diff()).tolist()
    if max(places) > tokens:
        raise ValueError(f"the documents of this batch end at token {max(places)}, and it has {tokens} on all ranks")
    return torch.tensor(sorted(set(places)))


def _same(q: Tensor | None, kv: Tensor | None, name: str) -> Tensor | None:
    if q is not None and kv is not None and q is not kv and not torch.equal(q, kv):
        raise ValueError(f"queries and keys are packed differently: {name} {q.tolist()} and {kv.tolist()}")
    return None if q is None else q.cpu().long()


def document_of(positions: Tensor, packed: PackedSeqParams) -> Tensor:
    """The number of the document that each position of the pack belongs to: int64, in the shape of ``positions``.

    Padding between documents, and after the last one, counts as documents of its own, as in ``bounds``. Computed on the
    device: nothing is copied, waited for or kept.
    """
    real, padded = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    starts = real if padded is None else padded
    assert starts is not None, "the PackedSeqParams of this batch have no cu_seqlens_q"
    if padded is not None and real is not None and real is not padded:
        starts = torch.cat((padded, padded[:-1] + real.diff())).sort().values
    return torch.bucketize(positions, starts.to(positions.device), right=True)


def _in_documents(positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    """How far into its document each position of the pack is; the padding after the last one counts on from its end.

    All of it on the device, and from ``cu_seqlens`` as they are now: nothing is copied, waited for or kept, so that it
    cannot be the documents of another micro-batch, whose tensor may be the same one.
    """
    return positions - cu_seqlens[torch.bucketize(positions, cu_seqlens, right=True) - 1]


def replace_apply_rotary_thd(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The replacement for ``_apply_rotary_pos_emb_thd``: any layout of the pack, documents of any length.

    Angles are those of the whole pack (of images, say), or of the longest document. Megatron tells them apart by
    ``max_seqlen`` since 0.20, by their number before.
    """

    @functools.wraps(original)
    def apply_rotary_pos_emb_thd(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        *args: Any,
        cp_group: dist.ProcessGroup | None = None,
        max_seqlen: int | None = None,
        **named: Any,
    ) -> Tensor:
        if cp_group is None:
            raise ValueError("cp_group must be provided for THD format RoPE")
        cp = runtime.context_parallel(cp_group)
        tokens = t.size(0) * cp.size
        of_the_pack = freqs.size(0) == tokens if max_seqlen is None else freqs.size(0) > max_seqlen
        places = cp.positions(tokens, freqs.device)
        if not of_the_pack:  # but of one document, and each begins with the first
            places = _in_documents(places, cu_seqlens.to(freqs.device))
        angles = freqs[places.clamp(max=freqs.size(0) - 1)]
        return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), angles, *args, **named).squeeze(1)

    return apply_rotary_pos_emb_thd
