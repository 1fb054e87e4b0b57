"""Every fused operation on tensors of any size, dtype and strides, by its kernel or in plain torch.

``test_fused.py`` runs the kernels in the interpreter, and ``ci/gpu/our_kernels.py`` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_plugin.engine.core import payload
from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.kernels import fused

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "heads first": lambda x: x.movedim(0, 2).contiguous().movedim(2, 0),
    "every other token": lambda x: x.repeat_interleave(2, 0)[::2],
    "a slice of the heads": lambda x: torch.cat([x] * 3, 2)[:, :, x.size(2) : 2 * x.size(2)],
    "a slice of the numbers": lambda x: torch.cat([x, x], -1)[..., : x.size(-1)] if x.dim() == 4 else x,
    "numbers apart": lambda x: x.transpose(2, -1).contiguous().transpose(2, -1),
    "one number for all": lambda x: x[:1, :1, :1, :1].expand(x.shape) if x.dim() == 4 else x,
}


class Operands(NamedTuple):
    """Tensors of one operation, on one device."""

    numbers: list[Tensor]
    """Three ``[s, b, h, d]``."""
    scores: list[Tensor]
    """Three ``[s, b, h]``; -inf in rows that saw nothing, whose numbers are 0."""

    @classmethod
    def random(cls, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, view: str = "dense") -> Operands:
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn((3, *shape), generator=generator)
        scores = torch.randn((3, *shape[:3]), generator=generator) * 20
        scores[:, :1, 1, 2] = scores[0, 1:2] = scores[-1, 2:3, 0] = -torch.inf
        numbers[scores == -torch.inf] = 0
        wide = accumulation_dtype(dtype)
        return cls(*(list(map(VIEWS[view], x)) for x in (numbers.to(dtype), scores.to(wide))))

    def each(self, change: Callable[[Tensor], Tensor]) -> Operands:
        """The same with every tensor changed."""
        return Operands(*(list(map(change, tensors)) for tensors in self))

    @property
    def places(self) -> Tensor:
        """Of each token, of the one before it, and of the one before that."""
        places = torch.arange(len(self.numbers[0])) - torch.arange(3)[:, None]
        return places.clamp(min=-1).int().to(self.numbers[0].device)

    @property
    def weight(self) -> Tensor:
        """Transposed, in the dtype of sums, as master weights are."""
        d = self.numbers[0].size(3)
        return torch.linspace(-1, 1, 3 * d).view(3, d).t().to(self.scores[0])

    @property
    def order(self) -> Tensor:
        order = torch.randperm(len(self.numbers[0]), generator=torch.Generator().manual_seed(0))
        return order.to(self.numbers[0].device)

    @property
    def uneven(self) -> list[Tensor]:
        """The first, in whose rows numbers are up to 2^24 times as large as in others, and one head of the second."""
        powers = torch.linspace(-12, 12, self.numbers[0][..., 0].numel()).round().view(self.numbers[0].shape[:3])
        sizes = torch.exp2(powers.roll(7)).to(self.numbers[0])
        return [self.numbers[0] * sizes.unsqueeze(-1), self.numbers[1][:, :, :1].contiguous()]

    def scale(self, scale: float) -> Tensor:
        return torch.tensor(scale, device=self.numbers[0].device)

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """Of each tensor in three parts of a message."""
        s = len(self.numbers[0])
        return [(s // 2, 0, s - s // 2)] * 3

    @property
    def few(self) -> list[tuple[int, int, int, int]]:
        """Of two tensors in four parts: many rows, none, a few, and the rest."""
        s = len(self.numbers[0])
        few = min(3, s - s // 2)
        return [(s // 2, 0, few, s - s // 2 - few)] * 2


def merge_in_place(x: Operands) -> tuple[Tensor, Tensor]:
    """The first are overwritten where they lie."""
    out, lse = (
        y.new_empty(0).set_(y.untyped_storage().clone(), y.storage_offset(), y.shape, y.stride())
        for y in (x.numbers[0].to(x.scores[0].dtype), x.scores[0])
    )
    fused.merge_into(out, lse, x.numbers[1], x.scores[1])
    return out, lse


def unpack_message(x: Operands) -> object:
    shape, dtype = tuple(x.numbers[0].shape[1:]), x.numbers[0].dtype
    return fused.unpack_message(payload.pack_message(x.numbers, x.rows, 2), [shape] * 3, [dtype] * 3, x.rows, 2)


def unpack_uneven(x: Operands) -> object:
    shapes, dtypes = [tuple(y.shape[1:]) for y in x.uneven], [x.numbers[0].dtype] * 2
    return fused.unpack_message(payload.pack_message(x.uneven, x.few, 64), shapes, dtypes, x.few, 64)


OPERATIONS: dict[str, Callable[[Operands], object]] = {
    "merge": lambda x: fused.merge(x.numbers, x.scores),
    "merge of one": lambda x: fused.merge(x.numbers[:1], x.scores[:1]),
    "merge of nine": lambda x: fused.merge(x.numbers * 3, x.scores * 3),
    "merge to float16": lambda x: fused.merge(x.numbers, x.scores, torch.float16),
    "merge_into": merge_in_place,
    "gather_rows": lambda x: fused.gather_rows((*x.numbers, *x.scores), x.order),
    "scatter_rows": lambda x: fused.scatter_rows((*x.numbers, *x.scores), x.order),
    "delta": lambda x: fused.delta(*x.numbers[:2]),
    "out_from_delta": lambda x: fused.out_from_delta(x.numbers[0], x.scores[0].nan_to_num(neginf=0)),
    "convolve": lambda x: fused.convolve(x.numbers[0][:, :, 0], x.numbers[1][:2, :, 0], x.places, x.weight, None),
    "convolve_back": lambda x: fused.convolve_back(
        x.numbers[0][:, :, 0], x.numbers[1][:, :, 0], x.places.flip(1), x.weight
    ),
    "pack": lambda x: fused.pack(x.numbers[0], 2),
    "pack in one block": lambda x: fused.pack(x.numbers[0], 64),
    "unpack": lambda x: fused.unpack(*payload.pack(x.numbers[0], 2), 2, x.numbers[0].dtype),
    "pack_message": lambda x: fused.pack_message(x.numbers, x.rows, 2),
    "unpack_message": unpack_message,
    "gather_rows of bytes": lambda x: fused.gather_rows((x.numbers[0].contiguous().view(torch.uint8),), x.order),
    "scatter_rows of bytes": lambda x: fused.scatter_rows((x.numbers[0].contiguous().view(torch.uint8),), x.order),
    "pack of uneven sizes": lambda x: fused.pack(x.uneven[0], 4),
    "unpack of uneven sizes": lambda x: fused.unpack(*payload.pack(x.uneven[0], 64), 64, x.numbers[0].dtype),
    "pack_message of uneven parts": lambda x: fused.pack_message(x.uneven, x.few, 64),
    "unpack_message of uneven parts": unpack_uneven,
    "extents": lambda x: fused.extents(x.numbers),
    "quantize": lambda x: fused.quantize(x.numbers[0], x.scale(8.0), torch.float8_e4m3fn),
    "quantize e5m2": lambda x: fused.quantize(x.numbers[0], x.scale(0.25), torch.float8_e5m2),
    "rounded": lambda x: fused.rounded(x.numbers[0], x.scale(1024.0), torch.float8_e4m3fn),
}
SUMS = [name for name in OPERATIONS if name.startswith(("merge", "delta", "out", "convolve", "extents"))]
"""Others are bit-identical."""
FLOAT64 = list(OPERATIONS)[: list(OPERATIONS).index("pack")]
"""Those that take float64."""
ANY_STRIDES = ("gather_rows", "scatter_rows", "delta", "out_from_delta", "extents", "quantize", "rounded")
"""Others take a dense last dimension only."""


def run(call: Callable[[], object], *, kernels: bool) -> list[Tensor]:
    """The tensors of an operation, by kernels also on the CPU, or in plain torch also on a GPU."""
    with patch.object(fused, "_kernels", lambda x: kernels):
        return tree_leaves(call())
