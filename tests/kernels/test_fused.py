"""Fused operations: their kernels, interpreted, against plain torch, of any size, dtype and strides; and their offsets,
on tensors of long sequences without data.

What is particular to one of them has a file of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from itertools import product

import pytest
import torch
from cp_kernels import offsets, rows
from nightly import each_pair
from operations import ANY_STRIDES, FLOAT64, OPERATIONS, SUMS, VIEWS, Operands, run
from torch import Tensor

from cp_plugin.engine.core.values import Partial
from cp_plugin.engine.kernels import fused
from cp_plugin.engine.kernels.merge import merge, merge_all, merge_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of log(0) and of 0 / 0
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
CASES = [
    (name, view, dtype)
    for name, view, dtype in product(OPERATIONS, VIEWS, ROUNDING)
    if (view in list(VIEWS)[:5] or name in ANY_STRIDES) and (dtype != torch.float64 or name in FLOAT64)
]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that ran."""
    from cp_kernels import convolution, float8, merge, payload, permute, row_term

    ran: list[str] = []
    for module, name in product(
        (merge, payload, permute, row_term, float8, convolution), {name.split()[0] for name in OPERATIONS}
    ):
        if (kernel := getattr(module, name, None)) is not None:

            def noted(*args: object, kernel: object = kernel, name: str = name) -> object:
                ran.append(name)
                return kernel(*args)

            monkeypatch.setattr(module, name, noted)
    return ran


def compare(call: Callable[[], object], ran: list[str], name: str, limit: float | None = 1e-6) -> None:
    """The same call with the kernels and with plain torch; limit: None: of one rounding."""
    ran.clear()
    got = run(call, kernels=True)
    assert ran and ran[0] == name.split()[0]
    ran.clear()
    for a, b in zip(got, run(call, kernels=False), strict=True):
        assert a.dtype == b.dtype
        error = ROUNDING[a.dtype] if limit is None else limit
        torch.testing.assert_close(a.double(), b.double(), rtol=error, atol=error, equal_nan=True)
    assert not ran


@each_pair
@pytest.mark.parametrize("size", [1, 8, 64, 80, 96, 192, 256])
@pytest.mark.parametrize(("name", "view", "dtype"), CASES, ids=str)
def test_any_size_dtype_and_strides(
    name: str, view: str, dtype: torch.dtype, size: int, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small blocks: several programs."""
    monkeypatch.setattr(rows, "ELEMENTS", 512)
    x = Operands.random((5, 2, 3, size), dtype, view)
    compare(lambda: OPERATIONS[name](x), ran, name, None if name in SUMS else 0.0)


@each_pair
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1.0])
@pytest.mark.parametrize("score", [torch.nan, torch.inf, -torch.inf, 0.0])
@pytest.mark.parametrize("name", OPERATIONS)
def test_nonfinite_values(name: str, number: float, score: float, ran: list[str]) -> None:
    x = Operands.random((5, 2, 3, 8))
    x.numbers[0][[1, 3], 0, 0, 2], x.scores[0][3, 0, 0] = number, score  # the other numbers of row 1 are 0
    compare(lambda: OPERATIONS[name](x), ran, name, None if name in SUMS else 0.0)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "extents"])
def test_no_tokens(name: str, ran: list[str]) -> None:
    x = Operands.random((0, 2, 3, 4))
    compare(lambda: OPERATIONS[name](x), ran, name, 0.0)


def test_merging_uses_them(ran: list[str]) -> None:
    """Half-precision partials go to new memory, sums in place, also for some rows only; many at once."""
    x = Operands.random((4, 2, 3, 8))
    parts = [Partial(*pair) for pair in zip(*x, strict=True)]
    half = [Partial(out.bfloat16(), lse) for out, lse in parts]
    compare(lambda: merge(*half[:2]), ran, "merge")
    compare(lambda: merge_all(half), ran, "merge")
    copied = lambda: Partial(*map(torch.clone, parts[0]))  # noqa: E731
    compare(lambda: merge(copied(), half[1]), ran, "merge_into")
    some = Partial(half[1].out[:2], half[1].lse[:2])
    compare(lambda: merge_rows(copied(), range(0, 4, 2), some, half[0].out), ran, "merge_into")


def test_partials_that_saw_nothing_are_left_out() -> None:
    one = Partial(torch.zeros(1), torch.zeros(1))
    assert merge_all([None, one, None]) is one and merge_all([None]) is None and merge_all([]) is None


def test_only_cuda_tensors_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        is_cuda = True

    assert not fused._kernels(torch.zeros(1)) and not fused._kernels(torch.zeros(1, device="meta"))
    monkeypatch.setattr(fused, "_has_triton", lambda: True)
    assert fused._kernels(Cuda())
    monkeypatch.setattr(fused, "_has_triton", lambda: False)
    assert not fused._kernels(Cuda())


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
LAUNCHES = [
    *((name, "whole") for name in KERNELS),
    *((name, "half") for name in KERNELS if name[:3] not in ("unp", "con")),
]
LAUNCHES += [("delta", "half of the second"), ("merge", "four chunks")]


@pytest.mark.parametrize(("tokens", "wide"), [(2**19 - 512, False), (2**19, True)])
@pytest.mark.parametrize(("name", "operands"), LAUNCHES)
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
