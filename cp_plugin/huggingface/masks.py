"""What a layer may see, read from the mask function that transformers would have expanded.

transformers describes a mask by a function of indices, ``sees(batch, head, query, key)``, and an attention
implementation registers what it makes of it. Ours evaluates the function at a few positions of the whole sequence, and
passes on the window it finds as a small tensor in the place of the mask. The layer that is given this tensor attends
accordingly, so windows are followed wherever they are configured: in the layer, the model, or the mask alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cp_plugin.engine.core.mask import Mask

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_SIGN = 0x6D61736B
"""First number of a tensor that stands for a mask."""
_UNREADABLE = _SIGN + 1
_ROWS, _KEYS = 256, 512
"""Queries at which a mask function is read where a length is new, and keys up to which each of them reads them all."""


def as_tensor(seen: Mask | str) -> Tensor:
    """int64 ``[1, 1, 1, n]`` on the CPU: a mask's shape, and read without waiting for a device.

    seen: a string says why a mask is not a window. Only a layer that is given it need mind: some models make masks for
    kinds of layers that they do not have.
    """
    if isinstance(seen, str):
        return torch.tensor([_UNREADABLE, 0, 0, *seen.encode()]).view(1, 1, 1, -1)
    left, right = (-1 if n is None else n for n in (seen.left, seen.right))
    return torch.tensor([_SIGN, left, right, *seen.documents]).view(1, 1, 1, -1)


def from_tensor(x: Tensor) -> Mask:
    """The inverse. ValueError for any other tensor, and for one that stands for a mask which is not a window."""
    stands = x.dtype == torch.int64 and x.shape[:-1] == (1, 1, 1) and x.numel() >= 3
    sign, left, right, *documents = x.flatten().tolist() if stands else (0, 0, 0)
    if sign == _UNREADABLE:
        raise ValueError(bytes(documents).decode())
    if sign != _SIGN:
        raise ValueError("a custom mask")
    return Mask(None if left == -1 else left, None if right == -1 else right, tuple(documents))


class Reader:
    """Reads mask functions: three queries each time, and many where the length or the answer is new.

    A query of a long sequence reads some hundred keys, whatever the length: those around itself and around the window's
    edges, the sequence's ends, distances of powers of two, and a sample of its own of the sequence and of the window.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, Mask]] = set()

    def stand_in(self, arguments: dict[str, Any], seq_length: int, documents: tuple[int, ...]) -> Tensor:
        """Return what a layer gets for the arguments of an entry of AttentionMaskInterface."""
        try:
            if arguments.get("use_vmap"):
                raise ValueError("a mask function of the model's own")
            return as_tensor(self.read(arguments["mask_function"], seq_length)._replace(documents=documents))
        except ValueError as problem:
            return as_tensor(str(problem))

    def read(self, function: MaskFunction, seq_length: int) -> Mask:
        """
        Raises:
            ValueError: for a mask that is not a window of the same size at every token.
        """
        last = seq_length - 1
        left = _reach(lambda far: _seen(function, torch.tensor([last]), last - far), last)
        right = _reach(lambda far: _seen(function, torch.tensor([0]), far), last)
        mask = Mask(None if left == last else left, None if 0 < right == last else right)
        _compare(mask, function, torch.tensor(sorted({0, seq_length // 2, last})), seq_length)
        if (seq_length, mask) not in self._known:
            _compare(mask, function, _spread(torch.zeros(1), min(seq_length, _ROWS), seq_length)[0], seq_length)
            self._known.add((seq_length, mask))
        return mask


def _reach(seen: Callable[[Tensor], Tensor], most: int) -> int:
    """Up to which distance, at most ``most``, tokens are seen: by search, which takes what is between for granted."""
    low, high = 0, most + 1
    while high - low > 1:
        far = torch.arange(low + 1, high, max(1, (high - low) // 64))
        (hidden,) = (~seen(far[None])[0]).nonzero(as_tuple=True)
        first = int(hidden[0]) if len(hidden) else len(far)
        low, high = int(far[first - 1]) if first else low, int(far[first]) if first < len(far) else high
    return low


def _compare(mask: Mask, function: MaskFunction, rows: Tensor, seq_length: int) -> None:
    keys, (first, end) = _keys(mask, rows, seq_length), mask.interval(rows, seq_length)
    expected = (keys >= first[:, None]) & (keys < end[:, None])
    wrong = (_seen(function, rows, keys) != expected).any(1).nonzero()
    if len(wrong):
        row = rows[wrong[0]]
        visible = _seen(function, row, torch.arange(seq_length)[None])[0].nonzero().flatten().tolist()
        ends = f"{len(visible)} tokens ({visible[0]} to {visible[-1]})" if visible else "nothing"
        raise ValueError(f"a mask that is not a sliding window: token {int(row)} sees {ends}")


def _keys(mask: Mask, rows: Tensor, seq_length: int) -> Tensor:
    """Keys at which to read each row: int64 ``[rows, n]``."""
    if seq_length <= _KEYS:
        return torch.arange(seq_length).expand(len(rows), -1)
    near, powers = torch.arange(-32, 33), 2 ** torch.arange(6, seq_length.bit_length())
    edges = [n + torch.arange(-2, 3) for n in (-(mask.left or 0), mask.right or 0)]
    ahead = torch.cat([near, powers, -powers, *edges]).expand(len(rows), -1)
    inside = [sign * _spread(rows, 64, n or 64) for sign, n in ((-1, mask.left), (1, mask.right))]
    keys = rows[:, None] + torch.cat([ahead, *inside], 1)
    ends = torch.arange(16).expand(len(rows), -1)
    return torch.cat([keys, ends, seq_length - 1 - ends, _spread(rows, 256, seq_length)], 1).clamp(0, seq_length - 1)


def _spread(seeds: Tensor, count: int, length: int) -> Tensor:
    """So many numbers below ``length`` for each seed, one from each part, at other places: int64 ``[seeds, count]``."""
    part, golden = torch.arange(count), (5**0.5 - 1) / 2
    place = ((seeds[:, None].double() + part) * golden) % 1
    return ((part + place) * (length / count)).long()


def _seen(function: MaskFunction, rows: Tensor, keys: Tensor) -> Tensor:
    """bool ``[rows, n]``, of each row's keys ``[rows, n]``."""
    one = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    seen: Any = function(one, one, rows.view(1, 1, -1, 1), keys[None, None])
    return seen.bool().expand(1, 1, *keys.shape)[0, 0]
