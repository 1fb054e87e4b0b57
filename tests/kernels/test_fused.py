"""Fused operations: their kernels, interpreted, against plain torch, of any size, dtype and strides.

What is particular to one of them has a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest
import torch
from cp_kernels import rows
from nightly import each_pair
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_plugin.engine.core import payload
from cp_plugin.engine.core.values import Partial
from cp_plugin.engine.kernels import fused
from cp_plugin.engine.kernels.merge import merge, merge_all, merge_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of log(0) and of 0 / 0


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sends CPU tensors to the kernels like CUDA tensors; names of those that ran."""
    from cp_kernels import convolution, float8, merge, payload, permute, row_term

    ran: list[str] = []
    monkeypatch.setattr(fused, "_kernels", lambda x: True)
    for module in (merge, payload, permute, row_term, float8, convolution):
        for name in {name.split()[0] for name in OPERATIONS}:
            if (kernel := getattr(module, name, None)) is not None:

                def noted(*args: object, kernel: object = kernel, name: str = name) -> object:
                    ran.append(name)
                    return kernel(*args)

                monkeypatch.setattr(module, name, noted)
    return ran


def partials(n: int) -> list[Partial]:
    generator = torch.Generator().manual_seed(0)
    lses = torch.randn(n, 4, 1, 2, generator=generator) * 5
    lses[0, 1] = lses[:, 2, 0, 1] = -torch.inf
    return [Partial(torch.randn(4, 1, 2, 8, generator=generator), lse) for lse in lses]


class Given(NamedTuple):
    """Tensors of one operation."""

    numbers: list[Tensor]
    """Three ``[s, b, h, d]``."""
    scores: list[Tensor]
    """Three ``[s, b, h]``; -inf in rows that saw nothing, whose numbers are 0."""

    @classmethod
    def random(cls, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, view: str = "dense") -> Given:
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn((3, *shape), generator=generator)
        scores = torch.randn((3, *shape[:3]), generator=generator) * 20
        scores[:, :1, 1, 2] = scores[0, 1:2] = scores[-1, 2:3, 0] = -torch.inf
        numbers[scores == -torch.inf] = 0
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return cls(*(list(map(VIEWS[view], x)) for x in (numbers.to(dtype), scores.to(wide))))

    @property
    def places(self) -> Tensor:
        """Of each token, of the one before it, and of the one before that."""
        return (torch.arange(len(self.numbers[0])) - torch.arange(3)[:, None]).clamp(min=-1).int()

    @property
    def weight(self) -> Tensor:
        """Transposed, in the dtype of sums, as master weights are."""
        d = self.numbers[0].size(3)
        return torch.linspace(-1, 1, 3 * d).view(3, d).t().to(self.scores[0].dtype)

    @property
    def order(self) -> Tensor:
        return torch.randperm(len(self.numbers[0]), generator=torch.Generator().manual_seed(0))

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """Of each tensor in three parts of a message."""
        s = len(self.numbers[0])
        return [(s // 2, 0, s - s // 2)] * 3


def merged_into(x: Given) -> tuple[Tensor, Tensor]:
    """The first are overwritten where they lie."""
    out, lse = (
        y.new_empty(0).set_(y.untyped_storage().clone(), y.storage_offset(), y.shape, y.stride())
        for y in (x.numbers[0].to(x.scores[0].dtype), x.scores[0])
    )
    fused.merge_into(out, lse, x.numbers[1], x.scores[1])
    return out, lse


def unpacked_message(x: Given) -> object:
    shape, dtype = tuple(x.numbers[0].shape[1:]), x.numbers[0].dtype
    return fused.unpack_message(payload.pack_message(x.numbers, x.rows, 2), [shape] * 3, [dtype] * 3, x.rows, 2)


OPERATIONS: dict[str, Callable[[Given], object]] = {
    "merge": lambda x: fused.merge(x.numbers, x.scores),
    "merge of one": lambda x: fused.merge(x.numbers[:1], x.scores[:1]),
    "merge of nine": lambda x: fused.merge(x.numbers * 3, x.scores * 3),
    "merge to float16": lambda x: fused.merge(x.numbers, x.scores, torch.float16),
    "merge_into": merged_into,
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
    "unpack_message": unpacked_message,
    "extents": lambda x: fused.extents(x.numbers),
    "quantize": lambda x: fused.quantize(x.numbers[0], torch.tensor(8.0), torch.float8_e4m3fn),
    "quantize e5m2": lambda x: fused.quantize(x.numbers[0], torch.tensor(0.25), torch.float8_e5m2),
    "rounded": lambda x: fused.rounded(x.numbers[0], torch.tensor(1024.0), torch.float8_e4m3fn),
}
SUMS = [name for name in OPERATIONS if name.startswith(("merge", "delta", "out", "convolve", "extents"))]
"""Others are bit-identical."""
WIDE = list(OPERATIONS)[: list(OPERATIONS).index("pack")]
"""Those that take float64."""
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "heads first": lambda x: x.movedim(0, 2).contiguous().movedim(2, 0),
    "every other token": lambda x: x.repeat_interleave(2, 0)[::2],
    "a slice of the heads": lambda x: torch.cat([x] * 3, 2)[:, :, x.size(2) : 2 * x.size(2)],
    "a slice of the numbers": lambda x: torch.cat([x, x], -1)[..., : x.size(-1)] if x.dim() == 4 else x,
    "numbers apart": lambda x: x.transpose(2, -1).contiguous().transpose(2, -1),
    "one number for all": lambda x: x[:1, :1, :1, :1].expand(x.shape) if x.dim() == 4 else x,
}
ANY_STRIDES = ("gather_rows", "scatter_rows", "delta", "out_from_delta", "extents", "quantize", "rounded")
"""Others take a dense last dimension only."""
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
CASES = [
    (name, view, dtype)
    for name, view, dtype in product(OPERATIONS, VIEWS, ROUNDING)
    if (view in list(VIEWS)[:5] or name in ANY_STRIDES) and (dtype != torch.float64 or name in WIDE)
]


def both(call: Callable[[], object], kernels: list[str], name: str, limit: float | None = 1e-6) -> None:
    """The same call with the kernels and with plain torch; limit: None: of one rounding."""
    got = tree_leaves(call())
    assert kernels and kernels[0] == name.split()[0]
    ran = len(kernels)
    with pytest.MonkeyPatch.context() as context:
        context.setattr(fused, "_kernels", lambda x: False)
        want = tree_leaves(call())
    assert len(kernels) == ran
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        error = ROUNDING[a.dtype] if limit is None else limit
        torch.testing.assert_close(a.double(), b.double(), rtol=error, atol=error, equal_nan=True)


@each_pair
@pytest.mark.parametrize("size", [1, 8, 64, 80, 96, 192, 256])
@pytest.mark.parametrize(("name", "view", "dtype"), CASES, ids=str)
def test_any_size_dtype_and_strides(
    name: str, view: str, dtype: torch.dtype, size: int, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small blocks: several programs."""
    monkeypatch.setattr(rows, "ELEMENTS", 512)
    x = Given.random((5, 2, 3, size), dtype, view)
    both(lambda: OPERATIONS[name](x), kernels, name, None if name in SUMS else 0.0)


@each_pair
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1.0])
@pytest.mark.parametrize("score", [torch.nan, torch.inf, -torch.inf, 0.0])
@pytest.mark.parametrize("name", OPERATIONS)
def test_nonfinite_values(name: str, number: float, score: float, kernels: list[str]) -> None:
    x = Given.random((5, 2, 3, 8))
    x.numbers[0][[1, 3], 0, 0, 2], x.scores[0][3, 0, 0] = number, score  # the other numbers of row 1 are 0
    both(lambda: OPERATIONS[name](x), kernels, name, None if name in SUMS else 0.0)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "extents"])
def test_no_tokens(name: str, kernels: list[str]) -> None:
    x = Given.random((0, 2, 3, 4))
    both(lambda: OPERATIONS[name](x), kernels, name, 0.0)


def test_merging_uses_them(kernels: list[str]) -> None:
    """Half-precision partials go to new memory, sums in place, also for some rows only; many at once."""
    parts = partials(5)
    half = [Partial(out.bfloat16(), lse) for out, lse in parts]
    both(lambda: merge(*half[:2]), kernels, "merge")
    both(lambda: merge_all(half), kernels, "merge")
    kernels.clear()
    both(lambda: merge(Partial(*(x.clone() for x in parts[0])), half[1]), kernels, "merge_into")

    def some_rows() -> Partial:
        rows = Partial(half[1].out[:2], half[1].lse[:2])
        return merge_rows(Partial(*(x.clone() for x in parts[0])), range(0, 4, 2), rows, half[0].out)

    both(some_rows, kernels, "merge_into")


def test_partials_that_saw_nothing_are_left_out() -> None:
    (one,) = partials(1)
    assert merge_all([None, one, None]) is one and merge_all([None]) is None and merge_all([]) is None


def test_only_cuda_tensors_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        is_cuda = True

    assert not fused._kernels(torch.zeros(1)) and not fused._kernels(torch.zeros(1, device="meta"))
    monkeypatch.setattr(fused, "_has_triton", lambda: True)
    assert fused._kernels(Cuda())
    monkeypatch.setattr(fused, "_has_triton", lambda: False)
    assert not fused._kernels(Cuda())
