"""Megatron's own layout, for probes: the plugin's replacements compute as ranks that hold zigzag chunks.

Nothing of the run is touched: in the block the plugin's state is that of a new process, and is put back afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from cp_plugin.attention.api import ContextParallel
from cp_plugin.comm.threads import ThreadMesh, run_threads
from cp_plugin.comm.trace import TraceMesh
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.state import STATE, State

PROVIDER, LAYOUT = "ring", "zigzag"
_KEPT = ("replaced", "refused", "leave_cpu", "alarm", "messages", "quantized")
"""Fields of the process, not of a run."""


@dataclass(frozen=True, slots=True)
class Group:
    """Stands in for a process group; no messages."""

    number: int = 0
    ranks: int = 1

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


@contextmanager
def rank(number: int, size: int) -> Iterator[Group]:
    """In the block this process is one of ``size`` context-parallel ranks, as far as it sends no messages."""
    cp = ContextParallel(PROVIDER, mesh=TraceMesh({"cp": size}, number), layout=LAYOUT)
    with _asked_for(lambda: cp), _known_to_torch():
        yield Group(number, size)


def on_ranks[T](call: Callable[[Group], T], size: int) -> list[T]:
    """Results of a call on each of ``size`` context-parallel ranks: threads, which do send messages."""
    here = threading.local()

    def of_rank(mesh: ThreadMesh) -> T:
        here.cp = ContextParallel(PROVIDER, mesh=mesh, layout=LAYOUT)
        return call(Group(mesh.index, size))

    with _asked_for(lambda: here.cp), _known_to_torch():
        return run_threads(of_rank, {"cp": size})


@contextmanager
def alone() -> Iterator[Group]:
    """In the block the plugin computes on one rank."""
    with _asked_for(None):
        yield Group()


@contextmanager
def _asked_for(context_parallel: Callable[[], ContextParallel] | None) -> Iterator[None]:
    new = State(settings=Settings(provider=PROVIDER), probed=context_parallel)
    names = [field.name for field in fields(State) if field.name not in _KEPT]
    kept = {name: getattr(STATE, name) for name in names}
    try:
        for name in names:
            setattr(STATE, name, getattr(new, name))
        yield
    finally:
        for name, value in kept.items():
            setattr(STATE, name, value)


@contextmanager
def _known_to_torch() -> Iterator[None]:
    """Make torch's queries of a group's rank and size answer for a ``Group``, too."""
    answers = {"get_rank": Group.rank, "get_world_size": Group.size}
    with patching.lent(
        dist, **{name: _or_of_stand_in(getattr(dist, name), answer) for name, answer in answers.items()}
    ):
        yield


def _or_of_stand_in(asked: Callable[..., int], answer: Callable[[Group], int]) -> Callable[..., int]:
    def of(group: object = None) -> int:
        return answer(group) if isinstance(group, Group) else asked(group)

    return of


def device() -> torch.device:
    """Where Megatron's functions compute: in CPU mode this is the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
