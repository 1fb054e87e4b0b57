"""A micro-batch: the layout of its tokens, and its documents if it is a pack (Megatron's THD format).

    whole pack    [ document 0 | document 1         | document 2 ]     cu_seqlens: where each begins, and the end
    each rank     its tokens of the whole pack, by the layout; the mask and the positions follow from cu_seqlens

The layout divides the pack, not each document, so documents may have any length. (Megatron with Transformer Engine
divides documents where their lengths allow it; otherwise 0.19 divides the pack, but attends as if it had not.)
``--cp-layout documents`` is a different layout in each micro-batch, derived from its documents.

``MicroBatch.cut`` is called where a batch is sliced, ``find`` by what mixes tokens, with what Megatron passes it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.packs import place_lengths
from cp_plugin.engine.common.recent import Recent
from cp_plugin.engine.core.mask import numbers_in
from cp_plugin.engine.placement.documents import DOCUMENTS
from cp_plugin.megatron import runtime
from cp_plugin.megatron.state import STATE


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a pack of so many tokens: each of their readings is made once, for all layers.

    Padding between documents, and after the last one, counts as documents.
    """

    tokens: int
    cu_seqlens: tuple[Tensor | None, ...]
    """Bounds as Megatron has them, the same on every rank: of queries and keys, and both including padding."""

    @property
    def places(self) -> Tensor:
        """Where documents begin, including padding between them, and where the last one ends: on its device."""
        real, _, padded, _ = self.cu_seqlens
        starts = real if padded is None else padded
        assert starts is not None
        return starts

    @cached_property
    def bounds(self) -> Tensor:
        """Where documents begin, and the end of the pack: int64, on the CPU.

        Raises:
            ValueError: for queries and keys that are packed differently, or more tokens in documents than in the pack.
        """
        real, padded = _same(*self.cu_seqlens[:2], "cu_seqlens"), _same(*self.cu_seqlens[2:], "padded cu_seqlens")
        starts = real if padded is None else padded
        assert starts is not None
        if padded is not None and real is not None:
            if len(padded) != len(real) or (padded.diff() < real.diff()).any():
                raise ValueError(
                    f"documents of {real.diff().tolist()[:8]} tokens are in places for {padded.diff().tolist()[:8]}: "
                    "give their bounds without padding as cu_seqlens_q, and those with it as cu_seqlens_q_padded"
                )
            starts = torch.cat((starts, padded[:-1] + real.diff()))
        end = max(self.tokens, *starts.tolist())
        if end > self.tokens:
            raise ValueError(f"the documents of this batch end at token {end}, but it has {self.tokens} on all ranks")
        return torch.tensor(sorted({*starts.tolist(), end}))

    @cached_property
    def lengths(self) -> list[int]:
        """Lengths by which tokens are placed; tokens after the last document are one more."""
        ends = list(numbers_in(self.places)) if self.places.dim() == 1 else self.places.flatten().tolist()
        if ends[0] != 0 or ends[-1] > self.tokens or any(a > b for a, b in pairwise(ends)):
            raise ValueError(
                f"document boundaries {ends[:8]} must start at 0, never decrease, and not exceed {self.tokens}"
            )
        return [b - a for a, b in pairwise([*ends, self.tokens]) if b > a]

    @cached_property
    def sliced_by(self) -> list[int]:
        """``lengths``; ValueError if no batch was sliced by them."""
        if STATE.cut.lengths and hash(tuple(self.lengths)) not in STATE.cut.lengths:
            raise ValueError(
                f"the model is given documents of {self.lengths[:8]} tokens, by which no batch was sliced: slice the "
                "batch by the bounds that PackedSeqParams has (cu_seqlens_q_padded, or else cu_seqlens_q)"
            )
        return self.lengths

    @cached_property
    def starts(self) -> Tensor:
        """``bounds`` in the form of ``places``: without empty documents, and up to the end of the pack."""
        return self.bounds.to(self.places)

    @cached_property
    def numbers(self) -> Tensor:
        """The number of each token's document, in Mamba's format: int32 ``[1, tokens]``."""
        return self.number_of(torch.arange(self.tokens, device=self.places.device)).int().unsqueeze(0)

    def number_of(self, positions: Tensor) -> Tensor:
        """Return the number of each position's document: int64, in the shape of ``positions``.

        Computed on the device, without synchronization.
        """
        real, _, padded, _ = self.cu_seqlens
        starts = self.places
        if padded is not None and real is not None and real is not padded:
            starts = torch.cat((padded, padded[:-1] + real.diff())).sort().values
        return torch.bucketize(positions, starts.to(positions.device), right=True)

    def offset_of(self, positions: Tensor) -> Tensor:
        """Return each position's offset in its document; padding after the last one counts on from its end.

        Computed on the device, without synchronization.
        """
        places = self.places.to(positions.device)
        return positions - places[torch.bucketize(positions, places, right=True) - 1]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tokens of one micro-batch, on all context-parallel ranks."""

    cp: ContextParallel
    """In the layout of these tokens."""
    tokens: int  # on all ranks, including padding
    documents: Documents | None = None  # None: no pack

    @classmethod
    def find(cls, cp: ContextParallel, packed: PackedSeqParams | Tensor | None, tokens: int) -> Self:
        """Return the micro-batch that a part of the model is called with.

        Args:
            cp: in the layout of the run.
            packed: Megatron's parameters of a pack, or where its documents begin, including padding; None: no pack.
            tokens: on all ranks.

        Raises:
            ValueError: for bounds by which no batch was sliced, in a layout that depends on them.
        """
        if packed is None:
            return cls(cp, tokens)
        pack = _documents(tokens, packed)
        if cp.size == 1 or cp.layout.name != DOCUMENTS.name:
            return cls(cp, tokens, pack)
        model = runtime.model()
        return cls(place_lengths(cp, pack.sliced_by, left=None if model is None else model.left), tokens, pack)

    @classmethod
    def cut(cls, cp: ContextParallel, places: Tensor | None, tokens: int) -> Self:
        """Return the micro-batch of a batch that is about to be sliced; args as of ``find``.

        Raises:
            ValueError: for a batch without documents in a layout that is made for them.
        """
        STATE.cut.any = True
        by_documents = STATE.cut.packed and cp.layout.name == DOCUMENTS.name
        if by_documents and cp.size > 1 and places is None:
            raise ValueError(
                f"{runtime.settings().flag}, --cp-layout {DOCUMENTS.name}: a batch was sliced without cu_seqlens, "
                "though the flags pack documents, so its tokens cannot be placed. Slice the batch together with its "
                "cu_seqlens using megatron.core.utils.get_batch_on_this_cp_rank, as Megatron's pretrain_gpt.py does"
            )
        if places is None or not tokens:
            return cls(cp, tokens)
        if by_documents and parallel_state.is_pipeline_first_stage(ignore_virtual=True):  # its layers come later
            STATE.cut.lengths.append(hash(tuple(_documents(tokens, places).lengths)))
        return cls.find(cp, places, tokens)

    @classmethod
    def attended(cls, cp: ContextParallel, packed: PackedSeqParams | None, tokens: int, layer: int) -> Self:
        """Return the micro-batch that attention of a layer is called with; args as of ``find``.

        Raises:
            ValueError: for a batch that was not sliced in the layout, a call without the documents that the flags
                pack.
        """
        if cp.size > 1 and not STATE.cut.any and parallel_state.is_pipeline_first_stage():
            raise ValueError(
                f"{runtime.settings().flag}: the training script reached the attention layers without slicing its "
                "batch with megatron.core.utils.get_batch_on_this_cp_rank, so the tokens are not in the plugin's "
                "layout. Call that function in the script's get_batch, as Megatron's pretrain_gpt.py does"
            )
        if packed is None and STATE.cut.packed:
            raise ValueError(
                f"{runtime.settings().flag}: layer {layer} was called without packed_seq_params, though the flags "
                "pack documents: tokens would attend to other documents. Pass PackedSeqParams to the model on every "
                "pipeline stage, as Megatron's pretrain_gpt.py does"
            )
        return cls.find(cp, packed, tokens)

    @property
    def bounds(self) -> Tensor | None:
        """The documents' bounds, as ``Documents.bounds``; None: no pack."""
        return None if self.documents is None else self.documents.bounds

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens: int64 ``[s/cp]``."""
        return self.cp.positions(self.tokens, device)


def _documents(tokens: int, packed: PackedSeqParams | Tensor) -> Documents:
    """The documents of a pack: those of an earlier call, unless one of its tensors was replaced or written to since."""
    ends: tuple[Tensor | None, ...] = (packed, None, None, None) if isinstance(packed, Tensor) else _bounds_in(packed)
    new = Documents(tokens, ends)
    if any(x is not None and x.is_inference() for x in ends):  # these have no version counter
        return new
    key = tokens, *(x if x is None else (id(x), x._version) for x in ends)
    if isinstance(packed, Tensor):
        return _OF_TENSORS.get(key, lambda: new)
    known = _OF_PACKS.get(packed)
    if known is None or known[0] != key:
        known = _OF_PACKS[packed] = key, new
    return known[1]


_OF_PACKS: MutableMapping[PackedSeqParams, tuple[object, Documents]] = WeakIdKeyDictionary()
_OF_TENSORS: Recent[tuple[object, ...], Documents] = Recent(64)
"""By the identity of their tensors, which they keep alive."""


def _bounds_in(packed: PackedSeqParams) -> tuple[Tensor | None, ...]:
    q, kv, wide_q, wide_kv = (getattr(packed, f"cu_seqlens_{name}") for name in ("q", "kv", "q_padded", "kv_padded"))
    if q is None and wide_q is None:
        raise ValueError("the PackedSeqParams of this batch have no cu_seqlens_q")
    return q, kv, wide_q, wide_kv


def _same(q: Tensor | None, kv: Tensor | None, name: str) -> Tensor | None:
    if q is not None and kv is not None and q is not kv and not torch.equal(q, kv):
        raise ValueError(f"queries and keys are packed differently: {name} {q.tolist()} and {kv.tolist()}")
    return None if q is None else q.cpu().long()
