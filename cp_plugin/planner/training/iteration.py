"""Time of a training iteration by part, given the seconds of attention.

Compute and blocking communication add up. Gradient and parameter collectives overlap with layers while attention's
messages leave the network cards free; only the exposed rest counts. Pipeline stages wait for the slowest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cp_plugin.planner.machine.events import Seconds
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.machine.links import Group, all_reduce, cost, message
from cp_plugin.planner.training import layer_time, operations
from cp_plugin.planner.training.footprint import GRADIENT, on_device, stage_weights
from cp_plugin.planner.training.layer_time import Pass, added, moved, multiplied
from cp_plugin.planner.training.model import Model
from cp_plugin.planner.training.parallel import Parallel, check

BUCKET = 40_000_000
"""Minimum elements of a gradient bucket, the last of which cannot overlap (``resolve_ddp_bucket_size``; a million per
rank, if that is more)."""
LOSS_IN_FLOAT32 = 12
"""Reads and writes of a float32 logit in the loss, forward and backward (``VocabParallelCrossEntropy``): copy, maximum,
difference (2), exponential (2), sum, quotient (2); product (2), copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """Seconds on the slowest pipeline stage."""

    stage: int
    attention: float
    """Over all layers and micro-batches, with recomputation."""
    dense: float
    """Layers outside attention."""
    tensor_parallel: float
    expert_parallel: float
    embedding: float
    head: float
    """Output layer and loss."""
    optimizer: float
    gradients: float
    """Exposed gradient and parameter collectives."""
    pipeline: float
    """Pipeline bubble and messages."""

    @property
    def parts(self) -> dict[str, float]:
        names = ("attention", "dense", "tensor_parallel", "expert_parallel", "embedding", "head")
        names += ("optimizer", "gradients", "pipeline")
        return {name: getattr(self, name) for name in names}

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


class _Stage(NamedTuple):
    """Seconds of one micro-batch on one stage."""

    attention: float
    dense: float
    tensor: float
    expert: float
    embedding: float
    head: float
    messages: float
    backward: float
    """Included: the backward of layers."""
    on_card: float
    """Included in it: attention's messages keep the network card busy."""
    forward_on_card: float

    @property
    def seconds(self) -> float:
        return sum(self[:-3])

    @property
    def beside_backward(self) -> float:
        """Seconds available to hide gradient collectives: layers compute and the card is free."""
        return max(0.0, self.backward - self.on_card)

    @property
    def beside_forward(self) -> float:
        """Seconds available to hide parameter gathering."""
        return max(0.0, self.seconds - self.backward - self.forward_on_card)


def iteration(
    model: Model, parallel: Parallel, cluster: Cluster, attention: Seconds | Mapping[str, Seconds]
) -> Iteration:
    """Price one training iteration; ValueError if the model cannot be divided so, or rates are missing.

    attention: seconds of one call; or by letter of ``Model.attention_pattern``.
    """
    check(model, parallel)
    given = dict.fromkeys(model.attention_pattern, attention) if isinstance(attention, Seconds) else attention
    missing = sorted(set(model.attention_pattern) - given.keys())
    if missing:
        raise ValueError(f"{model.name} has layers {', '.join(missing)}: give their attention times, too")
    stages = [_stage(model, parallel, cluster, given, n) for n in range(parallel.pipeline)]
    last = [_update(model, parallel, cluster, n, stage) for n, stage in enumerate(stages)]
    slowest = max(range(len(stages)), key=lambda n: stages[n].seconds)
    one, m = stages[slowest], parallel.microbatches
    filling = sum(stage.seconds for stage in stages) - one.seconds
    return Iteration(
        stage=slowest,
        attention=m * one.attention,
        dense=m * one.dense,
        tensor_parallel=m * one.tensor,
        expert_parallel=m * one.expert,
        embedding=m * one.embedding,
        head=m * one.head,
        optimizer=max(optimizer for optimizer, _ in last),
        gradients=max(gradients for _, gradients in last),
        pipeline=m * one.messages + filling / parallel.virtual,
    )


def _stage(model: Model, parallel: Parallel, cluster: Cluster, attention: Mapping[str, Seconds], stage: int) -> _Stage:
    layers = parallel.layers(model, stage)
    selective = parallel.recompute == "selective" and "core_attn" in parallel.recompute_modules
    repeated = parallel.repeated(layers)
    calls = backward = on_card = forward_on_card = 0.0
    total = Pass()
    for some, again in ((repeated, True), (layers[len(repeated) :], False)):
        for number, n in model.alike(some).items():
            call = attention[model.attention_of(number)]
            twice = call.forward if parallel.recompute_attention and (again or selective) else 0.0
            both = layer_time.layer(model, parallel, cluster, number, again)
            calls += n * (call.forward + call.backward + twice)
            backward += n * (call.backward + twice + sum(both.backward))
            forward_on_card += n * call.forward_on_card
            on_card += n * (call.backward_on_card + (call.forward_on_card if twice else 0.0))
            total = added(total, (n * (f + b) for f, b in zip(*both, strict=True)))
    last = stage == parallel.pipeline - 1
    predicted = sum(number >= model.layers for number in layers)
    ends = (stage == 0) + last * (1 + predicted)  # embedding and output layers
    projection = 3 * parallel.tokens * operations.prediction(model) / parallel.tensor * predicted
    return _Stage(
        attention=calls,
        dense=total.dense + multiplied(cluster, parallel, projection),
        tensor=total.tensor + ends * layer_time.exchanged(model, parallel, cluster),
        expert=total.expert,
        embedding=_embedding(model, parallel, cluster) if stage == 0 else 0.0,
        head=_head(model, parallel, cluster) * (1 + predicted) if last else 0.0,
        messages=_messages(model, parallel, cluster, stage),
        backward=backward,
        on_card=on_card,
        forward_on_card=forward_on_card,
    )


def _embedding(model: Model, parallel: Parallel, cluster: Cluster) -> float:
    """Rows are read and written forward, and added to the float32 gradient backward."""
    elements = parallel.tokens * model.hidden
    return moved(cluster, elements * (3 * parallel.element + 2 * GRADIENT))


def _head(model: Model, parallel: Parallel, cluster: Cluster) -> float:
    logits = parallel.tokens * parallel.padded(model.vocab) / parallel.tensor
    seconds = multiplied(cluster, parallel, 3 * 2 * model.hidden * logits)
    return seconds + moved(cluster, logits * (2 * parallel.element + 4 * LOSS_IN_FLOAT32))


def _messages(model: Model, parallel: Parallel, cluster: Cluster, stage: int) -> float:
    """Hidden states from the previous stage and gradients from the next one; with v chunks v times as many."""
    p, v = parallel.pipeline, parallel.virtual
    if p == 1:
        return 0.0
    neighbours = (stage > 0) + (stage < p - 1) if v == 1 else 2 * v
    nbytes = parallel.tokens * model.hidden * parallel.element / parallel.sequence_split
    return neighbours * message(cluster, parallel.devices // p, nbytes)


def _update(model: Model, parallel: Parallel, cluster: Cluster, number: int, stage: _Stage) -> tuple[float, float]:
    """Seconds of the optimizer, and of exposed communication."""
    p, sums, gathers, optimizer = parallel, 0.0, 0.0, 0.0
    own = on_device(p, stage_weights(model, p, number))
    groups = (Group(p.sharers, stride=p.tensor), Group(p.expert_sharers, stride=p.expert_tensor * p.expert))
    for elements, group in zip(own, groups, strict=True):
        if p.zero == 0:
            sums += all_reduce(cluster, group, elements * GRADIENT)
        else:
            sums += cost(cluster, group, elements * GRADIENT, "reduce_scatter")
            gathers += cost(cluster, group, elements * p.element, "all_gather")
        share = elements / (1 if p.zero == 0 else group.size)
        held = share if p.zero >= 2 else elements
        # gradient read twice (clipping), parameter and moments read and written, 16-bit copy written
        bytes_each = 2 * GRADIENT + 2 * (4 + 4 + 4) + (p.element if p.element < 4 else 0)
        optimizer += moved(cluster, share * bytes_each + held * GRADIENT)  # gradients zeroed
    return optimizer, _exposed(p, stage, sums, gathers, sum(own))


def _exposed(p: Parallel, stage: _Stage, sums: float, gathers: float, elements: float) -> float:
    """Exposed seconds of summing gradients and gathering parameters.

    They overlap with the last backward and the first forward, except for one bucket each.
    """
    if p.zero == 3:  # parameters gathered for every forward and backward, gradients reduced after every backward
        forward = max(0.0, gathers - stage.beside_forward * p.overlap_parameters)
        backward = max(0.0, gathers + sums - stage.beside_backward * p.overlap_gradients)
        return p.microbatches * (forward + backward)
    bucket = min(1.0, max(BUCKET, 1_000_000 * p.sharers) / max(1.0, elements))
    summing = max(sums - stage.beside_backward, sums * bucket) if p.overlap_gradients else sums
    gathering = max(gathers - stage.beside_forward, gathers * bucket) if p.overlap_parameters else gathers
    return summing + gathering
