"""How fast the kernels are that cost one pass over memory, against a copy of as many bytes on the device."""

from __future__ import annotations

import torch
from cases import lacking
from record import Step
from timing import medians
from torch import Tensor

WANTED = 0.8
"""Of a copy's bandwidth: the least, for merging and permuting."""
BLOCK = 64
"""Tokens that share an exponent."""


def one_pass(step: Step, tokens: int, rounds: int) -> None:
    """Tensors of so many tokens, 16 heads of 128, in bfloat16."""
    if reason := lacking("triton", step.device):
        step.not_run("bandwidth of our kernels", reason)
        return
    from cp_kernels import merge, payload, permute

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator(step.device).manual_seed(0), device=step.device)

    heads, size = (2, 16) if step.smoke else (16, 128)
    outs, lses = random(4, tokens, 1, heads, size).bfloat16(), random(4, tokens, 1, heads)
    x, total, total_lse = outs[0], random(tokens, 1, heads, size), lses[0].clone()
    order = torch.randperm(tokens, generator=generator).to(step.device)
    strided = torch.arange(tokens).view(-1, 4 if tokens % 4 == 0 else 1).t().reshape(-1).to(step.device)
    packed, exponents = payload.pack(x, BLOCK)
    one, rows = nbytes(x), nbytes(lses[0])
    calls = {
        "merge, 4 partials": (lambda: merge.merge(outs.unbind(), lses.unbind(), x.dtype), 5 * (one + rows), True),
        "merge, 2 partials": (
            lambda: merge.merge(outs[:2].unbind(), lses[:2].unbind(), x.dtype),
            3 * (one + rows),
            True,
        ),
        "merge_into": (lambda: merge.merge_into(total, total_lse, outs[1], lses[1]), 5 * one + 3 * rows, True),
        "gather_rows, of a gathered grid": (lambda: permute.gather_rows((x,), strided), 2 * one, True),
        "gather_rows, at random": (lambda: permute.gather_rows((x,), order), 2 * one, None),
        "scatter_rows, of a gathered grid": (lambda: permute.scatter_rows((x,), strided), 2 * one, True),
        "pack": (lambda: payload.pack(x, BLOCK), one + nbytes(packed) + nbytes(exponents), None),
        "unpack": (
            lambda: payload.unpack(packed, exponents, BLOCK, x.dtype),
            one + nbytes(packed) + nbytes(exponents),
            None,
        ),
    }
    target = torch.empty_like(outs)
    copy = {"copy": lambda: target.copy_(outs)}
    times = medians(copy | {name: call for name, (call, _, _) in calls.items()}, rounds)
    copied = 2 * nbytes(outs) / times["copy"] / 1e6
    for name, (_, moved, wanted) in calls.items():
        speed = moved / times[name] / 1e6
        detail = {"GB/s": speed, "copy GB/s": copied, "ms": times[name]}
        step.figure("bandwidth over a copy's", name, speed / copied, (">=", WANTED) if wanted else None, **detail)


def nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
