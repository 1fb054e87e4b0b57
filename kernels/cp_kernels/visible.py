"""Visibility tables: the keys that each query sees, as read by the attention kernels.

The tokens of a tensor are *runs* of constant step: Python ranges, in storage order. Under every mask here (causal,
sliding window, packed documents, and combinations) a token sees an interval of positions on the other side, described
by two integers:

    query at position p sees      max(p - left, document's first) .. min(p + right, document's last)
    key at position p is seen by  max(p - right, document's first) .. min(p + left, document's last)

Within a run the visible tokens are one stretch of indices, whatever the steps. A kernel finds its ends with two
divisions and never visits a block that is not seen.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

Runs = tuple[range, ...]
LAST = 2**31 - 1
"""The largest supported position."""


class View(NamedTuple):
    """Visible positions before and after a token (None: all), within its document."""

    left: int | None = None
    right: int | None = None
    documents: tuple[int, ...] = ()
    """Start of each document, then the sequence length; empty: one document."""

    @property
    def transposed(self) -> View:
        """The view of the other side: who sees a token."""
        return View(self.right, self.left, self.documents)


class Side(NamedTuple):
    """Tables of the side that programs are launched for (queries or keys). int32, on the device."""

    blocks: Tensor
    """``[n, 2]``: first token and number of tokens; a block lies in one run. Last tokens come first: under a causal
    mask they have the most work.
    """
    first: Tensor
    """``[tokens]``: the first visible position on the other side."""
    last: Tensor
    """``[tokens]``: the last one; less than ``first`` if there is none."""


KEPT_BYTES = 2**28
"""Cache limit for device tables: 8 MB for a million tokens, one entry per pack of documents."""


class _Kept(OrderedDict[tuple[Runs, View, int, torch.device], Side]):
    """Tables by what they are of, and their bytes."""

    nbytes = 0

    def clear(self) -> None:
        super().clear()
        self.nbytes = 0


_kept = _Kept()
_lock = threading.Lock()


def side(runs: Runs, view: View, block: int, device: torch.device) -> Side:
    """The tables of one side in blocks of at most ``block`` tokens; cached on the device. ValueError for a position
    that does not fit into int32."""
    key = (runs, view, block, device)
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
        _check(runs)
        tables = _kept[key] = Side(_blocks(runs, block, device), *_move(_seen(runs, view), device))
        _kept.nbytes += _nbytes(tables)
        while len(_kept) > 1 and _kept.nbytes > KEPT_BYTES:
            _kept.nbytes -= _nbytes(_kept.popitem(last=False)[1])
    return tables


def _nbytes(side: Side) -> int:
    return sum(table.nbytes for table in side)


@lru_cache(maxsize=4096)
def _blocks(runs: Runs, block: int, device: torch.device) -> Tensor:
    """``Side.blocks``; the same for every pack."""
    blocks, offset = [], 0
    for run in runs:
        blocks += [(offset + at, min(block, len(run) - at)) for at in range(0, len(run), block)]
        offset += len(run)
    return _move(blocks[::-1], device)


@lru_cache(maxsize=4096)
def table(runs: Runs, device: torch.device) -> Tensor:
    """The side to iterate over, int32 ``[n, 4]``: first index, tokens, first position and step of each run. ValueError
    for a position that does not fit into int32."""
    _check(runs)
    offsets = itertools.accumulate((len(run) for run in runs), initial=0)
    return _move([(at, len(run), run.start, run.step) for at, run in zip(offsets, runs, strict=False)], device)


def _check(runs: Runs) -> None:
    if max(run[-1] for run in runs) >= LAST:
        raise ValueError(f"position {max(run[-1] for run in runs)} is too large: the kernels take up to {LAST - 1}")


def _seen(runs: Runs, view: View) -> Tensor:
    """``Side.first`` and ``Side.last``: int32 ``[2, tokens]``."""
    at = torch.cat([torch.arange(run.start, run[-1] + 1, run.step, dtype=torch.int32) for run in runs])
    interval = at.repeat(2, 1)
    for end, (row, reach) in enumerate(zip(interval, (view.left, view.right), strict=True)):
        reach = LAST if reach is None else min(reach, LAST)
        if reach == LAST:
            row.fill_(LAST if end else 0)
        elif reach and end:
            row.clamp_(max=LAST - reach).add_(reach)  # clamped first: not every sum fits into int32
        elif reach:
            row.clamp_(min=reach).sub_(reach)
        if view.documents and reach:  # else it ends at the token itself
            ends = torch.cat([_ends(view.documents, end)[run.start : run.stop : run.step] for run in runs])
            (torch.minimum if end else torch.maximum)(row, ends, out=row)
    return interval


@lru_cache(maxsize=4)
def _ends(documents: tuple[int, ...], end: int) -> Tensor:
    """First (0) or last (1) position of each token's document, int32: once for the runs of all ranks."""
    bounds = torch.tensor(documents)
    changes = (bounds[1:] - 1 if end else bounds[:-1]).diff(prepend=bounds[:1]).int()
    return bounds.new_zeros(documents[-1] + 1, dtype=torch.int32).index_add_(0, bounds[:-1], changes).cumsum_(0)


def _move(x: Sequence[tuple[int, ...]] | Tensor, device: torch.device) -> Tensor:
    """Copy to the device as int32, asynchronously."""
    x = torch.as_tensor(x, dtype=torch.int32)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
