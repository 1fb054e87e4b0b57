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

import numpy as np
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
type _Key = tuple[Runs, View, int, torch.device]


class _Kept(OrderedDict[_Key, Side]):
    """The most recently used tables, up to ``KEPT_BYTES``."""

    nbytes = 0

    def insert(self, key: _Key, side: Side) -> None:
        self[key] = side
        self.nbytes += _nbytes(side)
        while len(self) > 1 and self.nbytes > KEPT_BYTES:
            self.nbytes -= _nbytes(self.popitem(last=False)[1])

    def clear(self) -> None:
        super().clear()
        self.nbytes = 0


_kept = _Kept()
_lock = threading.Lock()


def side(runs: Runs, view: View, block: int, device: torch.device) -> Side:
    """The tables of one side in blocks of at most ``block`` tokens; cached on the device.

    Raises:
        ValueError: for a position that does not fit into int32.
    """
    key = (runs, view, block, device)
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
        else:
            _kept.insert(key, _side(*key))
        return _kept[key]


def _nbytes(side: Side) -> int:
    return sum(table.nbytes for table in side)


def _side(runs: Runs, view: View, block: int, device: torch.device) -> Side:
    _check(runs)
    return Side(_blocks(runs, block, device), *_on(torch.from_numpy(_seen(runs, view)), device))


@lru_cache(maxsize=4096)
def _blocks(runs: Runs, block: int, device: torch.device) -> Tensor:
    """``Side.blocks``; the same for every pack."""
    tokens = np.array([len(run) for run in runs])
    counts = -(-tokens // block)
    run = np.arange(len(runs)).repeat(counts)  # of each block
    at = (np.arange(len(run)) - (counts.cumsum() - counts)[run]) * block  # in its run
    found = np.stack(((tokens.cumsum() - tokens)[run] + at, (tokens[run] - at).clip(max=block)), 1)
    return _on(torch.from_numpy(found[::-1].copy()), device)


@lru_cache(maxsize=4096)
def table(runs: Runs, device: torch.device) -> Tensor:
    """The side to iterate over, int32 ``[n, 4]``: first index, tokens, first position and step of each run.

    Raises:
        ValueError: for a position that does not fit into int32.
    """
    _check(runs)
    offsets = itertools.accumulate((len(run) for run in runs), initial=0)
    return _on([(at, len(run), run.start, run.step) for at, run in zip(offsets, runs, strict=False)], device)


def _check(runs: Runs) -> None:
    if max(run[-1] for run in runs) >= LAST:
        raise ValueError(f"position {max(run[-1] for run in runs)} is too large: the kernels take up to {LAST - 1}")


def _seen(runs: Runs, view: View) -> np.ndarray:
    """``Side.first`` and ``Side.last``, of runs below ``LAST``: int32 ``[2, tokens]``."""
    at = np.concatenate([np.arange(run.start, run.stop, run.step, dtype=np.int32) for run in runs])
    found = np.empty((2, len(at)), np.int32)
    for end, (reach, furthest) in enumerate(((view.left, 0), (view.right, LAST))):
        found[end] = at if reach == 0 else furthest
        if reach:
            found[end] = (at + np.int64((-reach, reach)[end])).clip(0, LAST)
        if view.documents and reach != 0:  # a token sees itself at least, so that its document cannot end before that
            (np.maximum, np.minimum)[end](found[end], _of_each(runs, view.documents, end), out=found[end])
    return found


def _of_each(runs: Runs, documents: tuple[int, ...], end: int) -> np.ndarray:
    """First (0) or last (1) position of each token's document."""
    whole = _of_all(documents, end)
    return np.concatenate([whole[run.start : run.stop : run.step] for run in runs])


@lru_cache(maxsize=4)
def _of_all(documents: tuple[int, ...], end: int) -> np.ndarray:
    """The same of all tokens of a pack, once for all runs: a ring meets those of every rank."""
    bounds = np.array(documents)
    return (bounds[1:] - 1 if end else bounds[:-1]).astype(np.int32).repeat(np.diff(bounds))


def _on(x: Sequence[tuple[int, ...]] | Tensor, device: torch.device) -> Tensor:
    """As int32, copied asynchronously."""
    x = torch.as_tensor(x, dtype=torch.int32)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
