"""Memory and time of trainings beside llm-analysis, a calculator by others: what both count is the same number.

What is counted otherwise is written out below, in its words: a test holds that there is no other difference.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from round_cluster import round_cluster

from cp_plugin.planner.explain import without
from cp_plugin.planner.machine.events import Seconds
from cp_plugin.planner.machine.hardware import cluster
from cp_plugin.planner.price import computes
from cp_plugin.planner.training import activations, operations
from cp_plugin.planner.training.footprint import Footprint, footprint, whole
from cp_plugin.planner.training.iteration import iteration
from cp_plugin.planner.training.model import model
from cp_plugin.planner.training.parallel import Parallel, problem

calculator = pytest.importorskip("llm_analysis.analysis", reason="llm-analysis is not installed: ci/calculators.sh")
from llm_analysis import config  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"
_STOCK: dict[str, Any] = {"sequence_parallel": True, "recompute_attention": True}
_SHORT: dict[str, Any] = {**_STOCK, "seq_length": 2048, "devices": 64, "tensor": 8, "pipeline": 8, "global_batch": 64}
_LONG: dict[str, Any] = {**_STOCK, "seq_length": 4096, "global_batch": 64}
CASES = {
    "llama2-7b, 8 data-parallel ranks": ("llama2-7b", Parallel(devices=8, **_LONG)),
    "the same, gradients shared, full recomputation": (
        "llama2-7b",
        Parallel(devices=8, zero=2, recompute="full", **_LONG),
    ),
    "llama2-70b, tensor 8 x pipeline 4 x data 2, selective": (
        "llama2-70b",
        Parallel(devices=64, tensor=8, pipeline=4, recompute="selective", **_LONG),
    ),
    "gpt3-175b, tensor 8 x pipeline 8": ("gpt3-175b", Parallel(**_SHORT)),
    "the same, full recomputation": ("gpt3-175b", Parallel(recompute="full", **_SHORT)),
}
each_case = pytest.mark.parametrize("case", CASES)
LINK = 300e9
STATES = ("weight_memory_per_gpu", "gradient_memory_per_gpu", "optimizer_state_memory_per_gpu")


class Both:
    """One case, counted by both."""

    def __init__(self, case: str, flops_per_s: float) -> None:
        logging.getLogger("llm-analysis").setLevel(logging.ERROR)
        name, self.parallel = CASES[case]
        self.model, p = model(name), self.parallel
        m = self.model
        wide = m.ffn_hidden * 3 // 2 if m.gated else m.ffn_hidden  # it has FFNs of two matrices alone
        self.theirs = calculator.LLMAnalysis(
            config.ModelConfig(
                name=m.name,
                num_layers=m.layers,
                n_head=m.heads,
                num_key_value_heads=m.kv_heads,
                hidden_dim=m.hidden,
                vocab_size=p.padded(m.vocab),
                max_seq_len=p.seq_length,
                ffn_embed_dim=wide,
                expansion_ratio=wide / m.hidden,
            ),
            config.GPUConfig(
                name="gpu",
                mem_per_GPU_in_GB=80,
                hbm_bandwidth_in_GB_per_sec=2000,
                intra_node_bandwidth_in_GB_per_sec=LINK / 1e9,
                intra_node_min_message_latency=0,
                peak_fp16_TFLOPS=flops_per_s / 1e12,
            ),
            config.DtypeConfig(),
            config.ParallelismConfig(tp_size=p.tensor, pp_size=p.pipeline, dp_size=p.data, sp_size=p.tensor),
            flops_efficiency=1.0,
        )
        self.found: dict[str, float] = self.theirs.training(
            batch_size_per_gpu=p.micro_batch,
            gradient_accumulation_steps=p.microbatches,
            global_batch_size=p.global_batch,
            seq_len=p.seq_length,
            activation_recomputation=calculator.ActivationRecomputation[p.recompute.upper()],
            ds_zero=calculator.DSZeRO(p.zero),
            layernorm_dtype_bytes=2,
        )
        self.alike = replace(m, tied=True, bias=False, norm="rms", positions=0, vocab=p.padded(m.vocab))
        """With what it knows: an output layer that is the embedding, no biases, no learned positions."""

    @property
    def footprint(self) -> Footprint:
        return footprint(self.model, self.parallel)

    @property
    def activations(self) -> float:
        """Its bytes of a layer."""
        return self.theirs.get_activation_memory_per_layer(
            self.parallel.micro_batch,
            self.parallel.seq_length,
            is_inference=False,
            activation_recomputation=calculator.ActivationRecomputation[self.parallel.recompute.upper()],
            layernorm_dtype_bytes=2,
        )

    @property
    def operations(self) -> float:
        """Of a sequence, with what it takes otherwise: attention sees everything, and any FFN is one of 4 h."""
        m, n = self.model, self.parallel.seq_length
        unseen = sum(operations.core(m, layer, n) for layer in range(m.layers))
        ffn = n * sum(16 * m.hidden**2 - operations.ffn(m, layer) for layer in range(m.layers))
        return operations.training(self.alike, n) + 3 * (unseen + ffn)


@cache
def both(case: str, flops_per_s: float = cluster("dgx-a100").device.gemm_flops_per_s["bfloat16"]) -> Both:
    return Both(case, flops_per_s)


@each_case
def test_parameters_are_the_same(case: str) -> None:
    assert whole(both(case).alike).total == both(case).found["num_params_total"]


@each_case
def test_operations_are_the_same(case: str) -> None:
    n = both(case).parallel.seq_length
    assert both(case).operations == pytest.approx(3 * both(case).theirs.get_num_flops_fwd_total(1, n), rel=1e-12)


@each_case
def test_parameters_gradients_and_optimizer_are_the_same(case: str) -> None:
    """It divides norms by the tensor-parallel ranks, too, and has the last one on every stage."""
    m, p = both(case).alike, both(case).parallel
    whole = footprint(m, p)
    assert whole.stage == 0 or p.pipeline == 1
    norms = m.hidden * (2 * m.layers // p.pipeline + (p.pipeline == 1)) * (1 - 1 / p.tensor)
    last = m.hidden / p.tensor * (p.pipeline > 1)
    for ours, theirs, shared, each in zip(
        (whole.parameters, whole.gradients, whole.optimizer), STATES, (3, 2, 1), (2, 4, 12), strict=True
    ):
        ranks = p.data if p.zero >= shared else 1
        assert ours - (norms - last) * each / ranks == pytest.approx(both(case).found[theirs], rel=1e-12)


@each_case
def test_activations_are_the_same(case: str) -> None:
    """Without recomputation it counts the output of attention twice, statistics of its rows in 8 bytes, keys and values
    of all query heads, and a mask of dropout; and not that q and k before their rotation stay allocated with v."""
    m, p = both(case).model, both(case).parallel
    tokens, element, tp = p.tokens, p.element, p.tensor
    theirs = both(case).activations
    if p.recompute != "full":
        theirs -= tokens * m.hidden / p.sequence_split
        theirs -= 2 * tokens * element * (m.heads - m.kv_heads) * m.head_dim / tp
        theirs += 0 if m.positions else tokens * element * (m.heads + m.kv_heads) * m.head_dim / tp
    if p.recompute == "none":
        theirs -= tokens * element * 2 * m.hidden / tp
        theirs -= tokens * (8 - activations.LSE) * m.heads / tp
    assert activations.kept(m, p, 0) == pytest.approx(theirs, rel=1e-12)
    assert both(case).footprint.activations == pytest.approx(m.layers * theirs), "whatever the number of stages"


@each_case
def test_time_of_computing_is_the_same(case: str) -> None:
    """Where messages take next to nothing. Its pipeline stages never wait, so ours are added up; full recomputation
    repeats its output layer, too, and any FFN is one of 4 h."""
    rate = 1e12
    m, p = both(case, rate).model, both(case, rate).parallel
    free = without(round_cluster(flops_per_s=rate, intra=(0, 1e14), inter=(0, 1e14)), "memory")
    scores = 4 * p.seq_length**2 * m.hidden / p.tensor / rate  # of all keys
    found = iteration(m, p, free, Seconds(scores, 2 * scores))
    one = (found.attention + found.dense + found.head) / p.microbatches
    ours = found.attention + found.dense + found.head + found.pipeline - (p.microbatches - 1) * one
    repeated = 4 / 3 if p.recompute == "full" else 1
    ffn = sum(16 * m.hidden**2 - operations.ffn(m, layer) for layer in range(m.layers))
    ffn_s = 3 * repeated * p.tokens * ffn / p.tensor / rate
    head_s = (repeated - 1) * 3 * p.tokens * operations.head(m, p.padded(m.vocab)) / p.tensor / rate
    theirs = both(case, rate).found["latency_per_micro_batch"] * p.pipeline - ffn_s - head_s
    assert ours == pytest.approx(theirs, rel=1e-5)


@each_case
def test_tensor_parallel_ranks_wait_as_long(case: str) -> None:
    """An all-reduce after attention and FFN, forward and backward, and where these are repeated."""
    m, p = both(case).model, both(case).parallel
    links = round_cluster(flops_per_s=1e15, per_node=8, nics=8, intra=(0, LINK), inter=(0, 1e14))
    found = iteration(m, p, links, Seconds(0, 0))
    one = both(case).theirs.get_latency_fwd_per_layer_tp_comm(p.micro_batch, p.seq_length, p.element)
    layers, ends = m.layers // p.pipeline, 2 if p.pipeline == 1 else 1
    times = layers * (6 if p.recompute == "full" else 4) + ends
    assert found.tensor_parallel == pytest.approx(p.microbatches * times * one)


def test_the_page_has_the_ratios() -> None:
    """Ours over theirs as both stand, on nodes of 8 A100 with their rate for large matrices."""
    print(table := "\n".join(_table()))
    assert table in PAGE.read_text(encoding="utf-8")


def _table() -> list[str]:
    heads = ("training", "parameters", "operations", "parameters, gradients, optimizer", "activations", "time")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    machine = cluster("dgx-a100")
    for case in CASES:
        b = both(case)
        m, p, found, held = b.model, b.parallel, b.found, b.footprint
        states = held.parameters + held.gradients + held.optimizer
        seconds = iteration(m, p, machine, computes(problem(m, p), machine)).seconds
        ratios = (
            whole(m).total / found["num_params_total"],
            operations.training(m, p.seq_length) / (3 * b.theirs.get_num_flops_fwd_total(1, p.seq_length)),
            states / sum(found[name] for name in STATES),
            held.activations / (m.layers * b.activations),
            seconds / found["latency_per_iter"],
        )
        lines.append(f"| {case} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |")
    return lines
