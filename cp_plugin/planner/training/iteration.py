"""Time of a training iteration by part, given the seconds of attention.

Compute and blocking communication add up. Gradient and parameter collectives overlap with layers while attention's
messages leave the network cards free; only the exposed rest counts. Pipeline stages wait for the slowest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cp_plugin.planner.machine import kernel_time
from cp_plugin.planner.machine.events import Seconds
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.machine.links import Group, all_reduce, cost, message
from cp_plugin.planner.training import operations
from cp_plugin.planner.training.footprint import GRADIENT, device_parameters, stage_weights
from cp_plugin.planner.training.model import EXPERTS, Model
from cp_plugin.planner.training.parallel import Parallel, check


class Pass(NamedTuple):
    """Seconds of a forward or backward."""

    dense: float = 0.0
    """Compute."""
    tensor: float = 0.0
    """Tensor-parallel collectives."""
    expert: float = 0.0
    """Expert-parallel collectives."""


def added(*passes: Iterable[float]) -> Pass:
    return Pass(*map(sum, zip(*passes, strict=True)))


def layer(model: Model, parallel: Parallel, cluster: Cluster, number: int, repeated: bool) -> tuple[Pass, Pass]:
    """Price the forward and the backward, with recomputation, of layer ``number``; ``repeated``: full recomputation
    applies. ValueError for a dtype without a rate.

    matrix products    FLOPs over the device's rate for large matrices; twice as many in a backward pass
    memory-bound       bytes over memory bandwidth: norms, residuals, RoPE, activation, casts to FP8
    collectives        of tensor and expert parallelism, blocking
    """
    attention, ffn = _attention(model, parallel, cluster, number), _ffn(model, parallel, cluster, number)
    forward, backward = added(attention[0], ffn[0]), added(attention[1], ffn[1])
    modules = parallel.recompute_modules if parallel.recompute == "selective" else ()
    module = "moe" if model.ffn_of(number) == EXPERTS else "mlp"
    if parallel.recompute == "full" and repeated:
        backward = added(backward, forward)
    elif module in modules:
        backward = added(backward, ffn[0])
    if "layernorm" in modules:
        norms = 4 * parallel.tokens * model.hidden * parallel.element / parallel.sequence_split
        backward = added(backward, Pass(moved(cluster, norms)))
    return forward, backward


def multiplied(cluster: Cluster, parallel: Parallel, flops: float) -> float:
    """Seconds of matrix products."""
    return flops / kernel_time.products_per_s(cluster.device, parallel.gemm_dtype)


def moved(cluster: Cluster, nbytes: float) -> float:
    """Seconds of reading and writing memory."""
    return nbytes / cluster.device.memory_bytes_per_s


def quantised(cluster: Cluster, parallel: Parallel, elements: float) -> float:
    """Seconds of casting inputs of FP8 products: read in 16 bits, written twice, once transposed."""
    return moved(cluster, 4 * elements) if parallel.gemm_dtype == "float8" else 0.0


def exchanged(model: Model, parallel: Parallel, cluster: Cluster) -> float:
    """Seconds of the tensor-parallel collectives around attention or FFN.

    With sequence parallelism an all-gather before and a reduce-scatter after; without, an all-reduce after, which is
    both.
    """
    nbytes, group = parallel.tokens * model.hidden * parallel.element, Group(parallel.tensor)
    return all_reduce(cluster, group, nbytes)


def _attention(model: Model, parallel: Parallel, cluster: Cluster, number: int) -> tuple[Pass, Pass]:
    tokens, tp = parallel.tokens, parallel.tensor
    gemm = multiplied(cluster, parallel, tokens * operations.projections(model, number) / tp)
    rotated = 0 if model.positions else (model.heads + model.kv_heads) * model.head_dim / tp
    around = model.hidden / parallel.sequence_split
    # forward: norm 2, residual 3, RoPE 2; backward: norm 3, residual 3, RoPE 2
    forward = moved(cluster, tokens * parallel.element * (5 * around + 2 * rotated))
    backward = moved(cluster, tokens * parallel.element * (6 * around + 2 * rotated))
    forward += quantised(cluster, parallel, tokens * (model.hidden + model.heads * model.v_head_dim / tp))
    made = (model.heads + model.kv_heads) * model.head_dim + model.kv_heads * model.v_head_dim
    backward += quantised(cluster, parallel, tokens * (made / tp + model.hidden))
    wait = exchanged(model, parallel, cluster)
    return Pass(gemm + forward, wait), Pass(2 * gemm + backward, wait)


def _ffn(model: Model, parallel: Parallel, cluster: Cluster, number: int) -> tuple[Pass, Pass]:
    tokens, b, up = parallel.tokens, parallel.element, 2 if model.gated else 1
    around = tokens * model.hidden / parallel.sequence_split
    if model.ffn_of(number) == EXPERTS:
        flops, width, moves, wait = _experts(model, parallel, cluster)
    else:
        flops = tokens * operations.ffn(model, number) / parallel.tensor
        width, moves = tokens * model.ffn_hidden / parallel.tensor, 0.0
        wait = Pass(tensor=exchanged(model, parallel, cluster))
    gemm = multiplied(cluster, parallel, flops)
    # forward: norm 2, residual 3, the activation reads one or two and writes one; backward: norm 3, residual 3, the
    # activation reads its input and a gradient and writes one or two
    forward = moved(cluster, b * (5 * around + (up + 1) * width + moves))
    backward = moved(cluster, b * (6 * around + (2 * up + 1) * width + moves))
    forward += quantised(cluster, parallel, tokens * model.hidden + width)
    backward += quantised(cluster, parallel, up * width + tokens * model.hidden)
    return wait._replace(dense=gemm + forward), wait._replace(dense=2 * gemm + backward)


def _experts(model: Model, parallel: Parallel, cluster: Cluster) -> tuple[float, float, float, Pass]:
    """FLOPs, intermediate elements, elements moved to permute tokens, and collectives, with balanced experts."""
    rows, tp, etp = parallel.tokens / parallel.sequence_split, parallel.tensor, parallel.expert_tensor
    routed = operations.mlp(model, model.expert_hidden * model.top_k)
    flops = parallel.expert_tokens * routed / etp + rows * 2 * model.hidden * model.experts
    flops += parallel.tokens * operations.mlp(model, model.shared_hidden) / tp
    width = parallel.expert_tokens * model.top_k * model.expert_hidden / etp
    width += parallel.tokens * model.shared_hidden / tp
    moves = 2 * rows * model.hidden * (1 + model.top_k)  # permute by expert, and back
    nbytes = rows * model.top_k * model.hidden * parallel.element
    sorting = cost(cluster, Group(parallel.expert, stride=etp), nbytes, "all_to_all")
    together = exchanged(model, parallel, cluster) if model.shared_hidden or not parallel.sequence_parallel else 0.0
    if parallel.sequence_parallel:
        among = Group(etp)
        together += cost(cluster, among, nbytes * etp, "all_gather")
        together += cost(cluster, among, nbytes * etp, "reduce_scatter")
    return flops, width, moves, Pass(tensor=together, expert=2 * sorting)


BUCKET = 40_000_000
"""Minimum elements of a gradient bucket, the last of which cannot overlap (``resolve_ddp_bucket_size``; a million per
rank, if that is more)."""
LOSS_IN_FLOAT32 = 12
"""Reads and writes of a float32 logit in the loss, forward and backward (``VocabParallelCrossEntropy``): copy, maximum,
difference (2), exponential (2), sum, quotient (2); product (2), copy."""


class Iteration(NamedTuple):
    """Seconds by part, on the slowest pipeline stage."""

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
        return self._asdict()

    @property
    def seconds(self) -> float:
        return sum(self)


class _Stage(NamedTuple):
    """Seconds of one micro-batch on one stage; the first six parts are those of ``Iteration``."""

    attention: float
    dense: float
    tensor: float
    expert: float
    embedding: float
    head: float
    messages: float
    backward: float
    """Included: the backward pass of layers."""
    on_card: float
    """Included in it: attention's messages keep the network card busy."""
    forward_on_card: float

    @property
    def seconds(self) -> float:
        return sum(self[:-3])

    @property
    def hides_gradients(self) -> float:
        """Seconds available to hide gradient collectives: layers compute and the card is free."""
        return max(0.0, self.backward - self.on_card)

    @property
    def hides_parameters(self) -> float:
        """Seconds available to hide parameter gathering."""
        return max(0.0, self.seconds - self.backward - self.forward_on_card)


def iteration(
    model: Model, parallel: Parallel, cluster: Cluster, attention: Seconds | Mapping[str, Seconds]
) -> Iteration:
    """Price one training iteration; ValueError if the model cannot be divided so, or rates are missing.

    attention: seconds of one call; or by letter of ``Model.attention_pattern``.
    """
    check(model, parallel)
    calls = dict.fromkeys(model.attention_pattern, attention) if isinstance(attention, Seconds) else attention
    stages = [_stage(model, parallel, cluster, calls, n) for n in range(parallel.pipeline)]
    last = [_update(model, parallel, cluster, n, stage) for n, stage in enumerate(stages)]
    one, m = max(stages, key=lambda stage: stage.seconds), parallel.microbatches
    filling = sum(stage.seconds for stage in stages) - one.seconds
    return Iteration(
        *(m * seconds for seconds in one[:6]),
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
            passes = layer(model, parallel, cluster, number, again)
            calls += n * (call.forward + call.backward + twice)
            backward += n * (call.backward + twice + sum(passes[1]))
            forward_on_card += n * call.forward_on_card
            on_card += n * (call.backward_on_card + (call.forward_on_card if twice else 0.0))
            total = added(total, (n * (f + b) for f, b in zip(*passes, strict=True)))
    last = stage == parallel.pipeline - 1
    predicted = sum(number >= model.layers for number in layers)
    ends = (stage == 0) + last * (1 + predicted)  # embedding and output layers
    # rows are read and written forward, and added to the float32 gradient backward
    embedded = parallel.tokens * model.hidden * (3 * parallel.element + 2 * GRADIENT)
    projection = 3 * parallel.tokens * operations.prediction(model) / parallel.tensor * predicted
    return _Stage(
        attention=calls,
        dense=total.dense + multiplied(cluster, parallel, projection),
        tensor=total.tensor + ends * exchanged(model, parallel, cluster),
        expert=total.expert,
        embedding=moved(cluster, embedded) if stage == 0 else 0.0,
        head=_head(model, parallel, cluster) * (1 + predicted) if last else 0.0,
        messages=_messages(model, parallel, cluster, stage),
        backward=backward,
        on_card=on_card,
        forward_on_card=forward_on_card,
    )


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
    own = device_parameters(p, stage_weights(model, p, number))
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
    if p.zero == 3:  # parameters gathered for every forward and backward, gradients reduced after every backward pass
        forward = max(0.0, gathers - stage.hides_parameters * p.overlap_parameters)
        backward = max(0.0, gathers + sums - stage.hides_gradients * p.overlap_gradients)
        return p.microbatches * (forward + backward)
    bucket = min(1.0, max(BUCKET, 1_000_000 * p.sharers) / max(1.0, elements))
    summing = max(sums - stage.hides_gradients, sums * bucket) if p.overlap_gradients else sums
    gathering = max(gathers - stage.hides_parameters, gathers * bucket) if p.overlap_parameters else gathers
    return summing + gathering
