"""Our own kernels against their definitions: attention, merging, permuting, packing, decoding, short convolutions.

Attention has the cases of ``tests/kernels/test_attention_kernel.py``, on longer sequences. Compiling takes most of the
time, so every process has kernels of its own: those of head sizes and numbers, a dtype and a direction. They include
what later steps time, which then find it compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import brute
import torch
from cases import kernel, lacking
from record import Found, Row, Step, found_by, worst
from spread import check_each
from torch import Tensor

from cp_plugin.engine.core import payload
from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.dtypes import dtype_name
from cp_plugin.engine.inference import store
from cp_plugin.engine.kernels import fused as fused_operations

_CPU = torch.device("cpu")
MERGED = {torch.float32: 8 * 2**-21, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest relative error of a merged output: half a unit in the last place; in float32 the error of a log-sum-exp up to
16, which becomes a weight's, in up to 8 merges. Twice that in Triton's interpreter, which truncates."""


DECODED = 2e-2
"""Of decoding, whose weights are rounded to the cache's bfloat16."""
FUSED = "fused"
"""Stands for all kernels but attention's."""


class Part(NamedTuple):
    """Attention with these head sizes of keys and values, in one direction, with these sides and masks."""

    sizes: tuple[int, int]
    dtype: torch.dtype
    direction: str
    """``forward`` or ``backward``: different kernels."""
    sides: tuple[str, ...]
    views: tuple[str, ...]
    n: int = 8
    """Multiple of the tokens in the interpreter's tests."""
    heads: tuple[int, int] = (16, 4)
    """Of queries, and of keys. Triton compiles their multiples of 16 apart, and as many of both."""

    def __str__(self) -> str:
        (d, e), (h, g) = self.sizes, self.heads
        return f"{self.direction}, heads {h}:{g} of {d}/{e}, {dtype_name(self.dtype)}"


def main() -> None:
    with Step("our_kernels") as step:
        if reason := lacking("triton", step.device):
            step.not_run("our own kernels", reason)
            return
        check_each(step, run, parts(smoke=step.smoke), named)


def named(part: Part | str) -> tuple[str, str]:
    if isinstance(part, str):
        return part, "merging, permuting, packing, decoding"
    return "attention", f"the rest of {part}"


def parts(*, smoke: bool) -> list[Part | str]:
    """Each runs in a process of its own; the head sizes of today's models in bfloat16 come first."""
    both = "forward", "backward"
    if smoke:
        few = ("staircase, coarse queries",), ("causal",)
        return [FUSED, *(Part((16, 16), torch.float32, direction, *few, 1) for direction in both)]
    few, usual = ("zigzag", "staircase, coarse queries"), ("causal",)
    first = [Part((128, 128), torch.bfloat16, way, tuple(brute.sides()), tuple(brute.views())) for way in both]
    later = (64, 64), (192, 128), (256, 256), (96, 96), (40, 24)
    timed = (128, 128), (64, 64), (192, 128)
    mha = [Part(s, torch.bfloat16, way, few[1:], usual, heads=(16, 16)) for s, way in product(timed, both)]
    nccl = [Part((64, 64), torch.bfloat16, way, few, usual, heads=(8, 4)) for way in both]
    bf16 = [Part(sizes, torch.bfloat16, way, few, usual) for sizes, way in product(later, both)]
    f16 = [Part(sizes, torch.float16, way, few, usual) for sizes, way in product(((128, 128), *later), both)]
    f32 = [Part(sizes, torch.float32, way, few, usual) for sizes, way in product(((128, 128), (64, 64)), both)]
    return [*first, *bf16[:6], *nccl, FUSED, *mha, *bf16[6:], *f16, *f32]


def run(part: Part | str) -> Iterator[Row]:
    return fused() if isinstance(part, str) else attention(part)


def attention(part: Part) -> Iterator[Row]:
    """In one launch, and accumulating over two."""
    device = torch.device("cuda") if torch.cuda.is_available() else _CPU
    sides, views, scale = brute.sides(part.n), brute.views(part.n), part.sizes[0] ** -0.5
    whole, in_two = (forward, forward_in_two) if part.direction == "forward" else (backward, backward_in_two)
    for side, view in product(part.sides, part.views):
        x = brute.Inputs.random(*sides[side], sizes=part.sizes, heads=part.heads, dtype=part.dtype)
        x = brute.Inputs(*(y.to(device) for y in x))
        at = (*sides[side], views[view], scale)
        want = brute.answer(x, *at)
        for how, call in (("", whole), (", in two goes", in_two)):

            def near(call=call, x=x, at=at, want=want) -> Found:
                got = call(x, want, *at)
                errors = brute.errors(want._replace(**got), want)
                return worst({name: errors[name] for name in got}, dict.fromkeys(got, brute.LIMITS[part.dtype]))

            ok, detail = found_by(near)
            yield "attention", f"{side}, {view}{how}: {part}", ok, {"of": (kernel("triton", *part.sizes),)} | detail


Answers = dict[str, Tensor]
"""Some of the fields of ``brute.Answer``."""


def forward(
    x: brute.Inputs, _: brute.Answer, rows: brute.Runs, keys: brute.Runs, view: brute.View, scale: float
) -> Answers:
    """One launch."""
    from cp_kernels.forward import forward

    out, lse = forward(x.q, x.k, x.v, rows, keys, view, scale)
    return {"out": out, "lse": lse}


def forward_in_two(
    x: brute.Inputs, _: brute.Answer, rows: brute.Runs, keys: brute.Runs, view: brute.View, scale: float
) -> Answers:
    """The first half of the keys, then the second onto it."""
    from cp_kernels.forward import forward

    (first, k0, v0), (second, k1, v1) = halves(x, keys)
    out, lse = forward(x.q, k0, v0, rows, first, view, scale)
    out, lse = forward(x.q, k1, v1, rows, second, view, scale, (out.float(), lse.contiguous()))
    return {"out": out, "lse": lse}


def backward(
    x: brute.Inputs, want: brute.Answer, rows: brute.Runs, keys: brute.Runs, view: brute.View, scale: float
) -> Answers:
    """One launch of each kernel, from the exact forward."""
    from cp_kernels.backward import backward

    lse, delta = want.lse.float().contiguous(), (x.dout.double() * want.out).sum(-1).float()
    return dict(zip(("dq", "dk", "dv"), backward(x.dout, *x[:3], lse, delta, rows, keys, view, scale), strict=True))


def backward_in_two(
    x: brute.Inputs, want: brute.Answer, rows: brute.Runs, keys: brute.Runs, view: brute.View, scale: float
) -> Answers:
    """The two halves of the keys, whose gradients of the queries add up."""
    parts = [backward(x._replace(k=k, v=v), want, rows, half, view, scale) for half, k, v in halves(x, keys)]
    both = {name: [part[name] for part in parts] for name in ("dq", "dk", "dv")}
    return {"dq": sum(y.float() for y in both["dq"]), "dk": torch.cat(both["dk"]), "dv": torch.cat(both["dv"])}


def halves(x: brute.Inputs, keys: brute.Runs) -> list[tuple[brute.Runs, Tensor, Tensor]]:
    """The first and the second half of the keys: positions, keys, values."""
    count = left = sum(map(len, keys)) // 2
    first, second = [], []
    for run in keys:
        here = max(0, min(left, len(run)))
        first, second, left = [*first, run[:here]], [*second, run[here:]], left - len(run)
    runs = (tuple(run for run in half if run) for half in (first, second))
    return list(zip(runs, (x.k[:count], x.k[count:]), (x.v[:count], x.v[count:]), strict=True))


def fused() -> Iterator[Row]:
    """Merging, decoding, permuting, packing, short convolutions."""
    device, s, e = (torch.device("cuda"), 1000, 128) if torch.cuda.is_available() else (_CPU, 12, 16)
    calls = [*merging(device, s, e), *decoding(device, s, e), *moving(device, s, e), *convolutions(device, s, 4 * e)]
    for name, call in calls:
        ok, detail = found_by(call)
        yield FUSED, name, ok, {"of": (f"kernel {name.split(',')[0]}",)} | detail


Named = Iterator[tuple[str, Callable[[], Found]]]
"""Comparisons of a kernel with its definition; a name begins with that of the kernel."""


def random(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def merging(device: torch.device, s: int, e: int) -> Named:
    from cp_kernels import merge

    for n, dtype in product((2, 3, 8) if s > 100 else (3,), (torch.bfloat16, torch.float16, torch.float32)):
        outs, lses = random(device, n, s, 2, 4, e, dtype=dtype), 5 * random(device, n, s, 2, 4)
        lses[0, : s // 2] = lses[:, s // 3] = -torch.inf
        want = in_plain_torch("merge", outs.double().unbind(), lses.double().unbind())

        def into(outs: Tensor = outs, lses: Tensor = lses) -> tuple[Tensor, Tensor]:
            total = torch.zeros(2 * s, *outs.shape[2:], device=device)[::2], lses[0].clone()
            total[0].copy_(outs[0])
            for out, lse in zip(outs[1:], lses[1:], strict=True):
                merge.merge_into(*total, out, lse)
            return total

        def once(x: Tensor = outs, y: Tensor = lses) -> tuple[Tensor, Tensor]:
            return merge.merge(x.unbind(), y.unbind(), x.dtype)

        for name, call in (("merge", once), ("merge_into", into)):
            yield f"{name}, {n} of {dtype_name(dtype)}", lambda call=call, want=want: close(call(), want)


def decoding(device: torch.device, s: int, e: int) -> Named:
    """One query's attention to a cache in each of its formats, beside the same in plain torch."""
    from cp_kernels import decode as kernels

    for fp8, stored in ((False, "in bfloat16"), (True, "in one byte an element")):
        q, k, v = (random(device, n, 2, h, e, dtype=torch.bfloat16) for n, h in ((1, 8), (s, 2), (s, 2)))
        kept = store.Cache(s, e, k[:1], v[:1], fp8=fp8)
        kept.put(slice(s), k, v)
        held = torch.arange(s, dtype=torch.int32, device=device)[:, None].expand(s, 2).contiguous()
        last = torch.full((1, 2), s, dtype=torch.int32, device=device)

        def near(q: Tensor = q, kept: store.Cache = kept, held: Tensor = held, last: Tensor = last) -> Found:
            got = kernels.merge_parts(*kernels.decode(q, *kept.kept(s), e, held, last, e**-0.5, -1))
            with patch.object(fused_operations, "_kernels", lambda x: False):
                want = store.attend(q.double(), kept, held, last, Scores(e**-0.5))
            errors = {
                name: ((a - b).norm() / b.norm()).item() for name, a, b in zip(("out", "lse"), got, want, strict=True)
            }
            return worst(errors, {"out": DECODED, "lse": 1e-5})

        yield f"decode, {stored}", near


def moving(device: torch.device, s: int, e: int) -> Named:
    """Permuting and packing, bit for bit."""
    order = torch.randperm(s, generator=torch.Generator().manual_seed(0)).to(device)
    calls: list[tuple[str, str, tuple[Any, ...]]] = []
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        x = random(device, s, 2, 4, e)
        x = x.view(dtype) if dtype == torch.uint8 else (100 * x).to(dtype)
        calls += [(name, dtype_name(dtype), ((x,), order)) for name in ("gather_rows", "scatter_rows")]
    for dtype, block in product((torch.bfloat16, torch.float16), (4, 64)):
        kind = f"blocks of {block}, {dtype_name(dtype)}"
        scales = torch.exp2(40 * random(device, s, 2, 4, 1)).to(dtype).clamp(2**-12, 2**12)
        x = random(device, s, 2, 4, e, dtype=dtype) * scales
        calls += [("pack", kind, (x, block)), ("unpack", kind, (*payload.pack(x, block), block, dtype))]
        tensors = [(random(device, s, 2, n, e) * torch.exp2(4 * random(device, s, 2, n, 1))).to(dtype) for n in (4, 1)]
        rows = [(s // 2, 0, 3, s - s // 2 - 3)] * 2  # to ranks that see many rows, none and few
        like = [tuple(x.shape[1:]) for x in tensors], [dtype] * 2, rows, block
        calls.append(("pack_message", kind, (tensors, rows, block)))
        calls.append(("unpack_message", kind, (payload.pack_message(tensors, rows, block), *like)))
    for name, kind, given in calls:
        yield f"{name}, {kind}", partial(same, name, given)


def in_plain_torch(name: str, *given: Any) -> Any:
    """The definition of a kernel."""
    with patch.object(fused_operations, "_kernels", lambda x: False):
        return getattr(fused_operations, name)(*given)


def convolutions(device: torch.device, s: int, c: int) -> Named:
    """A short convolution of s tokens with the three before them, and its gradients, against plain torch in float64."""
    from cp_kernels import convolution

    rows = torch.cat((torch.arange(s, s + 3), torch.arange(s)))  # the tokens before are the halo
    before = torch.stack([rows[3 - i : 3 - i + s] for i in range(4)])
    after = torch.full((4, s + 3), -1).scatter_(1, before, torch.arange(s).expand(4, -1)).int()

    def results(kernel: ModuleType, x: Tensor, halo: Tensor, dout: Tensor, w: Tensor, bias: Tensor) -> list[Tensor]:
        places, of_x, of_halo = (t.to(x.device) for t in (before.int(), after[:, :s].clone(), after[:, s:].clone()))
        backward = kernel.convolve_back(dout, x, of_x, w), kernel.convolve_back(dout, halo, of_halo, w)
        return [kernel.convolve(x, halo, places, w, bias), *(y for pair in backward for y in pair)]

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        given = [random(device, *shape, dtype=dtype) for shape in ((s, 2, c), (3, 2, c), (s, 2, c), (c, 4), (c,))]

        def near(given: list[Tensor] = given) -> Found:
            got, want = results(convolution, *given), results(fused_operations, *(y.double().cpu() for y in given))
            names, limit = ("out", "dx", "sums", "dhalo", "sums of the halo"), 1 if given[0].is_cuda else 2
            pairs = dict(zip(names, zip(got, want, strict=True), strict=True))
            errors = {name: ((a.double().cpu() - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}
            return worst(errors, {name: limit * MERGED[a.dtype] for name, (a, _) in pairs.items()})

        yield f"short convolution, {dtype_name(dtype)}", near


def close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> Found:
    """Compare out and lse."""
    there = want[1].isfinite()
    lse = (got[1].double() - want[1])[there].abs().max().item()
    out = ((got[0].double() - want[0]).norm() / want[0].norm()).item()
    limits = {"out": MERGED[got[0].dtype] * (1 if got[0].is_cuda else 2), "lse": 1e-5}
    errors = {"out": out, "lse": lse if torch.equal(got[1].isfinite(), there) else torch.inf}
    return worst({name: error if error == error else torch.inf for name, error in errors.items()}, limits)


def same(name: str, given: tuple[Any, ...]) -> Found:
    """Compare a kernel with its definition bit for bit."""
    module = import_module(f"cp_kernels.{'permute' if 'rows' in name else 'payload'}")
    found = getattr(module, name)(*given), in_plain_torch(name, *given)
    got, want = ((one,) if isinstance(one, Tensor) else one for one in found)
    differ = sum(
        (a.view(torch.uint8) != b.contiguous().view(torch.uint8)).sum().item() for a, b in zip(got, want, strict=True)
    )
    return differ == 0, {"bytes that differ": differ}


if __name__ == "__main__":
    main()
