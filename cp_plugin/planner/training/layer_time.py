"""Time of a layer excluding attention itself, per micro-batch and device.

matrix products    FLOPs over the device's rate for large matrices; twice as many in a backward
memory-bound       bytes over memory bandwidth: norms, residuals, RoPE, activation, casts to FP8
collectives        of tensor and expert parallelism, blocking
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cp_plugin.common.names import not_one_of
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.machine.links import Group, all_reduce, cost
from cp_plugin.planner.training import operations
from cp_plugin.planner.training.model import EXPERTS, Model
from cp_plugin.planner.training.parallel import Parallel


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


class Both(NamedTuple):
    forward: Pass
    backward: Pass
    """Includes recomputation."""


def layer(model: Model, parallel: Parallel, cluster: Cluster, number: int, repeated: bool) -> Both:
    """Price layer ``number``; ``repeated``: full recomputation applies. ValueError for a dtype without a rate."""
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
    return Both(forward, backward)


def multiplied(cluster: Cluster, parallel: Parallel, flops: float) -> float:
    rates = cluster.device.gemm_flops_per_s
    if parallel.gemm_dtype not in rates:
        lacking = f"{cluster.device.name} has no matrix-product rate for {parallel.gemm_dtype}"
        raise ValueError(not_one_of(lacking, parallel.gemm_dtype, rates))
    return flops / rates[parallel.gemm_dtype]


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
    flops = parallel.expert_tokens * operations.routed(model) / etp + rows * 2 * model.hidden * model.experts
    flops += parallel.tokens * operations.shared(model) / tp
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
