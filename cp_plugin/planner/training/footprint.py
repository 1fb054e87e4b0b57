"""Memory footprint of a training run on one device of the pipeline stage that needs most.

Parameters, gradients and optimizer states follow Megatron's mixed-precision Adam; activations are counted by tensor
(``activations``). ``margin`` covers the rest by assumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from cp_plugin.planner.training import activations, weights
from cp_plugin.planner.training.model import Model
from cp_plugin.planner.training.parallel import Parallel, check
from cp_plugin.planner.training.weights import Weights

GRADIENT = 4
"""Bytes of a gradient: Megatron accumulates in float32 (``--accumulate-allreduce-grads-in-fp32`` comes with --bf16)."""
ADAM = 8
"""Bytes of optimizer state per parameter: two float32 moments."""
MASTER = 4
"""Bytes of the float32 master copy of a 16-bit parameter."""
LOGITS_IN_LOSS = 4
"""Bytes of a logit in the loss: a float32 copy, modified in place (``VocabParallelCrossEntropy``)."""
GATHERED_LAYERS = 2
"""Layers whose fully sharded parameters are gathered at once: the current one and the prefetched next."""
FRAGMENTATION = 0.05
"""Of activations and temporaries; Megatron's own estimate without sequence parallelism (``theoretical_memory_usage``)
adds as much."""
RUNTIME = 2**30
"""CUDA context, library workspaces and NCCL buffers. An assumption, not measured."""
COMMUNICATOR = 2**27
"""Buffers of an additional NCCL communicator: 16 channels, to and from a peer, of NCCL_BUFFSIZE's default of 4 MiB. An
estimate, not measured; NCCL_BUFFSIZE and ``max_ctas`` make it smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes on one device."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Of all micro-batches in flight."""
    recomputed: float
    """Of layers being recomputed."""
    attention: float
    """Peak of one attention call in addition to its inputs."""
    ffn: float
    """Gradients in the backward pass of an FFN."""
    logits: float
    """Of the output layer and the loss."""
    communicators: float
    """Context-parallel ones beyond Megatron's own."""

    @property
    def temporaries(self) -> float:
        """The largest of the loss, and the backward pass of attention or of an FFN, which never coincide."""
        return max(self.logits, self.recomputed + max(self.attention, self.ffn))

    @property
    def margin(self) -> float:
        return FRAGMENTATION * (self.activations + self.temporaries) + RUNTIME

    @property
    def parts(self) -> dict[str, float]:
        names = ("parameters", "gradients", "optimizer", "activations", "temporaries", "communicators", "margin")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def footprint(
    model: Model, parallel: Parallel, attention_peaks: Sequence[float] = (0,), communicators: int = 1
) -> Footprint:
    """Footprint of the device that needs most; ValueError if the model cannot be divided so.

    Args:
        attention_peaks: bytes of an attention call in addition to its inputs, forward and backward
            (``cp_plugin.planner.trace.memory.peaks``); the largest counts.
        communicators: context-parallel ones on each rank, over all kinds of attention.
    """
    check(model, parallel)
    further = COMMUNICATOR * max(0, communicators - 1)
    stages = [_stage(model, parallel, stage, max(attention_peaks), further) for stage in range(parallel.pipeline)]
    return max(stages, key=lambda stage: stage.total)


def count_in_flight(parallel: Parallel, stage: int) -> float:
    """Maximum number of micro-batches in flight on a stage, in units of all its layers.

    1F1B: the number of stages from here on. Interleaved with v chunks: ``(2 (p - stage - 1) + (v - 1) p + 1) / v``
    (arXiv 2104.04473, section 2.2).
    """
    p, v = parallel.pipeline, parallel.virtual
    most = p - stage if v == 1 else (2 * (p - stage - 1) + (v - 1) * p + 1) / v
    return min(most, parallel.microbatches)


def stage_weights(model: Model, parallel: Parallel, stage: int) -> Weights:
    """Parameters of one stage before sharding, with padded vocabulary.

    A tied embedding is on the first and the last stage.
    """
    vocab, last = parallel.padded(model.vocab), stage == parallel.pipeline - 1
    parts: list[Weights] = []
    layers = parallel.layers(model, stage)
    for number, n in model.alike(layers).items():
        parts += [weights.attention(model, number), weights.ffn(model, number)] * n
    parts += [weights.prediction(model)] * sum(number >= model.layers for number in layers)
    embedded = stage == 0 or (last and (model.tied or model.predicted > 0))
    parts += [weights.embedding(model, vocab)] * embedded
    parts += [weights.head(model, vocab)] * last
    return weights.summed(parts)


def whole(model: Model) -> Weights:
    """Parameters of a model, with unpadded vocabulary."""
    return stage_weights(model, Parallel(vocab_multiple=1), 0)


def device_parameters(parallel: Parallel, of: Weights) -> tuple[float, float]:
    """Parameters on one device: dense, and routed experts."""
    return of.sharded / parallel.tensor + of.replicated, of.routed / (parallel.expert_tensor * parallel.expert)


def _stage(model: Model, parallel: Parallel, stage: int, attention: float, communicators: float) -> Footprint:
    layers = parallel.layers(model, stage)
    parameters, gradients, optimizer = _states(model, parallel, stage)
    some = parallel.repeated(layers) if parallel.recompute == "full" else layers
    plain = layers[len(some) :]
    dropped = model.alike(some)
    per_microbatch = sum(n * activations.kept(model, parallel, number) for number, n in dropped.items())
    per_microbatch += sum(n * activations.whole(model, parallel, number) for number, n in model.alike(plain).items())
    return Footprint(
        stage=stage,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=per_microbatch * count_in_flight(parallel, stage),
        recomputed=_repeated(model, parallel, dropped),
        attention=attention,
        communicators=communicators,
        ffn=max((activations.ffn_gradients(model, parallel, number) for number in model.alike(layers)), default=0),
        logits=_logits(model, parallel) if stage == parallel.pipeline - 1 else 0,
    )


def _states(model: Model, parallel: Parallel, stage: int) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer states: 18 per 16-bit parameter, sharded as ``zero`` says."""
    p, states = parallel, ADAM + (MASTER if parallel.element < 4 else 0)
    parameters = gradients = optimizer = 0.0
    own = device_parameters(p, stage_weights(model, p, stage))
    for number, sharers in zip(own, (p.sharers, p.expert_sharers), strict=True):
        parameters += number * p.element / (sharers if p.zero >= 3 else 1)
        gradients += number * GRADIENT / (sharers if p.zero >= 2 else 1)
        optimizer += number * states / (sharers if p.zero >= 1 else 1)
    if p.zero == 3:
        each = ([weights.attention(model, n), weights.ffn(model, n)] for n in model.alike(p.layers(model, stage)))
        most = max((sum(device_parameters(p, weights.summed(layer))) for layer in each), default=0)
        parameters += most * p.element * GATHERED_LAYERS
        gradients += most * GRADIENT
    return parameters, gradients, optimizer


def _repeated(model: Model, parallel: Parallel, layers: dict[int, int]) -> float:
    """Activations that recomputation restores at once, for a layer or a group of layers.

    layers: first of each kind -> number of its kind.
    """
    gaps = [
        activations.whole(model, parallel, number) - activations.kept(model, parallel, number)
        for number, n in layers.items()
        for _ in range(n)
    ]
    return sum(sorted(gaps, reverse=True)[: parallel.recompute_group if parallel.recompute == "full" else 1])


def _logits(model: Model, parallel: Parallel) -> float:
    """The final norm's input and output, the logits, and the loss's copy of them."""
    logits = parallel.tokens * ceil(parallel.padded(model.vocab) / parallel.tensor)
    return 2 * activations.layer_input(model, parallel) + logits * (parallel.element + LOGITS_IN_LOSS)
