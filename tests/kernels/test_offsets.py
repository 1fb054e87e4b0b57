"""Memory-bound kernels use 64-bit offsets for long sequences and 32-bit ones otherwise."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from cp_kernels import convolution, float8, merge, offsets, payload, permute, row_term
from torch import Tensor


class Recorder:
    """A kernel that records its arguments."""

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *args: object, **kwargs: object) -> None:
        self.index = kwargs["INDEX"]


def rows(x: Tensor) -> Tensor:
    """A number for each row of ``x``."""
    return torch.empty(x.shape[:-1], device="meta")


def merged(parts: int) -> Callable[[Tensor], object]:
    def call(x: Tensor) -> object:
        chunks = x.view(parts, -1, *x.shape[1:])
        return merge.merge(chunks.unbind(), rows(chunks).unbind())

    return call


def half(x: Tensor) -> Tensor:
    """Half the elements of a tensor twice as wide: the same reach."""
    return x[:, :, :16]


def permuted(cut: Callable[[Tensor], Tensor]) -> Callable[[Tensor], object]:
    def call(x: Tensor) -> object:
        longer = torch.empty((4 * x.size(0), *x.shape[1:]), dtype=x.dtype, device="meta")  # words have 8 bytes
        order = torch.empty(longer.size(0), dtype=torch.int64, device="meta")
        return permute.gather_rows((cut(longer),), order)

    return call


def unpacked(x: Tensor) -> object:
    shape = tuple(x.shape[1:])
    message = torch.empty(x.numel() + x.size(0) // 64 * x.size(2), dtype=torch.uint8, device="meta")
    return payload.unpack_message(message, [shape], [x.dtype], [(x.size(0),)], 64)


def convolved(back: bool) -> Callable[[Tensor], object]:
    def call(x: Tensor) -> object:
        x = x.flatten(2)
        table = torch.empty((4, x.size(0)), dtype=torch.int32, device="meta")
        weight = torch.empty((x.size(2), 4), device="meta")
        if back:
            return convolution.convolve_back(x, x, table, weight)
        return convolution.convolve(x, x[:3], table, weight, None)

    return call


ONE = torch.ones((), device="meta")
CALLS: dict[str, tuple[ModuleType, str, Callable[[Tensor], object]]] = {
    "merge": (merge, "_merge_kernel", merged(1)),
    "merge of four chunks": (merge, "_merge_kernel", merged(4)),
    "extents": (float8, "_extents_kernel", lambda x: float8.extents((x,))),
    "extents of half": (float8, "_extents_kernel", lambda x: float8.extents((half(x),))),
    "quantize": (float8, "_round_kernel", lambda x: float8.quantize(x, ONE, torch.float8_e4m3fn)),
    "quantize half": (float8, "_round_kernel", lambda x: float8.quantize(half(x), ONE, torch.float8_e4m3fn)),
    "permute": (permute, "_permute_kernel", permuted(lambda x: x)),
    "permute half": (permute, "_permute_kernel", permuted(half)),
    "pack": (payload, "_pack_message_kernel", lambda x: payload.pack(x, 64)),
    "pack half": (payload, "_pack_message_kernel", lambda x: payload.pack(half(x), 64)),
    "unpack_message": (payload, "_unpack_message_kernel", unpacked),
    "convolve": (convolution, "_forward_kernel", convolved(back=False)),
    "convolve_back": (convolution, "_backward_kernel", convolved(back=True)),
    "delta": (row_term, "_delta_kernel", lambda x: row_term.delta(x, x)),
    "delta of half": (row_term, "_delta_kernel", lambda x: row_term.delta(half(x).contiguous(), half(x))),
    "out_from_delta": (row_term, "_out_kernel", lambda x: row_term.out_from_delta(x, rows(x))),
    "out_from_delta of half": (row_term, "_out_kernel", lambda x: row_term.out_from_delta(half(x), half(rows(x)))),
}


@pytest.mark.parametrize(("tokens", "wide"), [(2**19 - 512, False), (2**19, True)])
@pytest.mark.parametrize("name", CALLS)
def test_offsets_of_long_sequences_have_64_bits(
    name: str, tokens: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4096 elements per token, 2^31 in total."""
    module, kernel, call = CALLS[name]
    recorder = Recorder()
    monkeypatch.setattr(module, kernel, recorder)
    call(torch.empty((tokens, 1, 32, 128), dtype=torch.bfloat16, device="meta"))
    assert (str(recorder.index) == "int64") == wide


def test_index_types() -> None:
    largest_of = [offsets.reach(shape, stride) for shape, stride in (((4, 8), (8, 1)), ((4, 8), (-8, 1)), ((1,), (9,)))]
    assert largest_of == [31, 31, 0]
    assert str(offsets.index_type(2**30)) == "int32" and str(offsets.index_type(2**31 - 1)) == "int64"
