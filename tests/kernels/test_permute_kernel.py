"""The permutation kernel, interpreted, bit for bit against torch's indexing. Any strides: ``test_fused``."""

from __future__ import annotations

import pytest
import torch
from cp_kernels import permute as kernel
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.bool, torch.float8_e4m3fn)


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bits, including NaN payloads and negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def shuffled(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))


def same(a: Tensor, b: Tensor) -> bool:
    a, b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def check(x: Tensor, order: Tensor) -> None:
    (gathered,), (scattered,) = kernel.gather_rows((x,), order), kernel.scatter_rows((x,), order)
    assert gathered.is_contiguous() and scattered.is_contiguous()
    assert gathered.dtype == scattered.dtype == x.dtype and gathered.shape == scattered.shape == x.shape
    assert same(gathered, x.contiguous().view(torch.uint8).view(x.size(0), -1)[order.long()])
    assert same(scattered.view(torch.uint8).view(x.size(0), -1)[order.long()], x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(13, 2, 3, 10), (13, 1, 3), (13,), (13, 2, 0), (1, 7), (5, 1, 16, 80)])
def test_any_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(bits(shape, dtype), shuffled(shape[0]))


def test_rows_of_several_blocks() -> None:
    """More words and more rows than a program copies."""
    for x in (bits((3, 9, 2000), torch.float32), bits((4100, 1), torch.float64), bits((300, 70), torch.int64)):
        check(x, shuffled(x.size(0)))


def test_a_gather_may_take_some_rows_or_a_row_twice() -> None:
    x = bits((6, 3), torch.float32)
    for order in (torch.tensor([4, 4, 0]), torch.tensor([1, 9, 0, 9, 5, 9])[::2], torch.tensor([], dtype=torch.int64)):
        assert same(*kernel.gather_rows((x,), order), x[order])


def test_the_widest_words_are_copied() -> None:
    def word(x: Tensor) -> torch.dtype:
        return kernel._widest_word(kernel._divide_rows(x), torch.empty(1))

    x = torch.empty(4, 2, 8, 16, dtype=torch.bfloat16)
    assert word(x) == word(x[:, :, 2:4]) == word(x[..., 4:8]) == word(x[..., 0:4]) == torch.int64
    assert word(x[..., 2:4]) == word(x[..., 2:]) == torch.int32
    assert word(x[..., 1:5]) == word(x[..., 0]) == torch.int16
    assert word(torch.empty(4, 3)) == torch.int32 and word(torch.empty(4, 3, dtype=torch.uint8)) == torch.uint8
    assert kernel._divide_rows(x[:, :, 2:4]).shape == (4, 2, 32) and kernel._divide_rows(x).shape == (4, 1, 256)


def test_invalid_arguments_are_refused() -> None:
    x = torch.zeros(4, 2)
    for order in (
        torch.zeros(4),
        torch.zeros(2, 2, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int64, device="meta"),
    ):
        with pytest.raises(ValueError, match="an order must be int64 or int32"):
            kernel.gather_rows((x,), order)
    with pytest.raises(ValueError, match="an order of 3 rows cannot scatter a tensor of 4"):
        kernel.scatter_rows((x,), torch.arange(3))
