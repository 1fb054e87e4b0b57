"""Calls of softmax and linear attention on ``FakeCuda``: one rank of four, whose peers send uninitialised memory.

for case in softmax_cases():
    result = case.run()          # out and gradients, by autograd
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from equipment.cuda.device import CUDA
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.comm import Pending, TraceMesh
from cp_plugin.engine.comm.mesh import Tensors
from cp_plugin.engine.core.mask import _READ
from cp_plugin.engine.linear.variants import Heads, LinearAttention, variants
from cp_plugin.engine.methods import registry as providers

BACKENDS = ("auto", "sdpa", "cudnn", "flash2", "flash3", "te", "triton", "te_fp8", "float8", "reference")
MASKS = ("causal", "full", "window", "documents", "sink", "gqa", "mla")
OPTIONS: dict[str, dict[str, Any]] = {
    "attention2d": {"grid": (2, 2)},
    "burst": {"intra_size": 2},
    "double_ring": {"intra_size": 2},
    "usp": {"head_parallel": 2},
}
RANKS, RANK, TOKENS, HEADS = 4, 1, 32, 8
DOCUMENTS = (0, 5, 37, 64, 128)


class Peerless(TraceMesh):
    """A mesh with uninitialised messages, as on a device: receiving allocates memory without a launch."""

    def _arriving(self, like: Tensors, rows: Callable[[int], int] = int) -> Pending:
        return Pending.done(tuple(t.new_empty((rows(t.size(0)), *t.shape[1:])) for t in like))


class Result(NamedTuple):
    """Results and inputs of a call."""

    out: Tensor
    gradients: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """One call of a provider, on one rank."""

    provider: str
    backend: str = "auto"
    """As ``--cp-backend``; ``flash2`` and ``flash3`` are generations of flash-attn."""
    mask: str = "causal"
    layout: str | None = None
    fp8: str | None = None
    documents: tuple[int, ...] = DOCUMENTS
    tokens: int = TOKENS
    head_dim: int = 64
    ranks: int = RANKS
    rank: int = RANK

    def __str__(self) -> str:
        return "-".join(part for part in (self.provider, self.layout, self.backend, self.mask, self.fp8) if part)

    @property
    def flash(self) -> int:
        return 2 if self.backend == "flash2" else 3

    @property
    def problem(self) -> Problem:
        kv_heads = 2 if self.mask == "gqa" else HEADS
        sizes = (192, 128) if self.mask == "mla" else (self.head_dim,) * 2
        return Problem(
            size=self.ranks,
            heads=HEADS,
            kv_heads=kv_heads,
            head_dim=sizes[0],
            v_head_dim=sizes[1],
            seq_length=self.ranks * self.tokens,
            causal=self.mask != "full",
        )

    def context_parallel(self) -> ContextParallel:
        """As created by the flags."""
        fp8 = "compute" if self.backend in ("te_fp8", "float8") else self.fp8
        backend = "flash" if self.backend.startswith("flash") else self.backend
        options = {"layout": self.layout, "backend": backend, "fp8": fp8, **OPTIONS.get(self.provider, {})}
        axes = providers.settle(self.provider, self.problem, Options(**options)).axes
        return ContextParallel(self.provider, mesh=Peerless(axes, self.rank), problem=self.problem, **options)

    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v and, if the mask has one, the sink."""
        p = self.problem
        q = leaf(self.tokens, 1, p.heads, p.head_dim)
        k, v = leaf(self.tokens, 1, p.kv_heads, p.head_dim), leaf(self.tokens, 1, p.kv_heads, p.v_head_dim)
        sink = (leaf(p.heads, dtype=torch.float32),) if self.mask == "sink" else ()
        return (q, k, v, *sink)

    def forward(self, cp: ContextParallel, inputs: Sequence[Tensor]) -> Tensor:
        return cp.attention(
            *inputs[:3],
            causal=self.mask != "full",
            window=(24, 0) if self.mask == "window" else None,
            cu_seqlens=torch.tensor(self.documents) if self.mask == "documents" else None,
            sink=inputs[3] if self.mask == "sink" else None,
        )

    def run(self, cp: ContextParallel | None = None) -> Result:
        """Forward and backward."""
        cp = cp or self.context_parallel()
        inputs = self.inputs()
        out = self.forward(cp, inputs)
        return Result(out, torch.autograd.grad(out, inputs, torch.empty_like(out)), inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One call of a linear attention variant, with its feature maps and norm."""

    variant: str
    provider: str = "lasp2"
    backend: str = "chunked"
    """Or ``auto``: fla except for packed documents."""
    causal: bool = True
    packed: bool = False
    layout: str | None = None
    tokens: int = 128
    ranks: int = RANKS
    rank: int = RANK

    def __str__(self) -> str:
        kind = "packed" if self.packed else "causal" if self.causal else "full"
        return "-".join(part for part in (self.provider, self.variant, self.backend, self.layout, kind) if part)

    def context_parallel(self) -> ContextParallel:
        return ContextParallel(
            self.provider, mesh=Peerless({"cp": self.ranks}, self.rank), layout=self.layout, backend=self.backend
        )

    def layer(self) -> LinearAttention:
        """With parameters on the device."""
        heads = Heads(heads=4, kv_heads=2, head_dim=16, v_head_dim=16, layers=2)
        layer = LinearAttention(variants()[self.variant], heads)
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, torch.nn.Parameter(torch.empty(parameter.shape, device=CUDA)))
        return layer

    def run(self, cp: ContextParallel | None = None, layer: LinearAttention | None = None) -> Result:
        """Forward and backward."""
        cp, layer = cp or self.context_parallel(), layer or self.layer()
        q, k, v = leaf(self.tokens, 1, 4, 16), leaf(self.tokens, 1, 2, 16), leaf(self.tokens, 1, 2, 16)
        gate = leaf(self.tokens, 1, 2, 16) if layer.variant.gated else None
        bounds = read_before(0, 1, 7, 9, self.tokens * cp.size) if self.packed else None
        out = layer(q, k, v, gate, partial(cp.linear_attention, causal=self.causal, cu_seqlens=bounds))
        inputs = tuple(y for y in (q, k, v, gate, *layer.parameters()) if y is not None)
        return Result(out, torch.autograd.grad(out, inputs, torch.empty_like(out)), inputs)


def read_before(*bounds: int) -> Tensor:
    """Bounds on the device, whose numbers have been read: an earlier layer has made the host wait for them."""
    tensor = torch.empty(len(bounds), dtype=torch.int32, device=CUDA)
    _READ[tensor] = (tensor._version, bounds)
    return tensor


def softmax_cases() -> Iterator[Softmax]:
    """All supported combinations of providers, layouts, kernels and masks."""
    for name, backend, mask in product(providers.names(), BACKENDS, MASKS):
        for layout in providers.get(name).layouts:
            if not (mask == "mla" and backend == "cudnn"):  # head sizes up to 128
                yield Softmax(provider=name, backend=backend, mask=mask, layout=layout)


def linear_cases() -> Iterator[Linear]:
    """All supported combinations of providers, layouts, variants and masks."""
    for name, variant, layout in product(providers.names("linear"), variants(), ("contiguous", "zigzag")):
        if name == "linear_ring" and variants()[variant].decay != "none":
            continue
        for causal, packed in ((True, False), (False, False), (True, True)):
            if (name == "lasp2" or causal) and not (name == "linear_ring" and packed):
                for backend in ("chunked", "reference") if packed else ("auto", "chunked", "reference"):
                    sizes = {"provider": name, "variant": variant, "layout": layout, "backend": backend}
                    yield Linear(**sizes, causal=causal, packed=packed)


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """An input on the device, of which a gradient is wanted."""
    return torch.empty(shape, dtype=dtype, device=CUDA, requires_grad=True)
