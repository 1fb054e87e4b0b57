"""Seconds of one attention call on a machine, with or without overlap."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch

from cp_plugin.attention.setups import Setup
from cp_plugin.planner.machine.events import Attention, Event, Post, Seconds
from cp_plugin.planner.machine.kernel_time import pairs
from cp_plugin.planner.machine.kernel_time import seconds as computing
from cp_plugin.planner.machine.links import Links
from cp_plugin.planner.trace.program import Program, in_one_call
from cp_plugin.planner.trace.timeline import links_of, programs_of, run
from evidence.stacks import Machine


@dataclass(frozen=True, slots=True)
class _Call:
    """A setup hashed by name, because head axes create providers anew."""

    name: str
    setup: Setup = field(compare=False)


def seconds(setup: Setup, machine: Machine, stride: int, overlap: bool) -> Seconds:
    """Seconds of forward and backward.

    Args:
        stride: devices between context-parallel ranks.
        overlap: of messages with kernels. Without, all ranks wait for the busiest one in every round.
    """
    programs = _programs(_call(setup))
    if overlap:
        found = run(setup, programs, machine.cluster, stride)
        return found.seconds_of
    links = links_of(setup, machine.cluster, stride)
    (last, done), *_ = programs.items()
    return Seconds(*(_in_turn(events, links, machine, last) for events in (done.forward, done.backward)))


def peak(setup: Setup) -> int:
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
