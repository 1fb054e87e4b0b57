"""``Problem``: the attention call to compute."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal, NamedTuple

import torch

from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.core.layout import Layout
from cp_plugin.engine.core.mask import Mask, Window


def describe_hosts(hosts: Sequence[str]) -> str:
    """The placement for messages: ``ranks 0-3 on a, 4-7 on b``."""
    if not hosts:
        return "the hosts of the ranks are unknown"
    parts, start = [], 0
    for host, run in itertools.groupby(hosts):
        end = start + len(list(run))
        parts.append(f"{start}-{end - 1} on {host}" if end - start > 1 else f"{start} on {host}")
        start = end
    return f"ranks {', '.join(parts[:8])}{f' and {len(parts) - 8} more runs' if len(parts) > 8 else ''}"


Decay = Literal["none", "head", "token", "key"]
Fp8 = Literal["comm", "compute"]
Network = Literal["nccl", "gloo"]


class CallInfo(NamedTuple):
    """What decides whether a kernel can run a call."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    softcap: bool = False
    """Whether scores are capped."""

    @classmethod
    def from_problem(cls, problem: Problem, device: torch.device) -> CallInfo:
        return cls(device, problem.dtype, problem.head_dim, problem.v_head_dim, problem.softcap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """Where the ranks are, and how tensors travel between them: the same for all calls of a run."""

    hosts: tuple[str, ...] = ()
    """Host of every context-parallel rank; empty: unknown."""
    network: Network = "nccl"
    """NCCL between GPUs, or Gloo between CPU ranks."""
    fp8: bool = False
    """Whether payloads are FP8; set from the options by ``engine.methods.fp8``."""
    narrow_sums: bool = False
    """Whether gradient sums travel in ``Problem.dtype``; set by ``engine.methods.gradient_dtype``."""
    block: int = 0
    """Tokens that share a payload exponent; 0: the largest divisor of 64 that divides a rank's tokens."""

    @property
    def per_host(self) -> int:
        """Neighbouring ranks that share a host; 1 if that is uneven or unknown.

        Context-parallel ranks are strided by tensor parallelism, so it cannot be derived from devices per node; the
        ranks are asked (``comm.every_rank.gather_hosts``).
        """
        runs = [len(list(run)) for _, run in itertools.groupby(self.hosts)]
        return runs[0] if len(set(runs)) == 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention call, as providers see it when they choose options, refuse, and predict traffic.

    Most choices depend on the model sizes alone, so the other fields have typical defaults.
    """

    size: int
    """Context-parallel ranks."""
    heads: int = 1
    """Query heads on this rank (after tensor parallelism)."""
    kv_heads: int = 1
    head_dim: int = 128
    v_head_dim: int = 0
    """0: equal to ``head_dim``."""
    seq_length: int = 2**17
    """Global tokens."""
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    decay: Decay = "none"
    """Of linear attention: none, or per head, per token and head, or per token, head and key dimension."""
    delta: bool = False
    """Whether linear attention writes by the delta rule."""
    documents: bool = False
    """Whether several documents are packed in one sequence."""
    bounds: tuple[int, ...] = ()
    """Their bounds as in ``Mask.documents``; empty: none, or unknown."""
    placed: Layout | None = None
    """A layout built for them; None: the layout option."""
    window: Window | None = None
    """Visible tokens before and after each token, -1: all; None: no window."""
    sink: bool = False
    """Whether the softmax has an extra score per head, without a value."""
    softcap: bool = False
    """Whether scores are capped (``Scores.softcap``)."""
    transport: Transport = Transport()

    def __post_init__(self) -> None:
        if self.v_head_dim == 0:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        sizes = ("size", "heads", "kv_heads", "head_dim", "v_head_dim", "seq_length", "batch")
        if small := [f"{name} {getattr(self, name)}" for name in sizes if getattr(self, name) < 1]:
            raise ValueError(f"{', '.join(small)}: sizes must be 1 or more")
        if self.bounds:
            object.__setattr__(self, "documents", True)
            if self.bounds[0] or self.bounds[-1] != self.seq_length:
                raise ValueError(f"bounds of documents run from 0 to the {self.seq_length} tokens of the sequence")
        if self.window is not None and (len(self.window) != 2 or min(self.window) < -1):
            raise ValueError(
                f"window {self.window}: give two numbers of tokens, before and after, or -1 for all of them, such as "
                "--window-size 1023,0"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads}, kv_heads {self.kv_heads}: {self.heads} query heads cannot share {self.kv_heads} "
                "key/value heads: the first must be a multiple of the second"
            )

    def mask(self, documents: tuple[int, ...] = ()) -> Mask:
        """The attention mask. documents: bounds as in ``Mask``; default: ``bounds``."""
        return Mask.from_arguments(self.causal, self.window, documents or self.bounds)

    def with_transport(self, **changes: Any) -> Problem:
        """The same call with these fields of ``Transport``."""
        return replace(self, transport=replace(self.transport, **changes))

    @property
    def uniform(self) -> bool:
        """All segments of linear attention do the same to a state that passes, so ranks need not tell each other."""
        return self.decay in ("none", "head") and not (self.delta or self.documents)

    @property
    def transit_columns(self) -> int:
        """Columns by which a state of linear attention is wider in transit, for what its segment does to others."""
        return self.head_dim if self.delta else 0 if self.uniform else 1

    @property
    def summed(self) -> bool:
        """Linear attention without mask or decay: every token sees the same sum."""
        return self.uniform and self.decay == "none" and not self.causal

    @property
    def tokens(self) -> int:
        """Tokens of one rank, over its batch."""
        return self.seq_length // self.size * self.batch

    @property
    def q_elements(self) -> int:
        return self.tokens * self.heads * self.head_dim

    @property
    def out_elements(self) -> int:
        return self.tokens * self.heads * self.v_head_dim

    @property
    def kv_elements(self) -> int:
        """k and v together, on one rank."""
        return self.tokens * self.kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def shared(self) -> int:
        """Tokens that share a payload exponent."""
        return self.transport.block or gcd(self.seq_length // self.size, 64)

    def payload(self, heads: int, size: int) -> int:
        """Bytes of one rank's tensor of that many heads of that size in transit."""
        rows = self.tokens * heads
        return rows * size + rows // self.shared if self.transport.fp8 else rows * size * self.dtype.itemsize

    @property
    def q_bytes(self) -> int:
        """Bytes of one rank's q in transit."""
        return self.payload(self.heads, self.head_dim)

    @property
    def out_bytes(self) -> int:
        """Bytes of one rank's out in transit."""
        return self.payload(self.heads, self.v_head_dim)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one rank's k and v in transit."""
        return self.payload(self.kv_heads, self.head_dim) + self.payload(self.kv_heads, self.v_head_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one rank's row statistic (lse or delta)."""
        return self.tokens * self.heads * self.wide

    @property
    def wide(self) -> int:
        """Bytes per element in the accumulation dtype."""
        return accumulation_dtype(self.dtype).itemsize

    @property
    def sum_bytes(self) -> int:
        """Bytes per element of a gradient sum in transit."""
        return self.dtype.itemsize if self.transport.narrow_sums else self.wide
