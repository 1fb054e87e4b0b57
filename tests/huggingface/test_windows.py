"""What a layer may see is read from the mask that transformers would have made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cp_plugin.engine.core.mask import Mask
from cp_plugin.huggingface.masks import Reader, as_tensor, from_tensor


@pytest.mark.parametrize(
    "function, mask",
    [
        (lambda b, h, q, k: k <= q, Mask(right=0)),
        (lambda b, h, q, k: (k <= q) & (k > q - 7), Mask(6, 0)),
        (lambda b, h, q, k: (k <= q) & (k >= q - 4000), Mask(right=0)),
        (lambda b, h, q, k: (q >= 0) & (k >= 0), Mask()),
        (lambda b, h, q, k: (q - k).abs() <= 3, Mask(3, 3)),
        (lambda b, h, q, k: (k >= q - 1) & (k <= q + 5), Mask(1, 5)),
        (lambda b, h, q, k: k == q, Mask(0, 0)),
    ],
)
def test_a_window_is_read(function: Callable[..., torch.Tensor], mask: Mask) -> None:
    assert Reader().read(function, 96) == mask
    assert from_tensor(as_tensor(mask)) == mask


MILLION = 1 << 20


@pytest.mark.parametrize("mask", [Mask(right=0), Mask(4095, 0), Mask(), Mask(70000, 3)])
def test_reading_a_length_costs_the_same_at_any_length(mask: Mask) -> None:
    """All keys of 256 queries of a million tokens took 5 to 9 s and 1 GB."""
    read, reader = 0, Reader()

    def function(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        nonlocal read
        read += max(q.numel(), k.numel())
        far = k - q
        left, right = (1 << 30 if n is None else n for n in (mask.left, mask.right))
        return (far >= -left) & (far <= right)

    for length, most in ((MILLION, 1 << 18), (MILLION, 1 << 12), (MILLION + 8, 1 << 18), (MILLION // 8, 1 << 18)):
        read = 0
        assert reader.read(function, length) == mask and read <= most


OTHERS: dict[int, dict[str, Callable[..., torch.Tensor]]] = {
    96: {
        "chunks": lambda q, k: (k <= q) & (k // 32 == q // 32),
        "every second": lambda q, k: (k <= q) & (k % 2 == 0) | (k == q),
        "a prefix": lambda q, k: (k <= q) | ((k < 8) & (q < 8)),
        "token 50 sees 47 tokens": lambda q, k: (k <= q) & ((q != 50) | (k > 3)),
        "sees nothing": lambda q, k: k < q,
    },
    MILLION: {
        **{f"chunks of {n}": lambda q, k, n=n: (k <= q) & (k // n == q // n) for n in (96, 1024, 4096, 5000, 1 << 18)},
        **{f"every {n}th": lambda q, k, n=n: (k <= q) & ((k % n == 0) | (q - k < 9)) for n in (2, 128)},
        "a hole": lambda q, k: (k <= q) & ~((k > 300_000) & (k < 310_000) & (k < q)),
        "first tokens": lambda q, k: (k <= q) & ((q - k < 4096) | (k < 4)),
        "a prefix": lambda q, k: (k <= q) | ((k < 9) & (q < 9)),
        "a smaller window later": lambda q, k: (k <= q) & (q - k < torch.where(q > MILLION // 3, 100, 90)),
        "holes in a window": lambda q, k: (k <= q) & (q - k < 4096) & ((k // 64) % 8 > 0) | (q == k),
        "documents": lambda q, k: (k <= q) & ((k < 700_001) == (q < 700_001)),
    },
}
"""By the length that shows it."""


@pytest.mark.parametrize(("length", "name"), [(length, name) for length, names in OTHERS.items() for name in names])
def test_other_masks_are_refused(length: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"not a sliding window.*{name if 'sees' in name else ''}"):
        Reader().read(lambda b, h, q, k: OTHERS[length][name](q, k), length)


def test_another_tensor_is_no_window() -> None:
    for x in (torch.zeros(1, 1, 1, 8, dtype=torch.int64), torch.ones(1, 1, 4, 4), as_tensor(Mask(5, 0)) + 2):
        with pytest.raises(ValueError, match="a custom mask"):
            from_tensor(x)
