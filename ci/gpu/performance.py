"""Speed, as ratios of times taken in turn. Nothing here fails the check.

attention kernels    ours against the libraries' (``kernel_speed``)
memory-bound kernels their bandwidth over that of a device copy: merging, permuting, packing; decode's attention
methods              one big call of torch's flash attention over all ranks of a method together, as threads of one
                     device whose messages are copies: 1 would mean that tiles, merges and moves are free
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import NamedTuple
from unittest.mock import patch

import torch
from cases import attend, lacking, of_timed
from kernel_speed import Size, kernels, random, whole_tiles
from record import Call, Step, in_a_line, medians
from torch import Tensor

from cp_plugin import ContextParallel, Options
from cp_plugin.engine.attention.calls import Inputs, Setup, settled
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.inference import store
from cp_plugin.engine.inference.store import Cache as Kept
from cp_plugin.engine.kernels import fused
from cp_plugin.engine.methods import registry as providers

BANDWIDTH = 0.8
"""Target for merging and permuting, over a copy."""
BLOCK = 64
"""Tokens that share an exponent."""
METHODS = (
    ("ring", "zigzag", 0.90),
    ("striped", "striped", 0.83),
    ("attention2d", "zigzag", 0.92),
    ("burst", "zigzag", None),
    ("ulysses", "contiguous", None),
    ("usp", "zigzag", None),
    ("all_gather", "zigzag", None),
)
"""Provider, layout, and target with ``--cp-backend auto``: what ring-flash-attention publishes for rings, and more for
attention2d."""


def main() -> None:
    with Step("performance") as step:
        if step.smoke:
            first, later, long = Size(64, 2, 16, 1, 16), [Size(64, 2, 32, 1, 16)], []
        else:
            first, later, long = Size(16384), [Size(16384, 16, 64, 5, 64), Size(16384, 16, 192)], [Size(65536)]
        parts: dict[str, Call] = kernels(step, first, later)
        parts["bandwidth of our kernels"] = partial(memory_bound, step)
        parts["bandwidth of decode"] = partial(decode, step)
        for size in long:
            parts[f"speed of attention, {size}"] = partial(whole_tiles, step, size)
        for backend in ("sdpa", "triton", "auto"):  # a library of auto may build plans for every rank and shape
            for size in (first, *long):
                call = partial(methods, step, size, 2 if step.smoke else 8, backend)
                parts[f"efficiency of methods with backend {backend}, {size}"] = call
        for name, part in parts.items():
            step.measure(name, part)
            if step.device.type == "cuda":
                torch.cuda.empty_cache()


class Pass(NamedTuple):
    """A call limited by memory."""

    call: Call
    moved: int
    """Least number of bytes read and written."""
    wanted: float | None = BANDWIDTH
    """Target over a copy's bandwidth, if any."""


def against_a_copy(step: Step, group: str, passes: Mapping[str, Pass], source: Tensor, kernel: str = "") -> None:
    """The bandwidth of each call over that of copying ``source`` on the device.

    Args:
        kernel: which all of them use; otherwise the names begin with those of their kernels.
    """
    target = torch.empty_like(source)
    calls = {"copy": lambda: target.copy_(source)} | {name: one.call for name, one in passes.items()}
    times = medians(calls, 1 if step.smoke else 10)
    copied = 2 * source.nbytes / times["copy"] / 1e6
    for name, one in passes.items():
        bandwidth = one.moved / times[name] / 1e6
        wanted = None if one.wanted is None else (">=", one.wanted)
        of = (f"kernel {kernel or name.split(',')[0]}",)
        detail = {"ms": times[name], "GB/s": bandwidth, "copy GB/s": copied}
        step.figure(group, name, bandwidth / copied, wanted, of, **detail)


def memory_bound(step: Step) -> None:
    """Merging, permuting and packing."""
    if reason := lacking("triton", step.device):
        step.not_run("bandwidth of our kernels", reason)
        return
    from cp_kernels import merge, payload, permute

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator(step.device).manual_seed(0), device=step.device)

    tokens, heads, size = (64, 2, 16) if step.smoke else (65536, 16, 128)
    outs, lses = random(4, tokens, 1, heads, size).bfloat16(), random(4, tokens, 1, heads)
    x, total, total_lse = outs[0], random(tokens, 1, heads, size), lses[0].clone()
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)).to(step.device)
    strided = torch.arange(tokens).view(-1, 4).t().reshape(-1).to(step.device)
    packed, like = payload.pack_message((x,), ((tokens,),), BLOCK), (((1, heads, size),), (x.dtype,), ((tokens,),))
    one, rows = x.nbytes, lses[0].nbytes
    both = one + packed.nbytes
    passes = {
        "merge, 4 partials": Pass(lambda: merge.merge(outs.unbind(), lses.unbind(), x.dtype), 5 * (one + rows)),
        "merge, 2 partials": Pass(lambda: merge.merge(outs[:2].unbind(), lses[:2].unbind(), x.dtype), 3 * (one + rows)),
        "merge_into": Pass(lambda: merge.merge_into(total, total_lse, outs[1], lses[1]), 5 * one + 3 * rows),
        "gather_rows, of a gathered grid": Pass(lambda: permute.gather_rows((x,), strided), 2 * one),
        "gather_rows, at random": Pass(lambda: permute.gather_rows((x,), order), 2 * one, None),
        "scatter_rows, of a gathered grid": Pass(lambda: permute.scatter_rows((x,), strided), 2 * one),
        "pack": Pass(lambda: payload.pack_message((x,), ((tokens,),), BLOCK), both, None),
        "unpack": Pass(lambda: payload.unpack_message(packed, *like, BLOCK)[0], both, None),
    }
    against_a_copy(step, "bandwidth over a copy's", passes, outs)


def decode(step: Step) -> None:
    """One query's attention to a full cache, in both of its storage formats: the cache is read once per token."""
    heads, kv_heads, size = (2, 1, 16) if step.smoke else (32, 8, 128)
    formats = ((False, "in bfloat16"), (True, "in one byte an element"))
    for slots, (fp8, stored) in product((64,) if step.smoke else (131_072, 16_384), formats):
        q = torch.randn((1, 1, heads, size), device=step.device).bfloat16()
        k = torch.randn((slots, 1, kv_heads, size), device=step.device).bfloat16()
        kept = Kept(slots, size, k[:1], k[:1], fp8=fp8)
        kept.put(slice(slots), k, k)
        held = torch.arange(slots, dtype=torch.int32, device=step.device)[:, None]
        last = torch.full((1, 1), slots, dtype=torch.int32, device=step.device)
        call = partial(store.attend, q, kept, held, last, Scores(size**-0.5))

        def in_plain_torch(call: Call = call) -> None:
            with patch.object(fused, "_kernels", lambda x: False):
                call()

        name = f"{slots} tokens, heads {heads}:{kv_heads} of {size} {stored}"
        calls = {"as it is": call, "plain torch": in_plain_torch}
        passes = {f"{name}, {how}": Pass(one, kept.nbytes, None) for how, one in calls.items()}
        against_a_copy(step, "bandwidth of decode over a copy's", passes, k, "decode")


def methods(step: Step, size: Size, ranks: int, backend: str) -> None:
    """Every method, against one call."""
    if reason := lacking(backend, step.device):
        step.not_run(f"efficiency of methods with backend {backend}", reason)
        return
    x = random(size, size.tokens, size.tokens, step.device)
    calls: dict[str, Call] = {
        "one": lambda: attend(ContextParallel("ring", group=None, backend="sdpa"), x, size.problem())
    }
    wanted, of = {}, {}
    for provider, layout, least in METHODS[: 1 if step.smoke else None]:
        name = f"{provider} on {layout}, backend {backend}, {ranks} ranks, {size}"
        try:
            options = Options(layout=layout, backend=backend)
            setup = settled(providers.get(provider), size.problem(ranks), options)
            of[name] = of_timed(setup, step.device)
            calls[name] = emulated(setup, x)
            calls[name]()
        except Exception as error:  # of any library
            calls.pop(name, None)
            step.not_run(f"efficiency of {name}", in_a_line(error))
            continue
        wanted[name] = (">=", least) if backend == "auto" and least is not None else None
    times = medians(calls, 1 if step.smoke else 3, warm_up=1)
    for name in wanted:
        detail = {"ms": times[name], "one call ms": times["one"]}
        title, value = "compute efficiency of emulated ranks", times["one"] / times[name]
        step.figure(title, name, value, wanted[name], of[name], **detail)


def emulated(setup: Setup, x: Inputs) -> Call:
    """Forward and backward of all ranks on shards that are cut beforehand."""

    def cut(mesh: Mesh) -> Inputs:
        return x.sharded(ContextParallel(setup, mesh=mesh), x.q.device)

    shards = run_threads(cut, setup.axes)

    def rank(mesh: Mesh) -> None:
        attend(ContextParallel(setup, mesh=mesh), shards[mesh.index], setup.problem)

    return lambda: run_threads(rank, setup.axes)


if __name__ == "__main__":
    main()
