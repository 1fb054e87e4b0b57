"""Memory of one device in a training, by part: that of the pipeline stage that needs most.

Parameters, gradients and optimizer are what Megatron's mixed precision Adam allocates; activations are counted by
tensor (``activations``). What is not counted is in ``margin``, by plain assumptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from cp_plugin.planner.training import activations, weights
from cp_plugin.planner.training.model import Model
from cp_plugin.planner.training.parallel import Parallel, check
from cp_plugin.planner.training.weights import Weights

GRADIENT = 4
"""Bytes of a gradient: Megatron sums them in float32 (``--accumulate-allreduce-grads-in-fp32`` comes with --bf16)."""
ADAM = 8
"""Bytes of an optimizer's state for each parameter: two averages in float32."""
MASTER = 4
"""Bytes of the float32 copy of a parameter that is not float32 itself."""
LOGITS_IN_LOSS = 4
"""Bytes of a logit in the loss, which makes a float32 copy and works in place (``VocabParallelCrossEntropy``)."""
GATHERED_LAYERS = 2
"""Layers whose parameters are whole at once where they are fully sharded: the current one, and the next on its way."""
FRAGMENTATION = 0.05
"""Of activations and temporaries: what the allocator cannot use. Megatron's own estimate without sequence parallelism
(``theoretical_memory_usage``) adds as much."""
RUNTIME = 2**30
"""Bytes of the CUDA context, workspaces of libraries and buffers of NCCL. An assumption: not measured."""
COMMUNICATOR = 2**27
"""Bytes of the buffers of a further NCCL communicator: 16 channels, to and from a peer, of NCCL_BUFFSIZE's default of
4 MiB. An estimate: not measured; NCCL_BUFFSIZE and ``max_ctas`` make it smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one device."""

    stage: int
    """The pipeline stage, from 0 on."""
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Kept from the forward of all micro-batches that are on the way."""
    recomputed: float
    """Of the layers whose forward is being repeated."""
    attention: float
    """What one attention call makes beside its inputs, at most."""
    ffn: float
    """Gradients alive in the backward of an FFN."""
    logits: float
    """Of the output layer and the loss."""
    communicators: float
    """Of those that context parallelism has beside Megatron's one."""

    @property
    def temporaries(self) -> float:
        """Of what is never there at the same time, the most: the loss, or the backward of attention, or of an FFN."""
        return max(self.logits, self.recomputed + max(self.attention, self.ffn))

    @property
    def margin(self) -> float:
        """What is not counted, by assumption."""
        return FRAGMENTATION * (self.activations + self.temporaries) + RUNTIME

    @property
    def parts(self) -> dict[str, float]:
        """By name; together the total."""
        names = ("parameters", "gradients", "optimizer", "activations", "temporaries", "communicators", "margin")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> float:
        """All together."""
        return sum(self.parts.values())


def footprint(
    model: Model, parallel: Parallel, attention_peaks: Sequence[float] = (0,), communicators: int = 1
) -> Footprint:
    """Of the device that needs most.

    Args:
        attention_peaks: bytes that an attention call makes beside its inputs, forward and backward
            (``cp_plugin.planner.trace.memory.peaks``); the largest counts.
        communicators: of context parallelism on each rank, over all kinds of attention.

    Raises:
        ValueError: if the model cannot be divided so.
    """
    check(model, parallel)
    further = COMMUNICATOR * max(0, communicators - 1)
    stages = [_stage(model, parallel, stage, max(attention_peaks), further) for stage in range(parallel.pipeline)]
    return max(stages, key=lambda found: found.total)


def in_flight(parallel: Parallel, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, at most, each over all layers of the stage.

    One forward, one backward: as many as there are stages from here on. With v chunks of layers a stage goes on with
    other chunks before its first backward: ``(2 (p - stage - 1) + (v - 1) p + 1) / v`` (arXiv 2104.04473, section 2.2).
    """
    p, v = parallel.pipeline, parallel.virtual
    found = p - stage if v == 1 else (2 * (p - stage - 1) + (v - 1) * p + 1) / v
    return min(found, parallel.microbatches)


def stage_weights(model: Model, parallel: Parallel, stage: int) -> Weights:
    """Parameters of one stage, before they are divided over ranks; the vocabulary padded.

    An embedding that is the output layer, too, is on the first and on the last stage.
    """
    vocab, last = parallel.padded(model.vocab), stage == parallel.pipeline - 1
    found: list[Weights] = []
    layers = parallel.layers(model, stage)
    for number, n in model.alike(layers).items():
        found += [weights.attention(model, number), weights.ffn(model, number)] * n
    found += [weights.prediction(model)] * sum(number >= model.layers for number in layers)
    embedded = stage == 0 or (last and (model.tied or model.predicted > 0))
    found += [weights.embedding(model, vocab)] * embedded
    found += [weights.head(model, vocab)] * last
    return weights.summed(found)


def on_device(parallel: Parallel, of: Weights) -> tuple[float, float]:
    """Parameters on one device: experts' last, all others' first."""
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
        activations=per_microbatch * in_flight(parallel, stage),
        recomputed=_repeated(model, parallel, dropped),
        attention=attention,
        communicators=communicators,
        ffn=max((activations.ffn_gradients(model, parallel, number) for number in model.alike(layers)), default=0),
        logits=_logits(model, parallel) if stage == parallel.pipeline - 1 else 0,
    )


def _states(model: Model, parallel: Parallel, stage: int) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer: 18 for each parameter in 16 bits, or 6 and 12 divided by the ranks
    that share them, and so on; where parameters are shared, those of a few layers are whole."""
    p, states = parallel, ADAM + (MASTER if parallel.element < 4 else 0)
    parameters = gradients = optimizer = 0.0
    own = on_device(p, stage_weights(model, p, stage))
    for number, sharers in zip(own, (p.sharers, p.expert_sharers), strict=True):
        parameters += number * p.element / (sharers if p.zero >= 3 else 1)
        gradients += number * GRADIENT / (sharers if p.zero >= 2 else 1)
        optimizer += number * states / (sharers if p.zero >= 1 else 1)
    if p.zero == 3:
        most = _largest_layer(model, p, p.layers(model, stage))
        parameters += most * p.element * GATHERED_LAYERS
        gradients += most * GRADIENT
    return parameters, gradients, optimizer


def _largest_layer(model: Model, parallel: Parallel, layers: Iterable[int]) -> float:
    found = (weights.summed([weights.attention(model, n), weights.ffn(model, n)]) for n in model.alike(layers))
    return max((sum(on_device(parallel, each)) for each in found), default=0)


def _repeated(model: Model, parallel: Parallel, layers: dict[int, int]) -> float:
    """What recomputation brings back at once: a layer, or a group of them, without what was kept of it.

    layers: the first of each kind, and how many there are.
    """
    gaps = [
        activations.whole(model, parallel, number) - activations.kept(model, parallel, number)
        for number, n in layers.items()
        for _ in range(n)
    ]
    return sum(sorted(gaps, reverse=True)[: parallel.recompute_group if parallel.recompute == "full" else 1])


def _logits(model: Model, parallel: Parallel) -> float:
    """The final norm's input and output, the logits, and their copy in the loss."""
    logits = parallel.tokens * ceil(parallel.padded(model.vocab) / parallel.tensor)
    return 2 * activations.layer_input(model, parallel) + logits * (parallel.element + LOGITS_IN_LOSS)
