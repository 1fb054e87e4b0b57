"""Our own kernels against their definitions: attention, merging, permuting, packing.

Attention has the cases of ``tests/kernels/test_attention_kernel.py``, on longer sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from cases import lacking
from record import Found, Row, Step, found_by, worst
from spread import check_each
from torch import Tensor

from cp_plugin.core import payload
from cp_plugin.core.dtypes import dtype_name

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/kernels"))
import brute

_CPU = torch.device("cpu")
MERGED = {torch.float32: 8 * 2**-21, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest relative error of a merged output: half a unit in the last place; in float32 the error of a log-sum-exp up to
16, which becomes a weight's, in up to 8 merges. Twice that in Triton's interpreter, which truncates."""


class Heads(NamedTuple):
    """Head sizes of keys and values, dtype, sides and masks."""

    sizes: tuple[int, int]
    dtype: torch.dtype
    sides: tuple[str, ...]
    views: tuple[str, ...]
    n: int
    """Multiple of the tokens in the interpreter's tests."""


def main() -> None:
    with Step("our_kernels") as step:
        if reason := lacking("triton", step.device):
            step.not_run("our own kernels", reason)
            return
        check_each(step, run, [None, *groups(smoke=step.smoke)], named)


def named(part: Heads | None) -> tuple[str, str]:
    if part is None:
        return "fused", "merging, permuting, packing"
    return "attention", f"head sizes {part.sizes}, {part.dtype}"


def groups(*, smoke: bool) -> list[Heads]:
    """Each runs in a process of its own."""
    if smoke:
        return [Heads((16, 16), torch.float32, ("staircase, coarse queries",), ("causal",), 1)]
    every, few = (tuple(brute.sides()), tuple(brute.views())), (("zigzag", "staircase, coarse queries"), ("causal",))
    half = torch.bfloat16, torch.float16
    sizes = (128, 128), (64, 64), (192, 128), (256, 256), (96, 96), (40, 24)
    found = [Heads((128, 128), torch.bfloat16, (side,), every[1], 8) for side in every[0]]
    found += [Heads(size, dtype, *few, 8) for size, dtype in product(sizes, half)]
    return [*found, *(Heads(size, torch.float32, *few, 8) for size in sizes[:2])]


def run(part: Heads | None) -> list[Row]:
    """Attention with these heads; None: the memory-bound kernels."""
    return fused() if part is None else attention(part)


def attention(heads: Heads) -> list[Row]:
    """Forward and backward, in one launch and accumulating over two."""
    device = torch.device("cuda") if torch.cuda.is_available() else _CPU
    sides, views, rows = brute.sides(heads.n), brute.views(heads.n), []
    scale = heads.sizes[0] ** -0.5
    for side, view in product(heads.sides, heads.views):
        x = brute.Inputs.random(*sides[side], sizes=heads.sizes, heads=(4, 2), dtype=heads.dtype)
        x = brute.Inputs(*(y.to(device) for y in x))
        want = brute.answer(x, *sides[side], views[view], scale)
        for how, run in (("", whole), (", in two goes", in_two)):
            name = f"{side}, {view}{how}: head sizes {heads.sizes}, {str(heads.dtype).removeprefix('torch.')}"

            def near(run=run, x=x, at=(*sides[side], views[view], scale), want=want) -> Found:
                errors = brute.errors(run(x, *at), want)
                return worst(errors, dict.fromkeys(errors, brute.LIMITS[heads.dtype]))

            rows.append(("attention", name, *found_by(near)))
    return rows


def whole(x: brute.Inputs, rows: brute.Runs, keys: brute.Runs, view: brute.View, scale: float) -> brute.Answer:
    """One launch each way."""
    from cp_kernels.backward import backward
    from cp_kernels.forward import forward

    out, lse = forward(x.q, x.k, x.v, rows, keys, view, scale)
    delta = (x.dout.float() * out.float()).sum(-1)
    return brute.Answer(out, lse, *backward(x.dout, x.q, x.k, x.v, lse, delta, rows, keys, view, scale))


def in_two(x: brute.Inputs, rows: brute.Runs, keys: brute.Runs, view: brute.View, scale: float) -> brute.Answer:
    """The first half of the keys, then the second onto it."""
    from cp_kernels.backward import backward
    from cp_kernels.forward import forward

    count = sum(map(len, keys)) // 2
    (k0, k1), (v0, v1) = (x.k[:count], x.k[count:]), (x.v[:count], x.v[count:])
    first, second = halves(keys, count)
    out, lse = forward(x.q, k0, v0, rows, first, view, scale)
    out, lse = forward(x.q, k1, v1, rows, second, view, scale, (out.float(), lse.contiguous()))
    delta = (x.dout.float() * out).sum(-1)
    one = backward(x.dout, x.q, k0, v0, lse, delta, rows, first, view, scale)
    two = backward(x.dout, x.q, k1, v1, lse, delta, rows, second, view, scale)
    keys_of = (torch.cat(pair) for pair in zip(one[1:], two[1:], strict=True))
    return brute.Answer(out, lse, one[0].float() + two[0].float(), *keys_of)


def halves(keys: brute.Runs, count: int) -> tuple[brute.Runs, brute.Runs]:
    """The first ``count`` positions, and the rest."""
    first, second = [], []
    for run in keys:
        here = max(0, min(count, len(run)))
        first, second, count = [*first, run[:here]], [*second, run[here:]], count - len(run)
    return tuple(run for run in first if run), tuple(run for run in second if run)


def fused() -> list[Row]:
    """Merging, permuting and packing."""
    calls = one_pass(torch.device("cuda"), 1000, 128) if torch.cuda.is_available() else one_pass(_CPU, 12, 16)
    return [("fused", name, *found_by(call)) for name, call in calls]


def one_pass(device: torch.device, s: int, e: int) -> Iterator[tuple[str, Callable[[], Found]]]:
    """Named comparisons of a kernel with its definition."""
    from cp_kernels import merge, permute
    from cp_kernels import payload as packing

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    for n, dtype in product((2, 3, 8) if s > 100 else (3,), (torch.bfloat16, torch.float16, torch.float32)):
        outs, lses = random(n, s, 2, 4, e, dtype=dtype), 5 * random(n, s, 2, 4)
        lses[0, : s // 2] = lses[:, s // 3] = -torch.inf
        want = torch.logsumexp(lses.double(), 0)
        weights = torch.where(lses == -torch.inf, 0.0, torch.exp(lses.double() - want)).unsqueeze(-1)
        whole = (weights * outs.double()).sum(0)

        def into(outs: Tensor = outs, lses: Tensor = lses) -> tuple[Tensor, Tensor]:
            total = torch.zeros(2 * s, *outs.shape[2:], device=device)[::2], lses[0].clone()
            total[0].copy_(outs[0])
            for out, lse in zip(outs[1:], lses[1:], strict=True):
                merge.merge_into(*total, out, lse)
            return total

        kind = f"{n} of {str(dtype).removeprefix('torch.')}"
        yield (
            f"merge, {kind}",
            lambda x=outs, y=lses, z=(whole, want): close(merge.merge(x.unbind(), y.unbind(), x.dtype), z),
        )
        yield f"merge_into, {kind}", lambda call=into, z=(whole, want): close(call(), z)
    order = torch.randperm(s, generator=generator).to(device)
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        x = (100 * random(s, 2, 4, e)).to(dtype) if dtype != torch.uint8 else random(s, 2, 4, e).view(dtype)
        kind = dtype_name(dtype)
        yield f"gather_rows, {kind}", lambda x=x: same(permute.gather_rows((x,), order), (x[order],))
        yield f"scatter_rows, {kind}", lambda x=x: same(permute.scatter_rows((x[order],), order), (x,))
    for dtype, block in product((torch.bfloat16, torch.float16), (4, 64)):
        x = random(s, 2, 4, e, dtype=dtype) * torch.exp2(40 * random(s, 2, 4, 1)).to(dtype).clamp(2**-12, 2**12)
        kind = f"blocks of {block}, {str(dtype).removeprefix('torch.')}"
        yield f"pack, {kind}", lambda x=x, b=block: same(packing.pack(x, b), payload.pack(x, b))
        yield (
            f"unpack, {kind}",
            lambda x=x, b=block: same(
                (packing.unpack(*payload.pack(x, b), b, x.dtype),), (payload.unpack(*payload.pack(x, b), b, x.dtype),)
            ),
        )


def close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> Found:
    """Compare out and lse."""
    there = want[1].isfinite()
    lse = (got[1].double() - want[1])[there].abs().max().item()
    out = ((got[0].double() - want[0]).norm() / want[0].norm()).item()
    limits = {"out": MERGED[got[0].dtype] * (1 if got[0].is_cuda else 2), "lse": 1e-5}
    errors = {"out": out, "lse": lse if torch.equal(got[1].isfinite(), there) else torch.inf}
    return worst({name: error if error == error else torch.inf for name, error in errors.items()}, limits)


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> Found:
    """Compare bit for bit."""
    differ = sum(
        (a.view(torch.uint8) != b.contiguous().view(torch.uint8)).sum().item() for a, b in zip(got, want, strict=True)
    )
    return differ == 0, {"bytes that differ": differ}


if __name__ == "__main__":
    main()
