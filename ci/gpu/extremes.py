"""Beyond the tests on a CPU: our kernels under load, more than 2^31 elements, and non-finite numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import brute
import torch
from cases import kernel, normal, possible
from oracle import relative_error
from record import Step, Verdict, worst
from torch import Tensor

from cp_plugin import ContextParallel, KeyValues, Queries
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.core.block import Scores

REPEATS = 100_000
"""Merges in place per head size: a race between two warps on a row is rare."""
RACE_S = 8.0
"""But no more than take this time."""
MANY = 2**31
"""More elements than an int32 can index."""
FEW_ROWS = 64
BLOCK = 64


def extremes(step: Step) -> None:
    def attempt(group: str, name: str, call: Callable[[], Verdict], part: str) -> None:
        step.attempt(group, name, call, (part,))
        if step.device.type == "cuda":
            torch.cuda.empty_cache()

    reason = possible(step.device)["triton"]
    if reason:
        step.not_run("our own kernels many at a time, and on more than 2^31 elements", reason)
    else:
        for size in (16,) if step.smoke else (128, 64, 256, 96):
            name = f"merge_into against merge, heads of {size}"
            attempt("repeated under load", name, partial(race, step, size), "kernel merge_into")
    for backend, why in possible(step.device).items():
        if why:
            step.not_run(f"scores of -inf with backend {backend}", why)
        elif backend not in ("float8", "te_fp8"):
            for name, call in (("scores of -inf", no_score), ("a query of NaN", one_nan)):
                attempt(
                    "non-finite numbers", f"{name}, {backend}", partial(call, backend, step), kernel(backend, 64, 64)
                )
    if not reason:
        attempt("non-finite numbers", "merge of NaN", partial(merged_nan, step.device), "kernel merge")
        for name, call, part in large(step.device, 2**12 if step.smoke else MANY):
            attempt("more than 2^31 elements", name, call, part)


def race(step: Step, e: int) -> Verdict:
    """Repeated merges in place, beside matrix products on another stream, must equal ``merge`` each time."""
    from cp_kernels import merge

    s, n, repeats = (8, 64, 3) if step.smoke else (512, 4096, REPEATS)
    outs, lses = normal(step.device, 2, s, 1, 4, e), normal(step.device, 2, s, 1, 4)
    want = merge.merge(outs.unbind(), lses.unbind())
    out, lse, differ = outs[0].clone(), lses[0].clone(), torch.zeros((), dtype=torch.int64, device=step.device)
    load, beside = normal(step.device, n, n).bfloat16(), None if step.smoke else torch.cuda.Stream()
    done, end = 0, time.monotonic() + min(RACE_S, step.left)
    while done < repeats and time.monotonic() < end:
        if beside is not None and done % 10 == 0:
            with torch.cuda.stream(beside):
                load @ load
        out.copy_(outs[0])
        lse.copy_(lses[0])
        merge.merge_into(out, lse, outs[1], lses[1])
        differ += ((out != want[0]).any(-1) | (lse != want[1])).any()
        done += 1
    return differ.item() == 0, {"repeats": done, "that differ": int(differ.item())}


def large(device: torch.device, many: int) -> Iterator[tuple[str, Callable[[], Verdict], str]]:
    """Each kernel on tensors of that many elements and a few rows more: its first and last rows equal, bit for bit, its
    result for these rows alone; windowed attention is close to its definition."""
    from cp_kernels import merge, payload, permute

    torch.manual_seed(0)
    h, e = (16, 128) if many == MANY else (2, 16)
    s = many // (h * e) + FEW_ROWS
    ends = (slice(0, FEW_ROWS // 2), slice(s - FEW_ROWS - 8, s))

    def alike(got: tuple[Tensor, ...], compute: Callable[[slice], tuple[Tensor, ...]]) -> Verdict:
        pairs = [pair for rows in ends for pair in zip([x[rows] for x in got], compute(rows), strict=True)]
        differ = sum(int((a != b).sum()) for a, b in pairs)
        return differ == 0, {"elements": max(x.numel() for x in got), "that differ": differ}

    def half(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()

    def merging() -> Verdict:
        outs, lses = half(2, s, 1, h, e), normal(device, 2, s, 1, h)
        got = merge.merge(outs.unbind(), lses.unbind(), outs.dtype)
        return alike(got, lambda rows: merge.merge(outs[:, rows].unbind(), lses[:, rows].unbind(), outs.dtype))

    def merging_into() -> Verdict:
        out, lse = torch.empty((s, 1, h, e), device=device).normal_(), normal(device, s, 1, h)
        part, part_lse = half(s, 1, h, e), normal(device, s, 1, h)
        before = [(out[rows].clone(), lse[rows].clone()) for rows in ends]
        merge.merge_into(out, lse, part, part_lse)

        def merge_rows(rows: slice) -> tuple[Tensor, ...]:
            again = before[ends.index(rows)]
            merge.merge_into(*again, part[rows], part_lse[rows])
            return again

        return alike((out, lse), merge_rows)

    def reversing(kernel: Callable[..., tuple[Tensor, ...]]) -> Verdict:
        x, order = half(s, 1, h, e), torch.arange(s - 1, -1, -1, device=device)
        return alike(kernel((x,), order), lambda rows: (x[order[rows]],))

    def packing() -> Verdict:
        n = s // BLOCK * BLOCK  # blocks of rows share an exponent
        x = half(n, 1, h, e)
        packed, exponents = payload.pack(x, BLOCK)
        back = payload.unpack(packed, exponents, BLOCK, x.dtype)
        tail = payload.unpack(*payload.pack(x[n - BLOCK :], BLOCK), BLOCK, x.dtype)
        differ = int((back[n - BLOCK :] != tail).sum())
        return differ == 0, {"elements": x.numel(), "that differ": differ}

    ours = kernel("triton", e, e)
    yield "attention, forward", lambda: attention(device, s, h, e, backward=False), ours
    yield "attention, backward", lambda: attention(device, s, h, e, backward=True), ours
    yield "merge", merging, "kernel merge"
    yield "merge_into", merging_into, "kernel merge_into"
    yield "gather_rows", lambda: reversing(permute.gather_rows), "kernel gather_rows"
    yield "scatter_rows", lambda: reversing(permute.scatter_rows), "kernel scatter_rows"
    yield "pack and unpack", packing, "kernel pack"


def attention(device: torch.device, s: int, h: int, e: int, *, backward: bool) -> Verdict:
    """Check the last queries: with a window the work is small, and they depend on few keys."""
    from cp_kernels import backward as gradients
    from cp_kernels.forward import forward

    view, rows, scale = brute.View(left=FEW_ROWS - 1, right=0), (range(s),), e**-0.5
    q, k, v, dout = (torch.empty((s, 1, h, e), dtype=torch.bfloat16, device=device).normal_() for _ in range(4))
    out, lse = forward(q, k, v, rows, rows, view, scale)
    last = (range(s - 3 * FEW_ROWS, s),)
    few = brute.Inputs(*(x[last[0].start :] for x in (q, k, v, dout)))
    want = brute.answer(few, last, last, view, scale)
    got = {"out": out, "lse": lse}
    if backward:
        delta = (dout.float() * out.float()).sum(-1)
        grads = gradients.backward(dout, q, k, v, lse, delta, rows, rows, view, scale)
        got = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    # the first third of the rows sees keys before them, or is seen by queries outside
    errors = {name: relative_error(x[-2 * FEW_ROWS :], getattr(want, name)[-2 * FEW_ROWS :]) for name, x in got.items()}
    return worst(errors, dict.fromkeys(errors, brute.LIMITS[torch.bfloat16]))


def no_score(backend: str, step: Step) -> Verdict:
    """Keys with scores of -inf count as absent, on one rank and on two."""
    s, half = (32, 16) if step.smoke else (512, 256)
    q, k, v = (normal(step.device, s, 1, 2, 64).bfloat16() for _ in range(3))
    q[..., 0] = 1.0
    k[half:, ..., 0] = -torch.inf
    scores = torch.einsum("qbhd,kbhd->bhqk", q.double(), k[:half].double()) * 64**-0.5
    want = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), v[:half].double())
    got = attended(backend, q, k, v)
    errors = {f"{n} ranks": relative_error(out, want) for n, out in got.items()}
    return worst(errors, dict.fromkeys(errors, brute.LIMITS[torch.bfloat16]))


def one_nan(backend: str, step: Step) -> Verdict:
    """A query of NaN has an output of NaN; the other outputs do not change."""
    s, row = (32, 5) if step.smoke else (512, 100)
    q, k, v = (normal(step.device, s, 1, 2, 64).bfloat16() for _ in range(3))
    clean, q = attended(backend, q, k, v), q.clone()
    q[row] = torch.nan
    others, wrong = torch.arange(s, device=step.device) != row, []
    for n, out in attended(backend, q, k, v).items():
        if not out[row].isnan().all():
            wrong.append(f"on {n} ranks NaN is lost")
        if not torch.equal(out[others], clean[n][others]):
            wrong.append(f"on {n} ranks other queries changed")
    return not wrong, {"failure": "; ".join(wrong)} if wrong else {}


def attended(backend: str, q: Tensor, k: Tensor, v: Tensor) -> dict[int, Tensor]:
    """Number of rank threads -> full attention of a ring."""

    def rank(mesh: Mesh) -> Tensor:
        cp = ContextParallel("ring", mesh=mesh, layout="contiguous", backend=backend)
        x = [cp.shard(y) for y in (q, k, v)]
        method = cp.method(cp.problem(*x, causal=False), q.device, Scores(q.size(3) ** -0.5))
        result = method.forward(Queries(x[0]), KeyValues(*x[1:]))
        assert result is not None, "full attention sees keys"
        return cp.unshard(result.out.to(q.dtype))

    return {n: run_threads(rank, {"cp": n}, patience=100)[0] for n in (1, 2)}


def merged_nan(device: torch.device) -> Verdict:
    """NaN is kept, and stays in its row."""
    from cp_kernels import merge

    outs, lses = normal(device, 2, 32, 1, 2, 16), normal(device, 2, 32, 1, 2)
    clean = merge.merge(outs.unbind(), lses.unbind())
    lses[1, 7] = torch.nan
    out, lse = merge.merge(outs.unbind(), lses.unbind())
    others = torch.arange(32, device=device) != 7
    kept = torch.equal(out[others], clean[0][others]) and torch.equal(lse[others], clean[1][others])
    seen = bool(out[7].isnan().all() and lse[7].isnan().all())
    return kept and seen, {} if kept and seen else {"failure": f"other rows kept: {kept}; NaN seen: {seen}"}
