"""Iteration time by part, against hand calculations on a machine with round figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from evidence.experiment import core_flops, training_flops
from round_cluster import round_cluster

from cp_plugin.planner.machine.events import Seconds
from cp_plugin.planner.machine.hardware import cluster, override
from cp_plugin.planner.machine.links import Group, all_reduce, cost, message
from cp_plugin.planner.training import operations
from cp_plugin.planner.training.iteration import Iteration, iteration
from cp_plugin.planner.training.model import Model
from cp_plugin.planner.training.parallel import Parallel

CLUSTER = round_cluster(flops_per_s=100e12, per_node=8, intra=(0.0, 100e9), inter=(0.0, 10e9), nics=4)
LINK = CLUSTER.intra
LLAMA = Model(name="llama", layers=8, hidden=1024, heads=8, kv_heads=4, ffn_hidden=4096, vocab=32000)
NO_ATTENTION = Seconds(0.0, 0.0)


def dense(parts: Iteration) -> float:
    return parts.dense + parts.head + parts.embedding


def test_matrix_products_take_their_flops() -> None:
    p = Parallel(seq_length=8192, global_batch=4)
    one = iteration(LLAMA, p, CLUSTER, NO_ATTENTION)
    attention = 3 * 4 * sum(core_flops(LLAMA, n, 8192) for n in range(8))
    rest = training_flops(LLAMA, 8192, 4) - attention
    assert dense(one) == pytest.approx(rest / 100e12, rel=0.05)
    assert one.seconds == sum(one.parts.values())
    assert one.tensor_parallel == one.expert_parallel == one.pipeline == one.gradients == 0
    m, p = replace(LLAMA, vocab=128), Parallel(seq_length=128, global_batch=64)
    seconds = iteration(m, p, CLUSTER, NO_ATTENTION).seconds
    assert seconds == pytest.approx(training_flops(m, 128, 64) / 100e12, rel=0.05)
    with pytest.raises(ValueError, match=r"round has no matrix-product rate for float8.*one of bfloat16"):
        iteration(LLAMA, Parallel(gemm_dtype="float8"), CLUSTER, NO_ATTENTION)


def test_memory_bound_operations() -> None:
    """A Llama layer reads and writes, forward and backward: 11 h around attention and FFN each, RoPE, SwiGLU."""
    slow = override(CLUSTER, device={"memory_bytes_per_s": 1e12})
    p = Parallel(seq_length=8192)
    seconds = iteration(LLAMA, p, slow, NO_ATTENTION).dense - iteration(LLAMA, p, CLUSTER, NO_ATTENTION).dense
    elements = 2 * 11 * 1024 + 4 * (8 + 4) * 128 + (3 + 5) * 4096
    assert seconds == pytest.approx(8 * 8192 * 2 * elements / 1e12, rel=0.02)


@pytest.mark.parametrize(("tensor", "context"), [(2, 1), (1, 4), (4, 2)])
def test_ranks_share_products(tensor: int, context: int) -> None:
    one = iteration(LLAMA, Parallel(seq_length=8192), CLUSTER, NO_ATTENTION)
    p = Parallel(devices=tensor * context, tensor=tensor, context=context, seq_length=8192)
    assert dense(iteration(LLAMA, p, CLUSTER, NO_ATTENTION)) == pytest.approx(dense(one) / p.devices, rel=0.02)


def test_attention_counts_per_call() -> None:
    p = Parallel(seq_length=8192, global_batch=4)
    assert iteration(LLAMA, p, CLUSTER, Seconds(1.0, 2.5)).attention == 4 * 8 * 3.5
    mixed = replace(LLAMA, attention_pattern="LLLN", linear="basic")
    kinds = {"L": Seconds(0.25, 0.5), "N": Seconds(1.0, 2.5)}
    assert iteration(mixed, p, CLUSTER, kinds).attention == 4 * (6 * 0.75 + 2 * 3.5)
    with pytest.raises(KeyError, match="L"):
        iteration(mixed, p, CLUSTER, {"N": Seconds(1.0, 2.5)})


def test_full_recomputation_repeats_the_forward() -> None:
    plain, p = Parallel(seq_length=8192), Parallel(seq_length=8192, recompute="full")
    before, after = (iteration(LLAMA, q, CLUSTER, Seconds(1.0, 2.0)) for q in (plain, p))
    assert after.dense == pytest.approx(before.dense * 4 / 3, rel=0.01)
    assert after.attention == before.attention, "its output is kept"
    again = iteration(LLAMA, replace(p, recompute_attention=True), CLUSTER, Seconds(1.0, 2.0))
    assert again.attention == 8 * 4.0
    some = iteration(LLAMA, replace(p, recompute_layers=4), CLUSTER, Seconds(1.0, 2.0))
    assert some.dense == pytest.approx((before.dense + after.dense) / 2)
    modules = replace(plain, recompute="selective", recompute_modules=("mlp",))
    products = 8 * 8192 * operations.ffn(LLAMA, 0) / 100e12
    assert iteration(LLAMA, modules, CLUSTER, NO_ATTENTION).dense - before.dense == pytest.approx(products, rel=0.01)


def test_pipeline_bubble() -> None:
    m = replace(LLAMA, vocab=128)
    p = Parallel(devices=4, pipeline=4, seq_length=8192, global_batch=8)
    still = override(CLUSTER, intra={"bytes_per_s": 1e14})
    piped = iteration(m, p, still, Seconds(0.01, 0.02))
    busy = piped.attention + piped.dense
    assert piped.pipeline == pytest.approx(busy * 3 / 8, rel=0.01)
    chunks = iteration(m, replace(p, virtual=2), still, Seconds(0.01, 0.02))
    assert chunks.pipeline == pytest.approx(piped.pipeline / 2, rel=0.02)
    messages = iteration(m, p, CLUSTER, Seconds(0.01, 0.02)).pipeline - piped.pipeline
    per_stage = 8 * 2 + 4  # of a middle stage, and those of the others once
    assert messages == pytest.approx(per_stage * 8192 * 1024 * 2 / 100e9, rel=0.02)


def test_tensor_parallel_collectives() -> None:
    p = Parallel(devices=4, tensor=4, seq_length=8192)
    divided = iteration(LLAMA, p, CLUSTER, NO_ATTENTION)
    part = 8192 * 1024 * 2 * 3 / 4 / 100e9
    assert divided.tensor_parallel == pytest.approx((8 * 2 * 4 + 2 * 2) * part), "layers, embedding and output layer"
    assert iteration(LLAMA, replace(p, sequence_parallel=True), CLUSTER, NO_ATTENTION).tensor_parallel == (
        divided.tensor_parallel
    )


def test_experts_exchange_tokens() -> None:
    m = replace(LLAMA, ffn_pattern="E", experts=8, top_k=2, expert_hidden=512)
    p = Parallel(devices=8, expert=8, seq_length=8192)
    routed = iteration(m, p, CLUSTER, NO_ATTENTION)
    sent = 8192 * 2 * 1024 * 2 * 7 / 8
    assert routed.expert_parallel == pytest.approx(8 * 4 * sent / 100e9)
    assert routed.tensor_parallel == 0
    assert routed.dense == pytest.approx(
        8 * 3 * 8192 * (operations.projections(m, 0) + operations.ffn(m, 0)) / 100e12, rel=0.02
    )
    shared = iteration(replace(m, shared_hidden=512), p, CLUSTER, NO_ATTENTION)
    extra = 8 * 3 * 8192 * operations.mlp(m, 512) / 100e12
    assert shared.dense - routed.dense == pytest.approx(extra, rel=0.02)
    split = Parallel(devices=8, tensor=2, sequence_parallel=True, expert=4, seq_length=8192)
    assert iteration(m, split, CLUSTER, NO_ATTENTION).dense == pytest.approx(routed.dense / 2, rel=0.02)


def test_gradient_collectives_overlap_with_the_backward() -> None:
    p = Parallel(devices=8, seq_length=8192)
    elements = 8 * (1024 * (1024 + 2 * 512) + 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024) + 1024
    elements += 2 * 1024 * p.padded(32000)
    sums, gathers = (elements * size * 7 / 8 / 100e9 for size in (4, 2))
    alone = replace(p, overlap_gradients=False, overlap_parameters=False)
    plain, sharded = (iteration(LLAMA, replace(alone, zero=zero), CLUSTER, NO_ATTENTION) for zero in (p.zero, 3))
    assert plain.gradients == pytest.approx(sums + gathers)
    assert sharded.gradients == pytest.approx(sums + 2 * gathers), "parameters for the backward pass, too"
    assert iteration(LLAMA, replace(p, zero=3), CLUSTER, Seconds(1.0, 1.0)).gradients == 0
    bucket = 40e6 / elements
    assert iteration(LLAMA, p, CLUSTER, NO_ATTENTION).gradients == pytest.approx((sums + gathers) * bucket)
    slow = override(CLUSTER, intra={"bytes_per_s": 1e9})
    late = iteration(LLAMA, p, slow, NO_ATTENTION)
    assert 0.5 * 100 * (sums + gathers) < late.gradients < 100 * (sums + gathers)
    later = iteration(LLAMA, p, slow, Seconds(0.0, 0.01))
    assert late.gradients - later.gradients == pytest.approx(8 * 0.01), "hidden by so much more backward"


def test_fp8_products_cast_their_inputs() -> None:
    """Four bytes an element: inputs in a forward pass, gradients in a backward."""
    slow = override(CLUSTER, device={"memory_bytes_per_s": 1e12, "gemm_flops_per_s": {"float8": 100e12}})
    p = Parallel(seq_length=8192)
    plain, cast = (replace(p, gemm_dtype=dtype) for dtype in ("bfloat16", "float8"))
    wide, narrow = (iteration(LLAMA, of, slow, NO_ATTENTION).dense for of in (plain, cast))
    inputs, gradients = 1024 + 1024 + 1024 + 4096, (1024 + 2 * 512) + 1024 + 2 * 4096 + 1024
    assert narrow - wide == pytest.approx(8 * 8192 * 4 * (inputs + gradients) / 1e12)


def test_optimizer_is_sharded() -> None:
    slow = override(CLUSTER, device={"memory_bytes_per_s": 1e12})
    p = Parallel(devices=8, context=8, seq_length=8192)
    whole, shared = (iteration(LLAMA, replace(p, zero=zero), slow, NO_ATTENTION).optimizer for zero in (0, 2))
    assert whole == pytest.approx(8 * shared)


def test_collectives_by_hand() -> None:
    gb = 1e9
    assert cost(CLUSTER, Group(1), gb, "all_gather") == cost(CLUSTER, Group(1), gb, "all_to_all") == 0
    assert cost(CLUSTER, Group(8), gb, "all_gather") == pytest.approx(7 / 8 / 100)
    assert cost(CLUSTER, Group(16), gb, "all_gather") == pytest.approx(15 / 16 / 40), "one ring, four cards"
    assert cost(CLUSTER, Group(16, stride=8), gb, "all_gather") == pytest.approx(15 / 16 / 5), "eight rings, four cards"
    assert all_reduce(CLUSTER, Group(4), gb) == pytest.approx(2 * 3 / 4 / 100)
    assert cost(CLUSTER, Group(8), gb, "all_to_all") == pytest.approx(7 / 8 / 100)
    assert cost(CLUSTER, Group(16), gb, "all_to_all") == pytest.approx(8 / 16 / 5)
    assert message(CLUSTER, 4, gb) == 1 / 100 and message(CLUSTER, 8, gb) == 1 / 5
    late = override(CLUSTER, intra={"latency_s": 1e-5}, inter={"latency_s": 1e-4})
    assert cost(late, Group(8), 0, "all_gather") == pytest.approx(7e-5)
    assert cost(late, Group(64), 0, "all_gather") == pytest.approx(7 * 7e-5 / 7 + 7e-4), "measured: every step of it"
    own = {"all_gather": LINK.model_copy(update={"bytes_per_s": 2.5e9})}
    measured = override(CLUSTER, inter={"verbs": own})
    assert cost(measured, Group(16), gb, "all_gather") == pytest.approx(15 / 16 / 10), "four cards"
    assert cost(measured, Group(16), gb, "reduce_scatter") == cost(CLUSTER, Group(16), gb, "reduce_scatter")


def test_nccl_rings_by_hand() -> None:
    """LL for short messages, LL128 between, Simple for long ones; a tree with one rank per node."""
    nvlink, one_each = cluster("dgx-h100"), cluster("h100-1-per-node")
    mib, rate, card = 2.0**20, 370e9, 48e9
    assert cost(nvlink, Group(8), 0, "all_gather") == pytest.approx(6.6e-6 + 7 * 0.6e-6)
    assert cost(nvlink, Group(8), mib, "all_gather") == pytest.approx(10.8e-6 + 4 * 7 / 8 * mib / rate)
    assert cost(nvlink, Group(8), 8 * mib, "all_gather") == pytest.approx(14e-6 + 7 * 1.9e-6 + 7 * mib / 0.92 / rate)
    assert cost(nvlink, Group(8), 256 * mib, "all_gather") == pytest.approx(32.2e-6 + 224 * mib / rate)
    across = 8.4e-6 + 56 * 3.4e-6 + 7 * 14e-6 + 1008 * mib / min(rate, 8 * card)
    assert cost(nvlink, Group(64), 1024 * mib, "all_gather") == pytest.approx(across), (
        "56 steps inside nodes, 7 between"
    )
    assert cost(one_each, Group(64), 0, "all_gather") == pytest.approx(8.4e-6 + 6 * 14e-6), "six levels"
    assert cost(nvlink, Group(8), mib, "all_to_all") == pytest.approx(11.8e-6 + 7 / 8 * mib / rate)
    sends = override(one_each, inter={"verbs": {"exchange": {"latency_s": 30e-6, "bytes_per_s": card / 2}}})
    assert message(one_each, 1, mib) == pytest.approx(22.4e-6 + mib / card)
    assert message(sends, 1, mib) == pytest.approx(30e-6 + 2 * mib / card), "figures of a verb of its own"


def test_attention_messages_compete_with_gradients() -> None:
    p = Parallel(devices=8, context=8, seq_length=8192)
    slow = override(CLUSTER, per_node=1, nics=1, inter={"bytes_per_s": 1e9})
    sums = iteration(LLAMA, replace(p, overlap_gradients=False, overlap_parameters=False), slow, NO_ATTENTION).gradients
    own = sums / LLAMA.layers  # seconds of attention's backward, in which as long as gradients take may travel
    free, busy, half = (
        iteration(LLAMA, p, slow, Seconds(own, own, on_card, on_card)).gradients for on_card in (0.0, own, own / 2)
    )
    assert free < half < busy <= sums
