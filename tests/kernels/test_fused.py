"""Dispatch of fused operations to kernels, and equality with plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cp_plugin.core.values import Partial
from cp_plugin.kernels import fused
from cp_plugin.kernels.merge import merge, merge_all, merge_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of log(0) and of 0 / 0


OPERATIONS = (
    *("merge", "merge_into", "gather_rows", "scatter_rows", "pack", "unpack", "pack_message", "unpack_message"),
    *("delta", "out_from_delta", "extents", "quantize", "rounded", "convolve", "convolve_back"),
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sends CPU tensors to the kernels like CUDA tensors; names of those that ran."""
    from cp_kernels import convolution, float8, merge, payload, permute, row_term

    ran: list[str] = []
    monkeypatch.setattr(fused, "_kernels", lambda x: True)
    for module in (merge, payload, permute, row_term, float8, convolution):
        for name in OPERATIONS:
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


def both(call: object, kernels: list[str], name: str) -> None:
    """The same call with the kernels and with plain torch."""
    got = call()
    assert kernels and set(kernels) == {name}
    with pytest.MonkeyPatch.context() as context:
        context.setattr(fused, "_kernels", lambda x: False)
        want = call()
    assert set(kernels) == {name}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_every_operation_has_both(kernels: list[str]) -> None:
    parts, order = partials(3), torch.tensor([2, 0, 3, 1])
    outs, lses = zip(*parts, strict=True)

    def in_place() -> tuple[Tensor, Tensor]:
        out, lse = outs[0].clone(), lses[0].clone()
        fused.merge_into(out, lse, outs[1], lses[1])
        return out, lse

    packed, parts_of = fused.pack(outs[0], 2), [(3, 0, 1)] * 3
    message = fused.pack_message(outs, parts_of, 2)
    rows, weight = outs[0][:, 0].unsqueeze(1)[..., 0, :], outs[1][0, 0].t().contiguous()
    places = torch.tensor([[0, 1, 2, 3], [-1, 0, 1, 2]], dtype=torch.int32)
    after = torch.tensor([[0, 1, 2, 3], [1, 2, 3, -1]], dtype=torch.int32)
    calls = {
        "merge": lambda: fused.merge(outs, lses, torch.float16),
        "merge_into": in_place,
        "gather_rows": lambda: fused.gather_rows((*outs, *lses), order),
        "scatter_rows": lambda: fused.scatter_rows((*outs, *lses), order),
        "pack": lambda: [x.float() for x in fused.pack(outs[0], 2)],
        "unpack": lambda: (fused.unpack(*packed, 2, torch.float32),),
        "pack_message": lambda: (fused.pack_message(outs, parts_of, 2).float(),),
        "unpack_message": lambda: fused.unpack_message(message, [(1, 2, 8)] * 3, [torch.float32] * 3, parts_of, 2),
        "delta": lambda: (fused.delta(outs[0], outs[1]),),
        "out_from_delta": lambda: (fused.out_from_delta(outs[0], outs[1].sum(-1)),),
        "extents": lambda: [x for extent in fused.extents(outs) for x in extent],
        "quantize": lambda: (fused.quantize(outs[0], torch.tensor(8.0), torch.float8_e4m3fn).float(),),
        "rounded": lambda: (fused.rounded(outs[0], torch.tensor(8.0), torch.float8_e5m2),),
        "convolve": lambda: (fused.convolve(rows, rows[:0], places, weight, None),),
        "convolve_back": lambda: fused.convolve_back(rows, rows, after, weight),
    }
    assert tuple(calls) == OPERATIONS
    for name, call in calls.items():
        kernels.clear()
        both(call, kernels, name)


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
