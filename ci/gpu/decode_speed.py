"""How fast one rank attends to its cache of keys and values, which is read once for each token."""

from __future__ import annotations

from typing import NamedTuple
from unittest.mock import patch

import torch
from memory_speed import Pass, against_a_copy
from record import Step

from cp_plugin.inference import shard
from cp_plugin.inference.store import Cache as Kept
from cp_plugin.inference.store import Packed, Plain
from cp_plugin.kernels import fused

ROUNDS = 10


class Cache(NamedTuple):
    """Of one rank and layer, for one query."""

    slots: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.slots} tokens, heads {self.heads}:{self.kv_heads} of {self.head_dim}"


def decode(step: Step) -> None:
    """Caches of two sizes, in both forms that they are kept in."""
    for cache in [Cache(64, 2, 1, 16)] if step.smoke else [Cache(131_072, 32, 8, 128), Cache(16_384, 32, 8, 128)]:
        for kind in (Plain, Packed):
            bandwidth(step, cache, kind)


def bandwidth(step: Step, cache: Cache, kind: type[Plain] | type[Packed]) -> None:
    """One token's attention to a full cache, against a copy of as many bytes."""
    dtype = torch.bfloat16
    q = torch.randn((1, 1, cache.heads, cache.head_dim), device=step.device).to(dtype)
    k = torch.randn((cache.slots, 1, cache.kv_heads, cache.head_dim), device=step.device).to(dtype)
    kept = Kept(kind, cache.slots, cache.head_dim, k[:1], k[:1])
    kept.put(0, k, k)
    held = torch.arange(cache.slots, dtype=torch.int32, device=step.device)[:, None]
    last = torch.full((1, 1), cache.slots, dtype=torch.int32, device=step.device)

    def attend() -> None:
        shard.attend(q, kept, held, last, cache.head_dim**-0.5)

    def in_plain_torch() -> None:
        with patch.object(fused, "_kernels", lambda x: False):
            attend()

    stored = "in one byte an element" if kind is Packed else "in bfloat16"
    calls = {"as it is": attend, "plain torch": in_plain_torch}
    passes = {f"{cache} {stored}, {how}": Pass(call, kept.nbytes, None) for how, call in calls.items()}
    against_a_copy(step, "bandwidth of decode over a copy's", passes, k, 1 if step.smoke else ROUNDS)
