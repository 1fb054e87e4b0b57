"""Parallelism of a training run (``Parallel``), and the attention problem of one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, prod
from typing import Literal

import torch

from cp_plugin.engine.common.names import one_of
from cp_plugin.engine.common.text import divisors
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.linear.variants import variants
from cp_plugin.planner.training.model import LINEAR, SOFTMAX, WINDOW, Model, check_sizes

Recompute = Literal["none", "selective", "full"]
RECOMPUTE = ("none", "selective", "full")
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Choices of Megatron's ``--recompute-modules``."""
SELECTIONS = (("layernorm",), ("mlp",), ("layernorm", "mlp"))
"""Modules that a search recomputes; with experts also ``moe`` alone. Stock Megatron, too, keeps attention's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Numbers of ranks, in Megatron's order, innermost first: tensor, context, data, pipeline; for experts: expert
    tensor, expert, data."""

    devices: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 0
    """0: as ``tensor``."""
    virtual: int = 1
    """Chunks per pipeline stage of an interleaved schedule."""
    sequence_parallel: bool = False
    zero: int = 1
    """Sharded over data- and context-parallel ranks: 0 nothing, 1 optimizer states (distributed optimizer), 2 gradients
    too, 3 parameters too (FSDP)."""
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    recompute: Recompute = "none"
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """For selective recomputation."""
    recompute_layers: int = 0
    """Layers per stage under full recomputation; 0: all."""
    recompute_group: int = 1
    """Layers recomputed at once from their first input."""
    recompute_attention: bool = False
    """Whether recomputation includes attention, whose output is kept otherwise: as asked of our methods
    (``--cp-recompute-attention``); what a candidate then does is settled by ``planner.price.add_recomputation``."""
    micro_batch: int = 1
    global_batch: int = 0
    """0: one micro-batch per data-parallel rank."""
    seq_length: int = 4096
    documents: tuple[int, ...] = ()
    """Lengths of packed documents; empty: one document."""
    dtype: str = "bfloat16"
    """Of activations and compute parameters."""
    gemm_dtype: str = ""
    """Of matrix products; empty: ``dtype``."""
    vocab_multiple: int = 128
    """Vocabulary padding per tensor-parallel rank."""

    def __post_init__(self) -> None:
        for field, default in (("expert_tensor", self.tensor), ("gemm_dtype", self.dtype)):
            if not getattr(self, field):
                object.__setattr__(self, field, default)
        _check_values(self)
        _check_sizes(self)
        at_once = self.micro_batch * self.data
        if self.global_batch == 0:
            object.__setattr__(self, "global_batch", at_once)
        if self.global_batch % at_once:
            raise ValueError(
                f"--global-batch-size {self.global_batch} cannot be split evenly across --micro-batch-size "
                f"{self.micro_batch} x {self.data} data-parallel ranks: use a multiple of {at_once}"
            )

    @property
    def data(self) -> int:
        return self.devices // (self.tensor * self.pipeline * self.context)

    @property
    def sharers(self) -> int:
        """Ranks that replicate parameters: data times context parallelism."""
        return self.data * self.context

    @property
    def expert_sharers(self) -> int:
        """Ranks that replicate experts."""
        return self.devices // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def microbatches(self) -> int:
        """Per iteration and data-parallel rank."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch per context-parallel rank."""
        return self.seq_length * self.micro_batch // self.context

    @property
    def sequence_split(self) -> int:
        """Tensor-parallel ranks that shard the tokens outside attention and FFN."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def expert_tokens(self) -> float:
        """Tokens of a micro-batch gathered by an expert's tensor-parallel ranks, before routing to ``top_k``."""
        return self.tokens * self.expert_tensor / self.tensor if self.sequence_parallel else self.tokens

    @property
    def element(self) -> int:
        return getattr(torch, self.dtype).itemsize

    def padded(self, vocab: int) -> int:
        """Vocabulary size with padding."""
        multiple = self.vocab_multiple * self.tensor
        return ceil(vocab / multiple) * multiple

    def layers(self, model: Model, stage: int) -> range:
        """Layer numbers of a pipeline stage, as even as possible, multi-token prediction last.

        An interleaved schedule has other layers of the same kinds.
        """
        first, rest = divmod(model.layers, self.pipeline)
        start = stage * first + min(stage, rest)
        end = start + first + (stage < rest)
        return range(start, end + (model.predicted if stage == self.pipeline - 1 else 0))

    def repeated(self, layers: range) -> range:
        """The stage's first layers, to which full recomputation applies."""
        if self.recompute != "full":
            return layers[:0]
        return layers[: self.recompute_layers or None]


def selections(model: Model, parallel: Parallel) -> list[Parallel]:
    """The shape with each of ``SELECTIONS`` recomputed."""
    some = SELECTIONS if model.experts == 1 else (*SELECTIONS, ("moe",))
    return [replace(parallel, recompute="selective", recompute_modules=modules) for modules in some]


def divided_alike(parallel: Parallel) -> Parallel:
    """The shape without its recomputation: equal for shapes that differ in nothing else."""
    return replace(parallel, recompute="none", recompute_modules=("core_attn",), recompute_layers=0, recompute_group=1)


def problem(model: Model, parallel: Parallel, letter: str = SOFTMAX) -> Problem:
    """One attention call of a layer with that letter, after tensor parallelism; ValueError as for ``check``."""
    check(model, parallel)
    call = Problem(
        size=parallel.context,
        heads=model.heads // parallel.tensor,
        kv_heads=max(1, (model.heads if model.latent else model.kv_heads) // parallel.tensor),
        head_dim=model.head_dim,
        v_head_dim=model.v_head_dim,
        seq_length=parallel.seq_length,
        batch=parallel.micro_batch,
        dtype=getattr(torch, parallel.dtype),
        documents=bool(parallel.documents),
    )
    if letter != LINEAR and parallel.documents:
        call = replace(call, bounds=tuple(accumulate(parallel.documents, initial=0)))
    if letter == WINDOW:
        return replace(call, window=model.window)
    if letter == LINEAR:
        return variants()[model.linear].problem(call)
    return call


def check(model: Model, parallel: Parallel) -> None:
    """ValueError, naming flag, value and fix, if the model cannot be divided so."""
    p = parallel
    kv_heads = model.heads if model.latent else model.kv_heads
    _divides("--tensor-model-parallel-size", p.tensor, model.heads, f"query heads of {model.name}")
    if kv_heads % p.tensor and p.tensor % kv_heads:
        raise ValueError(
            f"--tensor-model-parallel-size {p.tensor}: {model.name} has {kv_heads} key/value heads; use a divisor or a "
            "multiple of that"
        )
    if model.experts > 1:
        _divides("--expert-model-parallel-size", p.expert, model.experts, f"experts of {model.name}")
    elif p.expert > 1:
        raise ValueError(f"--expert-model-parallel-size {p.expert}: {model.name} has no experts; leave it out")
    if p.pipeline * p.virtual > model.layers:
        raise ValueError(
            f"--pipeline-model-parallel-size {p.pipeline} with {p.virtual} chunks each: {model.name} has only "
            f"{model.layers} layers"
        )


def _check_values(p: Parallel) -> None:
    sizes = ("devices", "tensor", "pipeline", "context", "expert", "expert_tensor", "virtual", "recompute_group")
    optional = ("global_batch", "recompute_layers")
    check_sizes("", p, (*sizes, "micro_batch", "seq_length", "vocab_multiple"), optional)
    for module in p.recompute_modules:
        one_of("recompute_modules", module, MODULES)


def _check_sizes(p: Parallel) -> None:
    for axes in (
        {"tensor-model": p.tensor, "context": p.context, "pipeline-model": p.pipeline},
        {"expert-tensor": p.expert_tensor, "expert-model": p.expert, "pipeline-model": p.pipeline},
    ):
        if p.devices % (size := prod(axes.values())):
            product = " x ".join(f"--{axis}-parallel-size {n}" for axis, n in axes.items())
            raise ValueError(
                f"{p.devices} devices cannot be divided by {product} = {size}: use a multiple of {size} devices, or "
                "smaller sizes"
            )
    _divides("--context-parallel-size", p.context, p.seq_length, "tokens of --seq-length")
    if p.documents and (sum(p.documents) != p.seq_length or min(p.documents) < 1):
        raise ValueError(f"documents of {sum(p.documents)} tokens cannot fill a sequence of {p.seq_length}")


def _divides(flag: str, size: int, number: int, what: str) -> None:
    if number % size:
        near = sorted(divisors(number), key=lambda n: abs(n - size))
        raise ValueError(f"{flag} {size} does not divide the {number} {what}: use {' or '.join(map(str, near[:2]))}")
