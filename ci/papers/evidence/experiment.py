"""Prediction of a published row: attention from its timeline, the rest of a step from the planner's iteration.

training        a step, forward and backward, of all layers
prefill         the forward pass of all layers, and the output layer for the last token
attention ...   one call
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, sqrt

import torch

from cp_plugin.engine.attention.calls import Setup, settled
from cp_plugin.engine.core.options import Options, grids
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.linear.variants import variants
from cp_plugin.engine.methods import registry as providers
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.events import Attention, Event, Post, Seconds
from cp_plugin.planner.machine.hardware import Cluster, Device
from cp_plugin.planner.machine.kernel_time import pairs
from cp_plugin.planner.machine.kernel_time import seconds as computing
from cp_plugin.planner.machine.links import Links
from cp_plugin.planner.trace.program import Program, join_tiles
from cp_plugin.planner.trace.timeline import links_of, programs_of
from cp_plugin.planner.trace.timeline import run as simulated
from cp_plugin.planner.training import operations
from cp_plugin.planner.training.footprint import footprint, whole
from cp_plugin.planner.training.iteration import iteration, layer, multiplied
from cp_plugin.planner.training.model import LINEAR, SOFTMAX, WINDOW, Model, model
from cp_plugin.planner.training.parallel import Parallel
from cp_plugin.planner.training.parallel import problem as problem_of
from evidence.data import Method, Row, Stack, method, paper
from evidence.overlapped import OVERLAPPED

GB = 2**30
"""As reported by PyTorch and Megatron."""
ADAM_ON_HOST = 28
"""Bytes per parameter: three float32 states read and written, a 16-bit gradient and parameter."""
HOST_BYTES_PER_S = 100e9
"""Memory bandwidth of a node (assumption: a quarter of two sockets' 410 GB/s)."""
TO_AND_FROM_HOST = 4 / 24e9
"""Seconds per parameter to send a 16-bit gradient to the host and a parameter back over PCIe 4."""


def cluster_of(stack: Stack) -> Cluster:
    """The cluster, with the kernels of its software."""
    cluster, dtype = hardware.override(hardware.cluster(stack.base), **stack.override), stack.attention_dtype
    if stack.tile is None:
        return cluster
    kernel = cluster.device.attention[dtype].model_copy(update={"block": stack.tile})
    changes = {  # a program of XLA: no blocks, no host
        "processors": 0, "host_launch_s": 0.0, "host_post_s": 0.0,
        "attention": {**cluster.device.attention, dtype: kernel},
    }  # fmt: skip
    return cluster.model_copy(update={"device": cluster.device.model_copy(update=changes)})


@dataclass(frozen=True, slots=True)
class Run:
    """One method in the setting of a row."""

    row: Row
    method: Method
    stack: Stack

    @property
    def model(self) -> Model:
        """With softmax attention, linear attention or both."""
        linear, period = self.method.linear, self.row.softmax_layers
        pattern = LINEAR * (period - 1) + SOFTMAX if period else LINEAR
        return replace(model(self.row.model), attention_pattern=pattern if linear else SOFTMAX, linear=linear)

    @property
    def parallel(self) -> Parallel:
        tensor = self.row.devices if self.method.tensor_parallel else self.row.tensor
        chosen = dict(self.stack.training)
        if self.method.zero:
            chosen["zero"] = self.method.zero
        return Parallel(
            devices=self.row.devices,
            tensor=tensor,
            context=self.row.devices // tensor,
            sequence_parallel=self.method.sequence_parallel,
            micro_batch=self.row.batch,
            seq_length=self.row.length,
            **chosen,
        )

    @property
    def attention_recomputed(self) -> float:
        return max(self.method.attention_recomputed, self.row.attention_recomputed)

    def problem(self, letter: str) -> Problem:
        problem = problem_of(self.model, self.parallel, letter)
        return replace(problem, dtype=getattr(torch, self.stack.attention_dtype), causal=self.method.causal)

    def setup(self, letter: str) -> Setup:
        """The resolved setup; ValueError if the provider cannot run the problem."""
        problem, m = self.problem(letter), self.method
        if m.tensor_parallel:
            return settled(providers.get("ring"), problem, Options())
        if m.linear and letter == SOFTMAX:  # LASP-2H
            return settled(providers.get("all_gather"), problem, Options(layout=m.layout, head_groups=1))
        options = Options(
            layout=m.layout,
            grid=min(grids(problem.size), key=lambda grid: abs(grid[0] - grid[1])) if m.grid == "square" else None,
            head_groups=m.head_groups,
            head_parallel=min(m.head_parallel, problem.size) if m.head_parallel else None,
            intra_size=min(m.intra_size, problem.size // (m.head_parallel or 1)) if m.intra_size else None,
            backward=m.backward,
        )
        provider = OVERLAPPED if m.provider == OVERLAPPED.name else providers.get(m.provider)
        return settled(provider, problem, options)


def predict(row: Row) -> float:
    """Predict a row's figure; ValueError for an unsupported problem or unknown unit."""
    run = Run(row, method(row, row.method), paper(row.paper).clusters[row.cluster])
    if row.figure == "GB":
        return _memory(run) / GB
    cluster = cluster_of(run.stack)
    seconds = _seconds(run, cluster)
    match row.figure:
        case "s":
            return seconds
        case "speedup":
            return _seconds(replace(run, method=method(row, row.baseline)), cluster) / seconds
        case "tokens/s":
            return row.batch * row.length / seconds
        case "tokens/s/GPU":
            return row.batch * row.length / row.devices / seconds
        case "TFLOP/s/GPU":
            return _attention_flops(run) / row.devices / seconds / 1e12
        case "model TFLOP/s/GPU":
            return training_flops(run.model, row.length, row.batch) / row.devices / seconds / 1e12
        case "% of ideal":
            alone = replace(run, row=replace(row, devices=1), method=Method(provider="ring"))
            return 100 * _seconds(alone, cluster) / row.devices / seconds
    raise ValueError(f"row of {row.table}: nothing predicts {row.figure!r}")


def _seconds(run: Run, cluster: Cluster) -> float:
    match run.row.work:
        case "training":
            calls = {letter: _attention(run, letter, cluster) for letter in dict.fromkeys(run.model.attention_pattern)}
            parts = iteration(run.model, run.parallel, cluster, calls).parts
            if run.row.recipe == "offload":
                parts["optimizer"] = _update_on_hosts(run, cluster)
            if not run.method.gradients_summed:
                parts["gradients"] = 0.0
            return sum(parts.values())
        case "prefill":
            return _prefill(run, cluster)
        case "attention forward":
            return _attention(run, SOFTMAX, cluster).forward
        case "attention backward":
            return _attention(run, SOFTMAX, cluster).backward
    return sum(_attention(run, SOFTMAX, cluster)[:2])


def _attention(run: Run, letter: str, cluster: Cluster) -> Seconds:
    """One call. Without overlap all ranks wait for the busiest one in every round."""
    setup, stride = run.setup(letter), run.parallel.tensor
    programs = _programs(setup)
    if run.method.overlap:
        seconds = simulated(setup, programs, cluster, stride).seconds_of
    else:
        links = links_of(setup, cluster, stride)
        (rank, last), *_ = programs.items()
        seconds = Seconds(*(_add_up(events, links, rank, run.stack.tile) for events in (last.forward, last.backward)))
    return seconds._replace(backward=seconds.backward + run.attention_recomputed * seconds.forward)


def _update_on_hosts(run: Run, cluster: Cluster) -> float:
    """Seconds of an optimizer on the hosts."""
    number, devices = whole(run.model).total, run.row.devices
    nodes = ceil(devices / cluster.per_node)
    return number / nodes * ADAM_ON_HOST / HOST_BYTES_PER_S + number / devices * TO_AND_FROM_HOST


def _prefill(run: Run, cluster: Cluster) -> float:
    parallel = run.parallel
    attention, of = _attention(run, SOFTMAX, cluster).forward, run.model
    layers = (layer(of, parallel, cluster, number, False)[0] for number in of.all_layers)
    head = operations.head(of, of.vocab) / parallel.tensor
    return sum(attention + sum(one) for one in layers) + multiplied(cluster, parallel, head)


def training_flops(model: Model, seq_length: int, sequences: int = 1) -> float:
    """Model FLOPs of a step, forward and backward without recomputation, by which published utilisation (MFU) becomes
    seconds."""
    layers, predicted = model.all_layers, model.predicted
    per_token = sum(operations.projections(model, layer) + operations.ffn(model, layer) for layer in layers)
    per_token += operations.head(model, model.vocab) * (1 + predicted) + operations.prediction(model) * predicted
    attention = sum(core_flops(model, layer, seq_length) for layer in layers)
    return 3 * sequences * (seq_length * per_token + attention)


def core_flops(model: Model, layer: int, seq_length: int) -> float:
    """Per sequence: causal attention itself, forward, over the keys visible to each token."""
    letter = model.attention_of(layer)
    if letter == LINEAR:
        kind = variants()[model.linear]
        state = kind.features.size(model.head_dim) * (model.v_head_dim + kind.normalised)
        return 2 * (model.heads + model.kv_heads) * state * seq_length
    pairs = seq_length * seq_length / 2
    if letter == WINDOW and model.window is not None and 0 <= model.window[0] < seq_length:
        unseen = seq_length - model.window[0]
        pairs -= unseen * unseen / 2
    return 2 * pairs * model.heads * (model.head_dim + model.v_head_dim)


def _attention_flops(run: Run) -> float:
    """Over visible pairs, with two and five products, as attention benchmarks count."""
    problem = run.problem(SOFTMAX)
    pairs = problem.seq_length**2 * problem.batch / (2 if problem.causal else 1)
    products = {"attention forward": 2, "attention backward": 5, "attention": 7}[run.row.work]
    return products * 2 * pairs * problem.heads * problem.head_dim


def _memory(run: Run) -> float:
    """Bytes per device. If half of a sequence recomputes attention, half of its results are kept."""
    setups = [run.setup(letter) for letter in dict.fromkeys(run.model.attention_pattern)]
    peaks = [peak for setup in setups for program in _programs(setup).values() for peak in program.peaks]
    kept = 1 - sqrt(run.attention_recomputed)
    without, with_results = (
        footprint(run.model, replace(run.parallel, recompute_attention=again), peaks) for again in (True, False)
    )
    absent = {"logits": run.method.fused_loss, "optimizer": run.row.recipe == "offload"}
    zeros = {part: 0 for part, is_absent in absent.items() if is_absent}
    return (1 - kept) * replace(without, **zeros).total + kept * replace(with_results, **zeros).total


def _add_up(events: tuple[Event, ...], links: Links, rank: int, tile: tuple[int, int] | None) -> float:
    """Kernels, memory passes and messages in sequence; ``tile``: as ``Stack.tile``."""
    device = links.cluster.device
    total = 0.0
    for event in events:
        total += links.cost(event, rank, worst=True).seconds if isinstance(event, Post) else computing(event, device)
        if isinstance(event, Attention) and tile is not None:
            total += _skipped(event, device, tile)
    return total


def _skipped(event: Attention, device: Device, tile: tuple[int, int]) -> float:
    """Seconds of fully masked tiles in a loop that visits all tiles (JAX's ``scan`` and ``cond``).

    A tile's keys and values are sliced, and the loop's accumulators copied: of queries, in a backward also of keys and
    values. All is read once and written once.
    """
    rows, keys = tile
    every = sum(pairs(shape._replace(diagonal=shape.keys), tile) for shape in event.shapes)
    seen = sum(pairs(shape, tile) for shape in event.shapes)
    moved = keys * (event.head_dim + event.v_head_dim)
    if event.direction == "forward":
        moved += rows * event.v_head_dim
    else:
        moved += moved + rows * event.head_dim
    nbytes = 2 * moved * getattr(torch, event.dtype).itemsize
    return (every - seen) / (rows * keys) * event.heads * nbytes / device.memory_bytes_per_s


_KNOWN: dict[str, dict[int, Program]] = {}
"""By name of a setup, because head axes create providers anew."""


def _programs(setup: Setup) -> dict[int, Program]:
    """Program of the last rank, the busiest; of all ranks if not all send and receive. Kernels are the authors'."""
    name = f"{setup.provider.name} {setup.problem} {setup.options}"
    if name not in _KNOWN:
        programs = programs_of(setup, [setup.problem.size - 1])
        _KNOWN[name] = {rank: join_tiles(program) for rank, program in programs.items()}
    return _KNOWN[name]
