"""Naive float64 attention between runs of positions, and the shared cases.

``ci/gpu/our_kernels.py`` checks the same on CUDA with longer sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from cp_kernels.visible import Runs, View
from oracle import attend, sees
from torch import Tensor

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def sides(n: int = 1) -> dict[str, tuple[Runs, Runs]]:
    """Positions of queries and keys; n scales the lengths."""
    steps = {
        "one shard": (((0, 80, 1),), ((0, 80, 1),)),
        "zigzag": (((20, 60, 1), (100, 140, 1)), ((0, 40, 1), (120, 160, 1))),
        "striped, strictly causal": (((1, 160, 2),), ((2, 160, 2),)),
        "staircase, coarse queries": (((3, 200, 4),), ((1, 200, 2),)),
        "staircase, coarse keys": (((0, 120, 1),), ((2, 200, 5),)),
        "gathered": (((0, 90, 6), (1, 90, 6)), ((2, 90, 4), (3, 90, 4))),
        "steps without a common divisor": (((1, 150, 2),), ((0, 150, 3), (150, 190, 7))),
    }

    def runs(bounds: tuple[tuple[int, int, int], ...]) -> Runs:
        return tuple(range(n * start if start >= 20 else start, n * stop, step) for start, stop, step in bounds)

    return {name: (runs(rows), runs(keys)) for name, (rows, keys) in steps.items()}


def views(n: int = 1) -> dict[str, View]:
    """Masks, for sides of that length."""
    return {
        "causal": View(right=0),
        "full": View(),
        "window": View(left=11 * n, right=0),
        "window on both sides": View(left=7 * n, right=20 * n),
        "documents": View(right=0, documents=(0, 33 * n, 34 * n, 90 * n, 200 * n)),
        "documents and window, both ways": View(left=9 * n, right=30 * n, documents=(0, 50 * n, 77 * n, 200 * n)),
    }


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def random(
        cls,
        rows: Runs,
        keys: Runs,
        sizes: tuple[int, int] = (16, 16),
        heads: tuple[int, int] = (2, 1),
        dtype: torch.dtype = torch.float32,
        batch: int = 1,
    ) -> Inputs:
        g = torch.Generator().manual_seed(0)
        s, t = (sum(map(len, runs)) for runs in (rows, keys))
        shapes = [(s, heads[0], sizes[0]), (t, heads[1], sizes[0]), (t, heads[1], sizes[1]), (s, heads[0], sizes[1])]
        return cls(*(torch.randn(n, batch, h, d, generator=g).to(dtype) for n, h, d in shapes))


class Answer(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def seen(rows: Runs, keys: Runs, view: View) -> Tensor:
    """Whether each query sees each key."""
    q, k = (torch.cat([torch.arange(r.start, r.stop, r.step) for r in runs]) for runs in (rows, keys))
    return sees(q, k, view.left, view.right, view.documents)


def answer(x: Inputs, rows: Runs, keys: Runs, view: View, scale: float, softcap: float | None = None) -> Answer:
    """Rows that see nothing have out 0 and lse -inf."""
    q, k, v = (y.double().requires_grad_() for y in x[:3])
    out, lse = attend(q, k, v, ~seen(rows, keys, view).to(q.device), scale, softcap=softcap)
    grads = torch.autograd.grad(out, (q, k, v), x.dout.double())
    return Answer(out.detach(), lse.detach(), *grads)


def errors(got: Answer, want: Answer) -> dict[str, float]:
    """Relative error (norm) of each tensor; infinite where finiteness differs."""
    relative = {}
    for name, a, b in zip(Answer._fields, got, want, strict=True):
        finite = b.isfinite()
        least = 0.3 * finite.sum() ** 0.5  # where a row sees few keys its gradient is what is left of larger numbers
        error = (a.double() - b)[finite].norm() / b[finite].norm().clamp(min=least)
        relative[name] = error.item() if torch.equal(a.isfinite(), finite) else torch.inf
    return relative
