"""Cost of serving: prefill seconds, seconds per token, and memory.

prefill    the simulated timeline of each chunk of the prompt, which attends to all chunks before it, in every layer;
           layers outside attention as in a training's forward
decode     the session's events for one token: passes over the cache, launches, messages of the tree; plus reading the
           weights once for all sequences of the batch
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import floor

import numpy as np

from cp_plugin.attention.setups import Setup
from cp_plugin.comm import WHOLE
from cp_plugin.core.problem import Problem
from cp_plugin.inference import shard, slots_for
from cp_plugin.linear.variants import feature_dim, variants
from cp_plugin.planner.candidates import linear_candidates
from cp_plugin.planner.machine import kernel_time
from cp_plugin.planner.machine.collectives import Group, all_reduce
from cp_plugin.planner.machine.events import Event, Post
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.machine.links import Links, place
from cp_plugin.planner.price import on
from cp_plugin.planner.serving.trace import Layer, Token, chunk_program, token
from cp_plugin.planner.trace.timeline import Timeline, complete, ends, run, simulate
from cp_plugin.planner.training import activations, layer_time, operations, weights
from cp_plugin.planner.training.footprint import RUNTIME, on_device, stage_weights
from cp_plugin.planner.training.model import EXPERTS, LINEAR, Model
from cp_plugin.planner.training.parallel import Parallel, problem

LAUNCHES = 10
"""Per layer outside attention, for one token: four matrix products, two norms, RoPE, the activation, two residuals. An
assumption; host time is not counted."""
POINTS = 5
"""Maximum number of simulated chunks; seconds are interpolated between them."""
STATE = 4
"""Bytes per element of a linear layer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A serving query."""

    model: Model
    cluster: Cluster
    parallel: Parallel
    """Tensor and context parallelism; ``micro_batch`` sequences of ``seq_length`` tokens."""
    chunk: int = 0
    """Tokens of a prefill chunk; 0: the whole prompt."""
    fp8: bool = False
    """The cache holds one byte per element."""

    def __post_init__(self) -> None:
        p, chunk = self.parallel, self.chunk or self.parallel.seq_length
        object.__setattr__(self, "chunk", chunk)
        if p.pipeline > 1:
            raise ValueError(
                f"--pipeline {p.pipeline}: inference is priced on a single pipeline stage: use --tensor or --context"
            )
        multiple = self.multiple
        for flag, tokens in (("--seq-length", p.seq_length), ("--chunk", chunk)):
            if tokens < 1 or tokens % multiple:
                raise ValueError(
                    f"{flag} {tokens}: write a multiple of {multiple}, twice the context-parallel ranks, such as "
                    f"{max(1, round(tokens / multiple)) * multiple}"
                )
        if p.seq_length % chunk:
            raise ValueError(f"--chunk {chunk}: write a divisor of --seq-length {p.seq_length}")

    @property
    def multiple(self) -> int:
        """Granularity of contexts and chunks."""
        return 2 * self.parallel.context if self.parallel.context > 1 else 1

    @property
    def chunks(self) -> int:
        return self.parallel.seq_length // self.chunk

    @property
    def of_chunk(self) -> Parallel:
        return replace(self.parallel, seq_length=self.chunk, sequence_parallel=False)

    @property
    def softmax(self) -> Mapping[str, int]:
        """Letter of softmax layers -> number of layers."""
        found = Counter(map(self.model.attention_of, range(self.model.layers)))
        return {letter: n for letter, n in found.items() if letter != LINEAR}

    @property
    def linear(self) -> int:
        """Number of linear-attention layers."""
        return self.model.layers - sum(self.softmax.values())

    def layer(self, letter: str) -> Layer:
        m = self.model
        rope_dim = m.rope_dim if m.latent else 0
        return Layer(problem=problem(m, self.of_chunk, letter), kv_rank=m.kv_rank, rope_dim=rope_dim, fp8=self.fp8)

    def call(self, letter: str) -> Problem:
        """One attention call of a chunk, with the nodes of its ranks."""
        return on(problem(self.model, self.of_chunk, letter), self.cluster, self.parallel.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Seconds of one token of each sequence."""

    parts: Mapping[str, float]
    """``attention``: kernels and cache reads of softmax layers; ``messages`` of the tree there; ``linear``: reading and
    writing states; ``weights``: reading them, or multiplying by them where that takes longer; ``launches`` outside
    attention (``LAUNCHES``); ``tensor_parallel``."""
    read: float
    """Time to read the cache at full memory bandwidth; included in ``attention``."""
    sent: int
    """Bytes, of the rank that sends most."""
    batch: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Over all sequences."""
        return self.batch / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Seconds of a prompt."""

    setup: Setup | None
    """None: the model has no softmax attention."""
    parts: Mapping[str, float]
    """``attention`` in softmax layers; ``linear``; ``rest``: everything else."""
    sent: int
    """Bytes in all softmax layers, of the rank that sends most."""
    working: tuple[float, float]
    """Bytes a rank needs in addition to weights and cache: fixed, and per token of the context."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device."""

    parameters: float
    states: float
    """Of linear layers."""
    cache: float
    """For the requested context."""
    per_token: float
    """Cache per token of the context."""
    limit: float

    @property
    def fixed(self) -> float:
        """Independent of the context."""
        return self.parameters + self.states + RUNTIME

    @property
    def fits(self) -> bool:
        return self.fixed + self.cache <= self.limit

    def longest(self, multiple: int, working: tuple[float, float] = (0.0, 0.0)) -> int | None:
        """Tokens of the longest context that fits; 0: none does; None: no limit.

        Args:
            multiple: granularity of the context.
            working: as in ``Prefill``.
        """
        left, each = self.limit - self.fixed - working[0], self.per_token + working[1]
        if left < 0:
            return 0
        return None if each <= 0 else floor(left / each) // multiple * multiple


def memory(asked: Asked, limit: float) -> Memory:
    """Of the device that holds most; ``limit``: bytes of device memory."""
    p, m = asked.parallel, asked.model
    own = sum(on_device(p, stage_weights(m, p, 0))) * p.element
    slot = sum(n * asked.layer(letter).slot() for letter, n in asked.softmax.items())
    slots = slots_for(p.seq_length, p.context)
    return Memory(
        parameters=own, states=asked.linear * _state(asked), cache=slots * slot, per_token=slot / p.context, limit=limit
    )


def decode(asked: Asked) -> Decode:
    """The token after ``seq_length`` others."""
    p, cluster = asked.parallel, asked.cluster
    slots, bandwidth = slots_for(p.seq_length, p.context), cluster.device.memory_bytes_per_s
    attention = messages = read = sent = step = 0.0
    for letter, n in asked.softmax.items():
        layer = asked.layer(letter)
        once, computing, example = _token_seconds(layer, slots, asked)
        attention, step = attention + n * computing, max(step, once)
        messages += n * _messages(example.layer, asked)
        read += n * slots * layer.slot() / bandwidth
        sent += n * sum(example.sent.values())
    state = 2 * _state(asked) / bandwidth + cluster.device.launch_s
    nbytes = p.micro_batch * asked.model.hidden * p.element
    return Decode(
        parts={
            "attention": attention + step,
            "messages": messages,
            "linear": asked.linear * state,
            "weights": _weights(asked, p.micro_batch),
            "launches": asked.model.layers * LAUNCHES * cluster.device.launch_s,
            "tensor_parallel": 2 * asked.model.layers * all_reduce(cluster, Group(p.tensor), nbytes),
        },
        read=read,
        sent=int(sent),
        batch=p.micro_batch,
    )


def prefill(asked: Asked, setup: Setup | None) -> Prefill:
    """Price a prompt.

    Args:
        setup: resolved for one chunk; None where no layer has softmax attention.

    Raises:
        ValueError: if the provider cannot run it, or the device has no rates for the dtype.
    """
    attention = sent = 0.0
    peaks = {0: 0.0, asked.chunks - 1: 0.0}
    for letter, n in asked.softmax.items():
        assert setup is not None
        its = replace(setup, problem=asked.call(letter))
        found = {i: chunk_timeline(asked, its, letter, i) for i in points(asked.chunks)}
        attention += n * summed({i: t.forward_s for i, t in found.items()})
        sent += n * summed({i: float(most_sent(t)) for i, t in found.items()})
        for i in peaks:
            peaks[i] = max(peaks[i], *(q.peaks.forward for q in found[i].programs.values()))
    return Prefill(
        setup=setup,
        parts={
            "attention": attention,
            "linear": asked.linear * asked.chunks * _linear(asked) if asked.linear else 0.0,
            "rest": asked.chunks * _rest(asked) + _weights_of_head(asked) / asked.cluster.device.memory_bytes_per_s,
        },
        sent=round(sent),
        working=_working(asked, peaks),
    )


def chunk_timeline(asked: Asked, setup: Setup, letter: str, before: int) -> Timeline:
    """One layer's attention for the chunk after ``before`` others."""
    layer, tiled = asked.layer(letter), asked.cluster.device.shared_by > 0
    size = asked.parallel.context
    programs = complete(
        size,
        range(size) if tiled else ends(setup),
        lambda index: chunk_program(setup, layer, index, before, tiled=tiled),
    )
    return run(setup, programs, asked.cluster, asked.parallel.tensor)


def points(chunks: int) -> list[int]:
    """The simulated chunks: first, last, and some between."""
    return sorted({round(i * (chunks - 1) / (POINTS - 1)) for i in range(POINTS)})


def summed(at: Mapping[int, float]) -> float:
    """Sum over all chunks, linearly interpolated between the given ones."""
    return float(np.interp(range(max(at) + 1), list(at), list(at.values())).sum())


def most_sent(timeline: Timeline) -> int:
    """Bytes of the rank that sends most."""
    return max(sum(program.sent.values()) for program in timeline.programs.values())


def _token_seconds(layer: Layer, slots: int, asked: Asked) -> tuple[float, float, Token]:
    """Seconds of the step and of a layer's kernels and passes, and an example token.

    On a GPU two kernels attend. On a CPU all blocks of a long cache cost the same, so a few are traced.
    """
    tiled = asked.cluster.device.shared_by > 0
    its = layer.problem
    width = layer.kv_rank + layer.rope_dim if layer.kv_rank else its.head_dim
    block = max(1, shard.ELEMENTS // (its.batch * its.heads * width))
    if not tiled or slots <= 4 * block:
        found = token(layer, slots * its.size, tiled=tiled)
        return _kernels(found.step, asked), _kernels(found.layer, asked), found
    few, more = (token(layer, n * block * its.size, tiled=tiled) for n in (2, 4))
    step, some = _kernels(few.step, asked), _kernels(few.layer, asked)
    for_block = (_kernels(more.layer, asked) - some) / 2
    return step, some + (slots / block - 2) * for_block, few


def _kernels(events: tuple[Event, ...], asked: Asked) -> float:
    """Seconds without messages; ranks that share processors are all at work, as in calibration."""
    return sum(kernel_time.seconds(event, asked.cluster.device) for event in events)


def _messages(events: tuple[Event, ...], asked: Asked) -> float:
    """Seconds of the tree's serial messages, each as long as its slowest pair's.

    The first rank sends in every round. Where it meets rank p, rank i meets i xor p: neighbours first, which share a
    node, and ranks on other nodes last.
    """
    size = asked.parallel.context
    links = Links(asked.cluster, {"cp": size}, place(size, asked.cluster, asked.parallel.tensor))
    total = 0.0
    for post in (event for event in events if isinstance(event, Post)):
        peer = post.to if post.to is not None else post.source
        assert peer is not None
        pairs = [(i, i ^ peer) for i in range(size) if i < i ^ peer < size]
        ways = [post._replace(axis=WHOLE, to=a, source=a) for a, _ in pairs]
        total += max(links.cost(way, b).seconds for way, (_, b) in zip(ways, pairs, strict=True))
    return total


def _weights(asked: Asked, tokens: int) -> float:
    """Seconds of reading the weights of all layers and the output layer once, or of the products if these take longer.

    Of the experts, as many are read as the tokens can be routed to.
    """
    m, p, device = asked.model, asked.parallel, asked.cluster.device
    nbytes, flops = float(_weights_of_head(asked)), operations.head(m, p.padded(m.vocab)) / p.tensor
    for number, n in m.alike(range(m.layers)).items():
        own = weights.summed([weights.attention(m, number), weights.ffn(m, number)])
        dense, routed = on_device(p, own)
        met = min(1.0, tokens * m.top_k / m.experts) if m.ffn_of(number) == EXPERTS else 1.0
        nbytes += n * (dense + routed * met) * p.element
        flops += n * (operations.projections(m, number) + operations.ffn(m, number)) / p.tensor
    multiplied = layer_time.multiplied(asked.cluster, p, tokens * flops)
    return max(nbytes / device.memory_bytes_per_s, multiplied)


def _weights_of_head(asked: Asked) -> float:
    """Bytes of the output layer, which may be the embedding."""
    m, p = asked.model, asked.parallel
    return p.padded(m.vocab) * m.hidden * p.element / p.tensor


def _rest(asked: Asked) -> float:
    """Seconds of layers outside attention for one chunk; at least those of reading their weights."""
    m, p = asked.model, asked.of_chunk
    layers = m.alike(range(m.layers)).items()
    forward = sum(n * sum(layer_time.layer(m, p, asked.cluster, number, False).forward) for number, n in layers)
    rows = 2 * p.tokens * m.hidden * p.element
    return max(forward, _weights(asked, 1)) + layer_time.moved(asked.cluster, rows)


def _linear(asked: Asked) -> float:
    """Seconds of one layer of linear attention for one chunk."""
    its, stride = asked.call(LINEAR), asked.parallel.tensor
    setup = linear_candidates(its)[0].setup
    return simulate(setup, its, cluster=asked.cluster, stride=stride, ranks="busiest").forward_s


def _state(asked: Asked) -> int:
    """Bytes of a linear layer's state, replicated over context-parallel ranks."""
    m, p = asked.model, asked.parallel
    if not asked.linear:
        return 0
    kind = variants()[m.linear]
    heads = max(1, m.kv_heads // p.tensor)
    return p.micro_batch * heads * feature_dim(kind, m.head_dim) * (m.v_head_dim + kind.normalised) * STATE


def _working(asked: Asked, peaks: Mapping[int, float]) -> tuple[float, float]:
    """``Prefill.working``: attention's peak, and a layer's tensors if none is freed before its end."""
    m, p = asked.model, asked.of_chunk
    of_layer = max(activations.whole(m, p, number) for number in m.alike(range(m.layers)))
    first, last = peaks[0], peaks[asked.chunks - 1]
    if asked.chunks == 1:
        return 0.0, (last + of_layer) / p.seq_length
    each = (last - first) / (asked.parallel.seq_length - asked.chunk)
    return max(0.0, first - each * asked.chunk) + of_layer, each
