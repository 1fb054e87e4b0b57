"""What is to be computed: ``Problem``. What a user chose about how is in ``core.options``."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

import torch

from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.core.hosts import neighbours_per_host
from cp_plugin.core.layout import Layout
from cp_plugin.core.mask import Mask, Window

Decay = Literal["none", "head", "token", "key"]
Fp8 = Literal["comm", "compute"]
Network = Literal["nccl", "gloo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention call, as a provider sees it when it chooses, says what it cannot do and what it will send.

    Only the sizes of a model matter for most choices, so the rest has typical values.
    """

    size: int
    """Context-parallel ranks."""
    heads: int = 1
    """Query heads on this rank (after tensor parallelism)."""
    kv_heads: int = 1
    head_dim: int = 128
    v_head_dim: int = 0
    """0: as ``head_dim``."""
    seq_length: int = 2**17
    """Global tokens."""
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    decay: Decay = "none"
    """Of linear attention: none, one number per head, per token and head, or per token, head and key dimension."""
    documents: bool = False
    """Whether several documents are packed in one sequence."""
    bounds: tuple[int, ...] = ()
    """Where these documents begin, and the length of the sequence, as in ``Mask``; empty: none, or not known here."""
    placed: Layout | None = None
    """A layout that was made for them; None: the one that the options name."""
    window: Window | None = None
    """How many tokens before and after itself a token sees, -1: all of them; None: no window."""
    sink: bool = False
    """Whether the softmax has one more score for each head, with no value behind it."""
    hosts: tuple[str, ...] = ()
    """The host of every context-parallel rank; empty: unknown."""
    network: Network = "nccl"
    """What messages travel over: NCCL between GPUs, or Gloo between CPU ranks."""
    fp8: bool = False
    """Whether payloads travel in one byte an element; ``cp_plugin.methods.fp8`` sets it from the options."""
    narrow_sums: bool = False
    """Whether sums of gradients travel in ``dtype``; ``cp_plugin.methods.gradient_dtype`` sets it from the options."""
    block: int = 0
    """Tokens of a payload that share an exponent; 0: as many of 64 as divide the tokens of a rank."""

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
        if self.window is not None and min(self.window) < -1:
            raise ValueError(f"window {self.window}: numbers of tokens before and after, or -1 for all of them")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads}, kv_heads {self.kv_heads}: {self.heads} query heads cannot share {self.kv_heads} "
                "key/value heads: the first must be a multiple of the second"
            )

    def mask(self, documents: tuple[int, ...] = ()) -> Mask:
        """Which keys a query sees. documents: the bounds of those that are packed, as in ``Mask``; none: ``bounds``."""
        return Mask.of(self.causal, self.window, documents or self.bounds)

    @property
    def per_host(self) -> int:
        """Neighbouring ranks that share a host; 1 where that is unknown or uneven."""
        return neighbours_per_host(self.hosts)

    @property
    def summed(self) -> bool:
        """Linear attention in which every token sees the same: all of them, undecayed."""
        return not self.causal and self.decay == "none" and not self.documents

    @property
    def tokens(self) -> int:
        """Tokens of one rank, over its whole batch."""
        return self.seq_length // self.size * self.batch

    @property
    def q_elements(self) -> int:
        """Elements of one rank's q."""
        return self.tokens * self.heads * self.head_dim

    @property
    def out_elements(self) -> int:
        """Elements of one rank's out."""
        return self.tokens * self.heads * self.v_head_dim

    @property
    def kv_elements(self) -> int:
        """Elements of one rank's k and v together."""
        return self.tokens * self.kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def shared(self) -> int:
        """Tokens of a payload that share an exponent."""
        return self.block or gcd(self.seq_length // self.size, 64)

    def payload(self, heads: int, size: int) -> int:
        """Bytes of one rank's tensor of so many heads of that size, as it travels: q, k, v, out or their gradients."""
        rows = self.tokens * heads
        return rows * size + rows // self.shared if self.fp8 else rows * size * self.dtype.itemsize

    @property
    def q_bytes(self) -> int:
        """Bytes of one rank's q as it travels."""
        return self.payload(self.heads, self.head_dim)

    @property
    def out_bytes(self) -> int:
        """Bytes of one rank's out as it travels."""
        return self.payload(self.heads, self.v_head_dim)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one rank's k and v together as they travel."""
        return self.payload(self.kv_heads, self.head_dim) + self.payload(self.kv_heads, self.v_head_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one number per token and query head of one rank: lse, delta."""
        return self.tokens * self.heads * self.wide

    @property
    def wide(self) -> int:
        """Bytes of an element in the accumulation dtype: of a row statistic, of a state."""
        return accumulation_dtype(self.dtype).itemsize

    @property
    def sum_bytes(self) -> int:
        """Bytes of an element of a sum of gradients as it travels."""
        return self.dtype.itemsize if self.narrow_sums else self.wide
