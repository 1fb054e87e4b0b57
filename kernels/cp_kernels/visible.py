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
_kept: OrderedDict[tuple[Runs, View, int, torch.device], Side] = OrderedDict()
_lock = threading.Lock()


def side(runs: Runs, view: View, block: int, device: torch.device) -> Side:
    """The tables of one side in blocks of at most ``block`` tokens; cached on the device.

    Raises:
        ValueError: for a position that does not fit into int32.
    """
    key = (runs, view, block, device)
    with _lock:
        found = _kept.pop(key, None) or _side(*key)
        _kept[key] = found
        while len(_kept) > 1 and sum(map(_nbytes, _kept.values())) > KEPT_BYTES:
            _kept.popitem(last=False)
    return found


def _nbytes(side: Side) -> int:
    return sum(table.nbytes for table in side)


def _side(runs: Runs, view: View, block: int, device: torch.device) -> Side:
    _check(runs)
    blocks, offset = [], 0
    for run in runs:
        blocks += [(offset + at, min(block, len(run) - at)) for at in range(0, len(run), block)]
        offset += len(run)
    first, last = _seen(torch.cat([torch.arange(run.start, run.stop, run.step) for run in runs]), view)
    return Side(*(_on(x, device) for x in (blocks[::-1], first, last)))


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


def _seen(positions: Tensor, view: View) -> tuple[Tensor, Tensor]:
    first = torch.zeros_like(positions) if view.left is None else (positions - view.left).clamp(min=0)
    last = torch.full_like(positions, LAST) if view.right is None else (positions + view.right).clamp(max=LAST)
    if view.documents:
        bounds = torch.tensor(view.documents)
        document = torch.searchsorted(bounds, positions, right=True)
        first, last = torch.maximum(first, bounds[document - 1]), torch.minimum(last, bounds[document] - 1)
    return first, last


def _on(x: Sequence[tuple[int, ...]] | Tensor, device: torch.device) -> Tensor:
    """As int32, copied asynchronously."""
    x = torch.as_tensor(x, dtype=torch.int32)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
