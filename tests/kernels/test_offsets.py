"""Memory-bound kernels use 64-bit offsets for long sequences and 32-bit ones otherwise."""

from __future__ import annotations

from collections import defaultdict
from importlib import import_module

import pytest
import torch
from cp_kernels import offsets
from operations import OPERATIONS, Operands, run
from torch import Tensor

KERNELS = {
    "merge": "merge._merge_kernel",
    "extents": "float8._extents_kernel",
    "quantize": "float8._round_kernel",
    "gather_rows": "permute._permute_kernel",
    "pack in one block": "payload._pack_message_kernel",
    "unpack_message": "payload._unpack_message_kernel",
    "convolve": "convolution._forward_kernel",
    "convolve_back": "convolution._backward_kernel",
    "delta": "row_term._delta_kernel",
    "out_from_delta": "row_term._out_kernel",
}
"""Operation -> kernel."""


def half(x: Tensor) -> Tensor:
    """Half the heads: half the elements, but the same reach."""
    return x[:, :, :16]


OPERANDS = {
    "whole": lambda x: x,
    "half": lambda x: x.each(half),
    "half of the second": lambda x: Operands([half(x.numbers[0]).contiguous(), half(x.numbers[1])], x.scores),
    "four chunks": lambda x: Operands(*(list(y[0].view(4, -1, *y[0].shape[1:]).unbind()) for y in x)),
}
CASES = [
    *((name, "whole") for name in KERNELS),
    *((name, "half") for name in KERNELS if name[:3] not in ("unp", "con")),
]
CASES += [("delta", "half of the second"), ("merge", "four chunks")]


@pytest.mark.parametrize(("tokens", "wide"), [(2**19 - 512, False), (2**19, True)])
@pytest.mark.parametrize(("name", "operands"), CASES)
def test_offsets_of_long_sequences_have_64_bits(
    name: str, operands: str, tokens: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4096 elements per token, 2^31 in total."""
    module, kernel = KERNELS[name].split(".")
    used: list[str] = []

    def launch(*_: object, INDEX: object, **constants: object) -> None:
        used.append(str(INDEX))

    monkeypatch.setattr(import_module(f"cp_kernels.{module}"), kernel, defaultdict(lambda: launch))
    dtype = torch.float64 if module == "permute" else torch.bfloat16  # rows are copied in words of 8 bytes
    x = torch.empty((tokens, 1, 32, 128), dtype=dtype, device="meta")
    run(lambda: OPERATIONS[name](OPERANDS[operands](Operands([x] * 3, [x[..., 0].float()] * 3))), kernels=True)
    assert used[0] == ("int64" if wide else "int32")


def test_index_types() -> None:
    largest_of = [offsets.reach(shape, stride) for shape, stride in (((4, 8), (8, 1)), ((4, 8), (-8, 1)), ((1,), (9,)))]
    assert largest_of == [31, 31, 0]
    assert str(offsets.index_type(2**30)) == "int32" and str(offsets.index_type(2**31 - 1)) == "int64"
