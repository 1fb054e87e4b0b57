"""How fast the kernels are that cost one pass over memory, against a copy of as many bytes on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from cases import lacking
from record import Step
from timing import Call, medians
from torch import Tensor

WANTED = 0.8
"""Of a copy's bandwidth: the least, for merging and permuting."""
BLOCK = 64
"""Tokens that share an exponent."""


class Pass(NamedTuple):
    """A call that costs its memory."""

    call: Call
    moved: int
    """Bytes that are read and written, at least."""
    wanted: float | None = WANTED
    """Of a copy's bandwidth: the least; None: whatever it is."""


def against_a_copy(step: Step, group: str, passes: Mapping[str, Pass], source: Tensor, rounds: int) -> None:
    """The bandwidth of each over that of copying ``source`` on the device."""
    target = torch.empty_like(source)
    times = medians({"copy": lambda: target.copy_(source)} | {name: one.call for name, one in passes.items()}, rounds)
    copied = 2 * source.nbytes / times["copy"] / 1e6
    for name, one in passes.items():
        speed = one.moved / times[name] / 1e6
        detail = {"GB/s": speed, "copy GB/s": copied, "ms": times[name]}
        step.figure(group, name, speed / copied, (">=", one.wanted) if one.wanted else None, **detail)


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
    one, rows = x.nbytes, lses[0].nbytes
    both = one + packed.nbytes + exponents.nbytes
    passes = {
        "merge, 4 partials": Pass(lambda: merge.merge(outs.unbind(), lses.unbind(), x.dtype), 5 * (one + rows)),
        "merge, 2 partials": Pass(lambda: merge.merge(outs[:2].unbind(), lses[:2].unbind(), x.dtype), 3 * (one + rows)),
        "merge_into": Pass(lambda: merge.merge_into(total, total_lse, outs[1], lses[1]), 5 * one + 3 * rows),
        "gather_rows, of a gathered grid": Pass(lambda: permute.gather_rows((x,), strided), 2 * one),
        "gather_rows, at random": Pass(lambda: permute.gather_rows((x,), order), 2 * one, None),
        "scatter_rows, of a gathered grid": Pass(lambda: permute.scatter_rows((x,), strided), 2 * one),
        "pack": Pass(lambda: payload.pack(x, BLOCK), both, None),
        "unpack": Pass(lambda: payload.unpack(packed, exponents, BLOCK, x.dtype), both, None),
    }
    against_a_copy(step, "bandwidth over a copy's", passes, outs, rounds)
