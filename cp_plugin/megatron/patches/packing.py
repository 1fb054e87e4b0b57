"""Packed documents (Megatron's THD format: ``--sft``, ``--dataloader-inter-document-masking``).

    whole pack    [ document 0 | document 1         | document 2 ]     cu_seqlens: where each begins, and the end
    each rank     its tokens of the whole pack, by the layout; the mask and the positions follow from cu_seqlens

The layout divides the pack, not each document, so documents may have any length. (Megatron with Transformer Engine
divides documents where their lengths allow it; otherwise 0.19 divides the pack, but attends as if it had not.)
``--cp-layout documents`` is a different layout in each micro-batch, derived from its documents: ``on_pack``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.packs import place_lengths
from cp_plugin.megatron import runtime
from cp_plugin.megatron.patches.contract import Contract
from cp_plugin.megatron.patches.patching import Patch
from cp_plugin.megatron.state import STATE
from cp_plugin.placement.documents import DOCUMENTS


@dataclass(frozen=True, slots=True)
class _Kept:
    """A value computed from tensors of a pack: valid until one of them is replaced or written to."""

    given: tuple[weakref.ref[Tensor] | None, ...]
    versions: tuple[int, ...]
    tokens: int
    value: Any

    def fits(self, given: tuple[Tensor | None, ...], tokens: int) -> bool:
        kept = (None if x is None else x() for x in self.given)
        same = all(a is b for a, b in zip(given, kept, strict=True))
        return same and tokens == self.tokens and _versions(given) == self.versions


def _once[T](holder: Any, name: str, given: tuple[Tensor | None, ...], tokens: int, make: Callable[[], T]) -> T:
    """The result of ``make``, cached as an attribute of ``holder`` for all layers."""
    kept: _Kept | None = getattr(holder, name, None)
    if kept is not None and kept.fits(given, tokens):
        return kept.value
    value = make()
    if not any(x is not None and x.is_inference() for x in given):  # these have no version counter
        sources = tuple(None if x is None else weakref.ref(x) for x in given)
        setattr(holder, name, _Kept(sources, _versions(given), tokens, value))
    return value


def bounds(packed: PackedSeqParams, tokens: int) -> Tensor:
    """Where documents begin, and the end of the pack: int64, on the CPU; read from the device once for all layers.

    Padding between documents, and after the last one, counts as documents. The result is cached until the tensors of
    ``packed`` are written to, so a buffer that gets the next micro-batch is read again.

    Args:
        packed: of one micro-batch, the same on every rank.
        tokens: of the whole pack.

    Raises:
        ValueError: for queries and keys that are packed differently, or more tokens in documents than in the pack.
    """
    return _once(packed, "_cp_plugin_bounds", _given(packed), tokens, partial(_read, packed, tokens))


def numbers(packed: PackedSeqParams, tokens: int, device: torch.device) -> Tensor:
    """The number of each token's document, in Mamba's format: int32 ``[1, tokens]``; computed once for all layers."""

    def make() -> Tensor:
        return document_of(torch.arange(tokens, device=device), packed).int().unsqueeze(0)

    return _once(packed, "_cp_plugin_numbers", _given(packed), tokens, make)


def starts(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """``cu_seqlens`` without empty documents and up to the end of the pack; read once."""

    def make() -> Tensor:
        return cu_seqlens.new_tensor(sorted({*cu_seqlens.tolist(), tokens}))

    return _once(cu_seqlens, "_cp_plugin_starts", (cu_seqlens,), tokens, make)


def on_pack(cp: ContextParallel, where: Tensor | None, tokens: int) -> ContextParallel:
    """``cp`` in the layout of one pack; unchanged without a pack, and with any layout but ``documents``.

    Args:
        where: documents begin, as ``places`` returns it; read from the device once.
        tokens: of the whole pack; those after the last document count as one more.

    Raises:
        ValueError: for bounds by which no batch was sliced.
    """
    if where is None or cp.size == 1 or cp.layout.name != DOCUMENTS.name:
        return cp

    def make() -> list[int]:
        found = _lengths(where, tokens)
        if STATE.placed and hash(tuple(found)) not in STATE.placed:
            raise ValueError(
                f"the model is given documents of {found[:8]} tokens, by which no batch was sliced: slice the batch by "
                "the bounds that PackedSeqParams has (cu_seqlens_q_padded, or else cu_seqlens_q)"
            )
        return found

    lengths = _once(where, "_cp_plugin_lengths", (where,), tokens, make)
    model = runtime.model()
    return place_lengths(cp, lengths, left=None if model is None else model.left)


def note_sliced(cp: ContextParallel, where: Tensor, tokens: int) -> None:
    """Let a pack of the training be placed by these bounds; on the first stage, whose layers come after slicing."""
    if not STATE.documents_expected or cp.layout.name != DOCUMENTS.name:
        return
    if parallel_state.is_pipeline_first_stage(ignore_virtual=True):
        STATE.placed.append(hash(tuple(_lengths(where, tokens))))


def places(packed: PackedSeqParams | None) -> Tensor | None:
    """Where documents begin, including padding between them; None: no pack."""
    if packed is None:
        return None
    return packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded


def _lengths(where: Tensor, tokens: int) -> list[int]:
    ends = where.flatten().tolist()
    if ends[0] != 0 or ends[-1] > tokens or any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"document boundaries {ends[:8]} must start at 0, never decrease, and not exceed {tokens}")
    return [b - a for a, b in pairwise([*ends, tokens]) if b > a]


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
    if padded is not None and real is not None and (len(padded) != len(real) or (padded.diff() < real.diff()).any()):
        raise ValueError(
            f"documents of {real.diff().tolist()[:8]} tokens are in places for {padded.diff().tolist()[:8]}: give "
            "their bounds without padding as cu_seqlens_q, and those with it as cu_seqlens_q_padded"
        )
    places = [*starts.tolist(), tokens]
    if padded is not None and real is not None:
        places += (padded[:-1] + real.diff()).tolist()
    if max(places) > tokens:
        raise ValueError(f"the documents of this batch end at token {max(places)}, but it has {tokens} on all ranks")
    return torch.tensor(sorted(set(places)))


def _same(q: Tensor | None, kv: Tensor | None, name: str) -> Tensor | None:
    if q is not None and kv is not None and q is not kv and not torch.equal(q, kv):
        raise ValueError(f"queries and keys are packed differently: {name} {q.tolist()} and {kv.tolist()}")
    return None if q is None else q.cpu().long()


def document_of(positions: Tensor, packed: PackedSeqParams) -> Tensor:
    """The number of each position's document: int64, in the shape of ``positions``.

    Padding counts as documents, as in ``bounds``. Computed on the device, without synchronisation or caching.
    """
    real, padded = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    starts = real if padded is None else padded
    assert starts is not None, "the PackedSeqParams of this batch have no cu_seqlens_q"
    if padded is not None and real is not None and real is not padded:
        starts = torch.cat((padded, padded[:-1] + real.diff())).sort().values
    return torch.bucketize(positions, starts.to(positions.device), right=True)


def in_documents(positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Each position's offset in its document; padding after the last one counts on from the document's end.

    Computed on the device from the current ``cu_seqlens``, whose buffer may get another micro-batch: no caching.
    """
    return positions - cu_seqlens[torch.bucketize(positions, cu_seqlens, right=True) - 1]


def replace_apply_rotary_thd(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replaces ``_apply_rotary_pos_emb_thd``: any layout of the pack, documents of any length.

    ``freqs`` cover the whole pack (for images) or the longest document: told apart by ``max_seqlen`` since 0.20, by
    their number before.
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
        cp = on_pack(cp, cu_seqlens, tokens)
        of_the_pack = freqs.size(0) == tokens if max_seqlen is None else freqs.size(0) > max_seqlen
        places = cp.positions(tokens, freqs.device)
        if not of_the_pack:
            places = in_documents(places, cu_seqlens.to(freqs.device))
        angles = freqs[places.clamp(max=freqs.size(0) - 1)]
        return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), angles, *args, **named).squeeze(1)

    return apply_rotary_pos_emb_thd


ROTARY = Patch(
    "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
    replace_apply_rotary_thd,
    "layout of RoPE, packed documents",
    Contract(
        "replaces",
        ("t", "cu_seqlens", "freqs", "cp_group"),
        ("rotary_interleaved", "mla_rotary_interleaved", "multi_latent_attention", "mscale", "max_seqlen", "inverse"),
    ),
    called_by="attention layers",
    otherwise="tokens of packed documents would be rotated by other tokens' angles",
    late=True,
)
