"""Prediction of a published row: attention from its timeline, the rest of a step from the planner's iteration.

training        a step, forward and backward, of all layers
prefill         the forward of all layers, and the output layer for the last token
attention ...   one call
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, sqrt

import torch

from cp_plugin.attention.calls import Setup, settled
from cp_plugin.core.options import Options, grids
from cp_plugin.core.problem import Problem
from cp_plugin.methods import registry as providers
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.events import Attention, Event, Post, Seconds
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.machine.kernel_time import pairs
from cp_plugin.planner.machine.kernel_time import seconds as computing
from cp_plugin.planner.machine.links import Links
from cp_plugin.planner.trace.program import Program, in_one_call
from cp_plugin.planner.trace.timeline import links_of, programs_of
from cp_plugin.planner.trace.timeline import run as simulated
from cp_plugin.planner.training import operations
from cp_plugin.planner.training.footprint import footprint, whole
from cp_plugin.planner.training.iteration import iteration, layer, multiplied
from cp_plugin.planner.training.model import LINEAR, SOFTMAX, Model, model
from cp_plugin.planner.training.parallel import Parallel
from cp_plugin.planner.training.parallel import problem as problem_of
from evidence.data import Method, Row, Stack, method, paper
from evidence.overlapped import OVERLAPPED

GB = 2**30
"""As reported by PyTorch and Megatron."""
ADAM_ON_HOST = 28
"""Bytes per parameter: three float32 states read and written, a 16-bit gradient and parameter."""
TO_AND_FROM_HOST = 4 / 24e9
"""Seconds per parameter to send a 16-bit gradient to the host and a parameter back over PCIe 4."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A cluster with what its software adds to the planner's iteration."""

    cluster: Cluster
    dtype: str = "bfloat16"
    """Of attention."""
    visits_all_tiles: bool = False
    """Whether attention loops over all tiles and skips masked ones."""
    host_bytes_per_s: float = 100e9
    """Memory bandwidth of a node (assumption: a quarter of two sockets' 410 GB/s)."""

    @property
    def kernel(self) -> hardware.Kernel:
        return self.cluster.device.attention[self.dtype]  # type: ignore[index]


def machine_of(stack: Stack) -> Machine:
    """The machine of a stack."""
    return _machine(stack.model_dump_json())


@cache
def _machine(stack_json: str) -> Machine:
    stack = Stack.model_validate_json(stack_json)
    cluster, dtype = hardware.override(hardware.cluster(stack.base), **stack.override), stack.attention_dtype
    if stack.tile is None:
        return Machine(cluster, dtype)
    kernel = cluster.device.attention[dtype].model_copy(update={"block": stack.tile, "source": stack.note})
    changes = {  # a program of XLA: no blocks, no host
        "processors": 0, "host_launch_s": 0.0, "host_post_s": 0.0,
        "attention": {**cluster.device.attention, dtype: kernel},
    }  # fmt: skip
    device = cluster.device.model_copy(update=changes)
    return Machine(cluster.model_copy(update={"device": device}), dtype, visits_all_tiles=True)


@dataclass(frozen=True, slots=True)
class Run:
    """One method in the setting of a row."""

    row: Row
    method: Method
    stack: Stack

    @property
    def model(self) -> Model:
        """With softmax attention, linear attention or both."""
        return _model(self.row.model, self.method.linear, self.row.softmax_layers)

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
        found = problem_of(self.model, self.parallel, letter)
        return replace(found, dtype=getattr(torch, self.stack.attention_dtype), causal=self.method.causal)

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


@cache
def _model(name: str, linear: str, softmax_layers: int) -> Model:
    found = model(name)
    if not linear:
        return replace(found, attention_pattern=SOFTMAX, linear="")
    pattern = LINEAR * (softmax_layers - 1) + SOFTMAX if softmax_layers else LINEAR
    return replace(found, attention_pattern=pattern, linear=linear)


def predict(row: Row) -> float:
    """Predict a row's figure; ValueError for an unsupported problem or unknown unit."""
    run = Run(row, method(row, row.method), paper(row.paper).clusters[row.cluster])
    if row.figure == "GB":
        return _memory(run) / GB
    machine = machine_of(run.stack)
    seconds = _seconds(run, machine)
    match row.figure:
        case "s":
            return seconds
        case "speedup":
            return _seconds(replace(run, method=method(row, row.baseline)), machine) / seconds
        case "tokens/s":
            return row.batch * row.length / seconds
        case "tokens/s/GPU":
            return row.batch * row.length / row.devices / seconds
        case "TFLOP/s/GPU":
            return _attention_flops(run) / row.devices / seconds / 1e12
        case "model TFLOP/s/GPU":
            return operations.training(run.model, row.length, row.batch) / row.devices / seconds / 1e12
        case "% of ideal":
            alone = replace(run, row=replace(row, devices=1), method=Method(provider="ring"))
            return 100 * _seconds(alone, machine) / row.devices / seconds
    raise ValueError(f"row of {row.table}: nothing predicts {row.figure!r}")


def _seconds(run: Run, machine: Machine) -> float:
    match run.row.work:
        case "training":
            given = {letter: _attention(run, letter, machine) for letter in dict.fromkeys(run.model.attention_pattern)}
            found = iteration(run.model, run.parallel, machine.cluster, given)
            parts = dict(found.parts)
            if run.row.recipe == "offload":
                parts["optimizer"] = _on_host(run, machine)
            if not run.method.gradients_summed:
                parts["gradients"] = 0.0
            return sum(parts.values())
        case "prefill":
            return _prefill(run, machine)
        case "attention forward":
            return _attention(run, SOFTMAX, machine).forward
        case "attention backward":
            return _attention(run, SOFTMAX, machine).backward
    return sum(_attention(run, SOFTMAX, machine)[:2])


def _attention(run: Run, letter: str, machine: Machine) -> Seconds:
    found = _of_call(run.setup(letter), machine, run.parallel.tensor, run.method.overlap)
    return found._replace(backward=found.backward + run.attention_recomputed * found.forward)


def _on_host(run: Run, machine: Machine) -> float:
    """Seconds of an optimizer on the hosts."""
    number, devices = whole(run.model).total, run.row.devices
    nodes = ceil(devices / machine.cluster.per_node)
    return number / nodes * ADAM_ON_HOST / machine.host_bytes_per_s + number / devices * TO_AND_FROM_HOST


def _prefill(run: Run, machine: Machine) -> float:
    cluster, parallel = machine.cluster, run.parallel
    attention, of = _attention(run, SOFTMAX, machine).forward, run.model
    layers = (layer(of, parallel, cluster, number, False).forward for number in of.all_layers)
    head = operations.head(of, of.vocab) / parallel.tensor
    return sum(attention + sum(one) for one in layers) + multiplied(cluster, parallel, head)


def _attention_flops(run: Run) -> float:
    """Over visible pairs, with two and five products, as attention benchmarks count."""
    problem = run.problem(SOFTMAX)
    pairs = problem.seq_length**2 * problem.batch / (2 if problem.causal else 1)
    products = {"attention forward": 2, "attention backward": 5, "attention": 7}[run.row.work]
    return products * 2 * pairs * problem.heads * problem.head_dim


def _memory(run: Run) -> float:
    """Bytes per device. If half of a sequence recomputes attention, half of its results are kept."""
    peaks = [_peak(run.setup(letter)) for letter in dict.fromkeys(run.model.attention_pattern)]
    kept = 1 - sqrt(run.attention_recomputed)
    without, with_results = (
        footprint(run.model, replace(run.parallel, recompute_attention=again), peaks) for again in (True, False)
    )
    needs = [
        replace(
            f,
            logits=0 if run.method.fused_loss else f.logits,
            optimizer=0 if run.row.recipe == "offload" else f.optimizer,
        ).total
        for f in (without, with_results)
    ]
    return (1 - kept) * needs[0] + kept * needs[1]


@dataclass(frozen=True, slots=True)
class _Call:
    """A setup hashed by name, because head axes create providers anew."""

    name: str
    setup: Setup = field(compare=False)


def _of_call(setup: Setup, machine: Machine, stride: int, overlap: bool) -> Seconds:
    """Seconds of forward and backward of one attention call.

    Args:
        stride: devices between context-parallel ranks.
        overlap: of messages with kernels. Without, all ranks wait for the busiest one in every round.
    """
    programs = _programs(_call(setup))
    if overlap:
        return simulated(setup, programs, machine.cluster, stride).seconds_of
    links = links_of(setup, machine.cluster, stride)
    (last, done), *_ = programs.items()
    return Seconds(*(_in_turn(events, links, machine, last) for events in (done.forward, done.backward)))


def _peak(setup: Setup) -> int:
    """Peak bytes in addition to the inputs, forward or backward."""
    return max(max(done.peaks) for done in _programs(_call(setup)).values())


def _in_turn(events: tuple[Event, ...], links: Links, machine: Machine, rank: int) -> float:
    """Kernels, memory passes and messages in sequence."""
    device = machine.cluster.device
    total = 0.0
    for event in events:
        match event:
            case Post():
                total += links.cost(event, rank, worst=True).seconds
            case Attention():
                total += computing(event, device) + _skipped(event, machine)
            case _:
                total += computing(event, device)
    return total


def _skipped(event: Attention, machine: Machine) -> float:
    """Seconds of fully masked tiles in a loop that visits all tiles (JAX's ``scan`` and ``cond``).

    A tile's keys and values are sliced, and the loop's accumulators copied: of queries, in a backward also of keys and
    values. All is read once and written once.
    """
    if not machine.visits_all_tiles:
        return 0.0
    rows, keys = machine.kernel.block
    every = sum(pairs(shape._replace(diagonal=shape.keys), (rows, keys)) for shape in event.shapes)
    seen = sum(pairs(shape, (rows, keys)) for shape in event.shapes)
    moved = keys * (event.head_dim + event.v_head_dim)
    if event.direction == "forward":
        moved += rows * event.v_head_dim
    else:
        moved += moved + rows * event.head_dim
    nbytes = 2 * moved * getattr(torch, event.dtype).itemsize
    return (every - seen) / (rows * keys) * event.heads * nbytes / machine.cluster.device.memory_bytes_per_s


def _call(setup: Setup) -> _Call:
    return _Call(f"{setup.provider.name} {setup.problem} {setup.options}", setup)


@cache
def _programs(call: _Call) -> dict[int, Program]:
    """Program of the last rank, the busiest; of all ranks if not all send and receive. Kernels are the authors'."""
    found = programs_of(call.setup, [call.setup.problem.size - 1])
    return {rank: in_one_call(program) for rank, program in found.items()}
