"""Memory footprint: against independent formulas, published figures, and monotonicity."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cp_plugin.planner.training import activations, weights
from cp_plugin.planner.training.footprint import (
    ADAM,
    COMMUNICATOR,
    FRAGMENTATION,
    GRADIENT,
    MASTER,
    RUNTIME,
    count_in_flight,
    footprint,
    stage_weights,
    whole,
)
from cp_plugin.planner.training.model import Model, model
from cp_plugin.planner.training.parallel import Parallel

GPT = Model(name="gpt", layers=8, hidden=512, heads=8, ffn_hidden=2048, gated=False, vocab=32000, positions=1024)
LLAMA = Model(name="llama", layers=8, hidden=512, heads=8, kv_heads=4, ffn_hidden=1024, vocab=32000)
MIXED = replace(LLAMA, ffn_pattern="DE", experts=8, top_k=2, expert_hidden=256, shared_hidden=128)
MIXED = replace(MIXED, attention_pattern="NL", linear="gla")
LATENT = replace(LLAMA, kv_heads=8, head_dim=96, v_head_dim=64, q_rank=128, kv_rank=64, rope_dim=32)


def test_parts_add_up() -> None:
    shape, peaks = Parallel(devices=64, context=8, seq_length=2**17), (1e9, 3e9)
    needs = footprint(model("llama3-8b"), shape, peaks)
    assert needs.attention == 3e9 and needs.communicators == 0
    assert replace(needs, logits=0).temporaries == needs.recomputed + 3e9
    assert sum(needs.parts.values()) == needs.total
    more = footprint(model("llama3-8b"), shape, peaks, communicators=3)
    assert more.communicators == 2 * COMMUNICATOR and more.total == needs.total + 2 * COMMUNICATOR
    assert needs.margin == FRAGMENTATION * (needs.activations + needs.temporaries) + RUNTIME


@pytest.mark.parametrize(
    ("zero", "dtype", "per_parameter"),
    [
        (0, "bfloat16", 18),
        (1, "bfloat16", 6 + 12 / 16),
        (2, "bfloat16", 2 + 16 / 16),
        (0, "float32", 16),
        (1, "float32", 8 + 8 / 16),
    ],
)
def test_bytes_of_a_parameter(zero: int, dtype: str, per_parameter: float) -> None:
    """Shared by the ranks that differ in data or context: 4 x 4."""
    p = Parallel(devices=16, context=4, zero=zero, dtype=dtype)
    needs = footprint(LLAMA, p)
    states = needs.parameters + needs.gradients + needs.optimizer
    assert states == pytest.approx(per_parameter * whole(LLAMA).total)


def test_fully_sharded_parameters_are_gathered_by_layer() -> None:
    total = whole(LLAMA).total
    layer = weights.attention(LLAMA, 0).total + weights.ffn(LLAMA, 0).total
    needs = footprint(LLAMA, Parallel(devices=64, zero=3))
    assert needs.parameters == 2 * (total / 64 + 2 * layer)
    assert needs.gradients == GRADIENT * (total / 64 + layer)
    assert needs.optimizer == (ADAM + MASTER) * total / 64


def test_experts_have_their_own_sharding() -> None:
    p = Parallel(devices=16, expert=8, tensor=2, sequence_parallel=True, expert_tensor=1, zero=0, dtype="float32")
    held = stage_weights(MIXED, p, 0)
    assert footprint(MIXED, p).gradients == GRADIENT * (held.sharded / 2 + held.replicated + held.routed / 8)
    shared = footprint(MIXED, replace(p, zero=1)).optimizer
    assert shared == pytest.approx(ADAM * ((held.sharded / 2 + held.replicated) / 8 + held.routed / 8 / 2))


def test_tied_embedding_is_on_both_ends() -> None:
    p = Parallel(devices=4, pipeline=4)
    ends = [stage_weights(replace(LLAMA, tied=True), p, stage).sharded for stage in (0, 1, 3)]
    assert ends[0] == ends[2] == ends[1] + p.padded(32000) * 512
    assert sum(stage_weights(LLAMA, p, n).total for n in range(4)) == whole(LLAMA).total


@pytest.mark.parametrize(
    ("tensor", "sequence_parallel", "factor"),
    [(1, False, 32), (4, False, 8 + 24 / 4), (4, True, 32 / 4)],
)
def test_activations_of_a_layer(tensor: int, sequence_parallel: bool, factor: float) -> None:
    """s b h (34 + 5 a s / h), table 2 of arXiv 2205.05198, without scores, and without the two masks of dropout."""
    p = Parallel(devices=tensor, tensor=tensor, sequence_parallel=sequence_parallel, seq_length=1024, micro_batch=2)
    row_sums = 4 * 1024 * 2 * 8 / tensor
    assert activations.whole(GPT, p, 0) == 1024 * 2 * 512 * factor + row_sums


def test_context_parallel_ranks_shard_the_tokens() -> None:
    p = Parallel(devices=8, seq_length=8192, global_batch=8)
    for m in (GPT, LLAMA, MIXED, LATENT):
        divided = replace(p, context=8, global_batch=8)
        assert activations.whole(m, divided, 1) == activations.whole(m, p, 1) / 8


def test_what_full_recomputation_keeps() -> None:
    p = Parallel(seq_length=1024, recompute="full", recompute_attention=True)
    sbh = 1024 * 512
    assert activations.kept(LLAMA, p, 0) == 2 * sbh
    assert activations.kept(LLAMA, replace(p, recompute_group=4), 0) == 2 * sbh / 4
    assert activations.kept(LLAMA, replace(p, recompute_attention=False), 0) == 4 * sbh + 4 * 8 * 1024
    some, none = (footprint(LLAMA, replace(p, recompute_layers=n)).activations for n in (3, 8))
    assert some == 3 * 2 * sbh + 5 * activations.whole(LLAMA, p, 0) and none == 8 * 2 * sbh


def test_what_full_recomputation_restores() -> None:
    """The largest group of layers, of four dense ones and four with experts."""
    p = Parallel(seq_length=1024, recompute="full", recompute_group=3)
    gaps = [activations.whole(MIXED, p, n) - activations.kept(MIXED, p, n) for n in (0, 1)]
    assert gaps[0] != gaps[1] and footprint(MIXED, p).recomputed == pytest.approx(3 * max(gaps))
    all_of_them = footprint(MIXED, replace(p, recompute_group=8))
    per_layer = 2 * 1024 * 512 / 8
    assert all_of_them.recomputed == pytest.approx(4 * sum(gaps) + 8 * (1024 * 512 * 2 / 3 - per_layer))


@pytest.mark.parametrize(
    ("m", "modules", "dropped"),
    [
        (LLAMA, ("layernorm",), {"attention norm output", "FFN norm output"}),
        (LLAMA, ("mlp",), {"FFN first product", "FFN activation"}),
        (LLAMA, ("core_attn",), {"attention lse"}),
        (LATENT, ("mla_up_proj",), {"q, k and v"}),
        (MIXED, ("moe_act",), {"experts' activation"}),
        (
            MIXED,
            ("moe",),
            {"router", "tokens of experts", "experts' first product", "experts' activation", "shared expert"},
        ),
    ],
)
def test_what_selective_recomputation_drops(m: Model, modules: tuple[str, ...], dropped: set[str]) -> None:
    plain = Parallel()
    p = Parallel(recompute="selective", recompute_modules=modules, recompute_attention=True)
    number = 0 if m is not MIXED else 1
    inventory = {tensor.name: tensor.nbytes for tensor in activations.layer(m, plain, number)}
    assert dropped <= inventory.keys()
    kept = sum(nbytes for name, nbytes in inventory.items() if name not in dropped)
    assert activations.kept(m, p, number) == kept


def test_micro_batches_in_flight() -> None:
    p = Parallel(devices=4, pipeline=4, global_batch=16)
    assert [count_in_flight(p, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert count_in_flight(replace(p, global_batch=2), 0) == 2
    chunks = replace(p, virtual=2)
    assert count_in_flight(chunks, 0) == 4 * (1 + 3 / (4 * 2)), "as Megatron's theoretical_memory_usage has it"


def test_only_the_last_stage_has_logits() -> None:
    p = Parallel(devices=2, pipeline=2, global_batch=4, seq_length=1024)
    m = replace(GPT, vocab=500_000)
    last = footprint(m, p)
    assert last.stage == 1 and last.logits == 2 * 2 * 1024 * 512 + 1024 * p.padded(500_000) * (2 + 4)
    assert footprint(replace(m, vocab=512), p).stage == 0, "which holds more micro-batches"


def test_published_memory() -> None:
    """BurstEngine (the authors' sheet): 14B, 1M tokens on 32 GPUs, 54.0 GB with attention outputs kept, 41.45 without.

    LASP-2, table 6: 28.7 GB at 2,048 tokens a GPU, 57.8 at 16,384. The constant part depends on an optimizer that is
    not stated; the growth does not.
    """
    p = Parallel(devices=32, context=32, seq_length=2**20, zero=3, recompute="full")
    m = model("burstengine-14b")
    without = footprint(m, replace(p, recompute_attention=True)).activations
    kept = (footprint(m, p).activations - without) / 2**30
    assert kept == pytest.approx(54.0 - 41.45, rel=0.05)

    def total(tokens: int) -> float:
        return footprint(model("linear-llama3-1b"), Parallel(devices=16, context=16, seq_length=16 * tokens)).total

    growth = (total(16384) - total(2048)) / 1e9
    assert growth == pytest.approx(57.8 - 28.7, rel=0.2)
