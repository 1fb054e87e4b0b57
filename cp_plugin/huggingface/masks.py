"""What a layer may see, read from the mask function that transformers would have expanded.

transformers describes a mask by a function of indices, ``sees(batch, head, query, key)``, and an attention
implementation registers what it makes of it. Ours evaluates the function at a few positions of the whole sequence, and
passes on the window it finds as a small tensor in the place of the mask. The layer that is given this tensor attends
accordingly, so windows are followed wherever they are configured: in the layer, the model, or the mask alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_plugin.core.mask import Window

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_SIGN = 0x6D61736B
"""First number of a tensor that stands for a mask."""
_UNREADABLE = _SIGN + 1
_ROWS = 256
"""Queries at which a mask function is read where a length is new."""


@dataclass(frozen=True, slots=True)
class Sight:
    """How far a token sees in its document: ``left`` tokens back and ``right`` ahead, None: all."""

    left: int | None = None
    right: int | None = 0
    documents: tuple[int, ...] = ()
    """Bounds of the documents of the whole sequence; empty: one document."""

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def window(self) -> Window | None:
        """As an argument of ``ContextParallel.attention``."""
        if self.left is None and self.right in (None, 0):
            return None
        left, right = (-1 if n is None else n for n in (self.left, self.right))
        return left, right

    def as_tensor(self) -> Tensor:
        """int64 ``[1, 1, 1, n]`` on the CPU: a mask's shape, and read without waiting for a device."""
        left, right = (-1 if n is None else n for n in (self.left, self.right))
        return torch.tensor([_SIGN, left, right, *self.documents]).view(1, 1, 1, -1)

    @classmethod
    def from_tensor(cls, mask: Tensor) -> Sight | None:
        """The inverse; None for any other tensor.

        Raises:
            ValueError: for one that stands for a mask which is not a window.
        """
        if mask.dtype != torch.int64 or mask.shape[:-1] != (1, 1, 1) or mask.numel() < 3:
            return None
        sign, left, right, *documents = mask.flatten().tolist()
        if sign == _UNREADABLE:
            raise ValueError(bytes(documents).decode())
        if sign != _SIGN:
            return None
        return cls(None if left == -1 else left, None if right == -1 else right, tuple(documents))


def unreadable(reason: str) -> Tensor:
    """Stands for a mask that is not a window. Only a layer that is given it need mind: some models make masks for
    kinds of layers that they do not have."""
    return torch.tensor([_UNREADABLE, 0, 0, *reason.encode()]).view(1, 1, 1, -1)


class Reader:
    """Reads mask functions: three queries each time, and many where the length or the answer is new."""

    def __init__(self) -> None:
        self._known: set[tuple[int, Sight]] = set()

    def read(self, function: MaskFunction, seq_length: int) -> Sight:
        """
        Raises:
            ValueError: for a mask that is not a window of the same size at every token.
        """
        few = torch.tensor(sorted({0, seq_length // 2, seq_length - 1}))
        sight = _sight(function, few, seq_length)
        if (seq_length, sight) not in self._known:
            step = max(1, seq_length // _ROWS)
            rows = torch.arange(seq_length - 1, -1, -step).flip(0)
            _compare(sight, function, rows, seq_length)
            self._known.add((seq_length, sight))
        return sight


def _sight(function: MaskFunction, rows: Tensor, seq_length: int) -> Sight:
    seen = _seen(function, rows, seq_length)
    if not seen.any(1).all():
        raise ValueError("a mask in which some token sees nothing")
    last = rows[-1] - seen[-1].int().argmax()
    first = seq_length - 1 - seen[0].flip(0).int().argmax()
    left = None if seen[-1, 0] else int(last)
    right = None if seen[0, -1] and seq_length > 1 else int(first)
    sight = Sight(left, right)
    _compare(sight, function, rows, seq_length)
    return sight


def _compare(sight: Sight, function: MaskFunction, rows: Tensor, seq_length: int) -> None:
    keys = torch.arange(seq_length)
    expected = torch.ones(len(rows), seq_length, dtype=torch.bool)
    if sight.left is not None:
        expected &= keys >= rows[:, None] - sight.left
    if sight.right is not None:
        expected &= keys <= rows[:, None] + sight.right
    seen = _seen(function, rows, seq_length)
    if not torch.equal(seen, expected):
        row = int((seen != expected).any(1).nonzero()[0])
        visible = seen[row].nonzero().flatten().tolist()
        ends = f"{visible[0]} to {visible[-1]}" if visible else "nothing"
        raise ValueError(
            f"a mask that is not a sliding window: token {int(rows[row])} sees {len(visible)} tokens ({ends})"
        )


def _seen(function: MaskFunction, rows: Tensor, seq_length: int) -> Tensor:
    """bool ``[rows, seq_length]``."""
    one = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    seen: Any = function(one, one, rows.view(1, 1, -1, 1), torch.arange(seq_length).view(1, 1, 1, -1))
    return seen.bool().expand(1, 1, len(rows), seq_length)[0, 0]
