"""Step 6: generation. Prefill and decode of every provider on rank threads, as ``cp-plugin verify --decode`` compares
them; and how fast one rank reads its cache, whose keys it converts a block at a time.
"""

from __future__ import annotations

from typing import NamedTuple
from unittest.mock import patch

import torch
from attend import interpret_one_at_a_time
from memory_speed import nbytes
from record import Step, finite, in_a_line
from timing import medians

from cp_plugin import Options, Problem, verify, verify_decode
from cp_plugin.inference import shard
from cp_plugin.inference.store import Heads, Packed, Plain
from cp_plugin.setups import Setup

PROBLEM = Problem(
    size=4, batch=2, heads=8, kv_heads=2, head_dim=64, v_head_dim=64, seq_length=256, dtype=torch.bfloat16
)
TINY = Problem(size=2, batch=2, heads=2, kv_heads=1, head_dim=16, v_head_dim=16, seq_length=16, dtype=torch.bfloat16)
BLOCKS = [2**n for n in (18, 20, 22, 24, 26)]
"""Elements that are converted at a time (``shard.ELEMENTS``)."""
ROUNDS = 10


class Cache(NamedTuple):
    """Of one rank and layer, for one query."""

    slots: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.slots} tokens, heads {self.heads}:{self.kv_heads} of {self.head_dim}"


def main() -> None:
    with Step("inference") as step:
        if step.smoke:
            interpret_one_at_a_time()
        for setup in setups(TINY if step.smoke else PROBLEM):
            name = named(setup)
            if step.late:
                step.not_run(f"inference: {name}", "out of time")
            elif setup.reason is not None:
                step.not_run(f"inference: {name}", setup.reason)
            else:
                right(step, name, setup)
        for cache in [Cache(64, 2, 1, 16)] if step.smoke else [Cache(131_072, 32, 8, 128), Cache(16_384, 32, 8, 128)]:
            for kind in (Plain, Packed):
                if step.late:
                    step.not_run(f"bandwidth of decode, {cache}", "out of time")
                    continue
                bandwidth(step, cache, kind)


def setups(problem: Problem) -> list[Setup]:
    """Every provider, and those of softmax attention with payloads and cache in FP8, too."""
    in_fp8 = [s for s in verify_decode.plan([], [problem], Options(fp8="comm")) if s.options.fp8]
    return verify_decode.plan([], [problem], Options()) + in_fp8


def named(setup: Setup) -> str:
    """What tells it from the others."""
    decay = f", a decay of each {setup.problem.decay}" if setup.provider.kind == "linear" else ""
    return f"{setup.provider.name} on {setup.layout}{decay}{', --cp-fp8 comm' if setup.options.fp8 else ''}"


def right(step: Step, name: str, setup: Setup) -> None:
    """Four outputs of a setup."""
    group = "prefill and decode, ranks as threads"
    try:
        with patch.object(verify, "refuse_too_large", lambda *_, **__: 60.0):  # it is small; and psutil may be missing
            (found,) = verify_decode.verify([setup], step.device.type, threads=True)
    except Exception as error:  # of any library
        step.check(group, name, False, failure=in_a_line(error))
        return
    if found.failure:
        step.check(group, name, False, failure=found.failure)
        return
    detail = {"tensor": found.worst, "error": finite(found.errors[found.worst]), "limit": found.limits[found.worst]}
    step.check(group, name, found.ok, **detail)


def bandwidth(step: Step, cache: Cache, kind: type[Plain] | type[Packed]) -> None:
    """One token's attention to a full cache, against a copy of as many bytes."""
    dtype = torch.bfloat16
    q = torch.randn((1, 1, cache.heads, cache.head_dim), device=step.device).to(dtype)
    k = torch.randn((cache.slots, 1, cache.kv_heads, cache.head_dim), device=step.device).to(dtype)
    kept = Heads(kind, cache.slots, k[:1], k[:1])
    kept.put(0, k, k, None)
    held = torch.arange(cache.slots, dtype=torch.int32, device=step.device)[:, None]
    last = torch.full((1, 1), cache.slots, dtype=torch.int32, device=step.device)
    target = torch.empty_like(k)

    def decode(elements: int) -> None:
        with patch.object(shard, "ELEMENTS", elements):
            shard.attend(q, kept, cache.head_dim, held, last, cache.head_dim**-0.5)

    calls = {f"blocks of {n} elements": lambda n=n: decode(n) for n in BLOCKS[-2 if step.smoke else 0 :]}
    times = medians({"copy": lambda: target.copy_(k)} | calls, 1 if step.smoke else ROUNDS)
    copied = 2 * nbytes(k) / times["copy"] / 1e6
    for name in calls:
        speed = kept.nbytes / times[name] / 1e6
        detail = {"GB/s": speed, "copy GB/s": copied, "ms": times[name]}
        stored = "in one byte an element" if kind is Packed else "in bfloat16"
        step.figure("bandwidth of decode over a copy's", f"{cache} {stored}, {name}", speed / copied, None, **detail)


if __name__ == "__main__":
    main()
