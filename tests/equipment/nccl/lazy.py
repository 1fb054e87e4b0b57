"""Gloo with NCCL's lazy communicators: the first operation of a group waits for all its ranks, or fails.

Without ``device_id`` (Megatron gives none) ProcessGroupNCCL creates a group's communicator in its first operation: the
group's rank 0 publishes an id in the store, and all its ranks must join, or those that did wait until the timeout. Gloo
connects ranks when the group is made, so a rank may stay out of an operation that has nothing for it; here it may not.
What counts as an operation, as in ProcessGroupNCCL (``getNCCLComm``, ``pointToPoint``):

    collectives, barriers, object collectives     the group's communicator: all of its ranks
    batch_isend_irecv                             the same
    isend, irecv, send, recv by themselves        a communicator of the two ranks, each of which must post something
    a group with a device_id                      made with the group: nothing is left to wait for
    making a group, monitored_barrier, the store  no communicator

The host waits in the thread that posts, as in ``ncclCommInitRank``; so two ranks that first use two groups in opposite
orders are found too. Once per group and process; afterwards an operation costs one look-up.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch._C import _distributed_c10d
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

VARIABLE = "CP_PLUGIN_TEST_LAZY_GROUPS"
"""Seconds that a group's first operation waits for its ranks; unset, empty or 0: as Gloo does."""

PATIENCE = 40.0
"""Seconds: longer than ranks sharing a core may be apart, shorter than ``run_ranks``' time limit."""

COLLECTIVES = re.compile("_?all|barrier|broadcast|gather|_?reduce|scatter")
"""How methods of ``ProcessGroup`` begin, through which all calls from Python go."""
MESSAGES = ("send", "recv")
"""Its others."""

_LONGEST_PAUSE = 0.05  # seconds; a wait in the store itself would hold up Python's signal handlers


class MissingRanksError(RuntimeError):
    """A group's first operation that some of its ranks did not join."""


_made: set[str] = set()
"""This process's communicators: keys of the ranks that had to join."""
_locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
_times: Counter[str] = Counter()
"""How often a group of that name was made: a name may be given again, and the store remembers."""


class _Batching(threading.local):
    now = False
    """Whether this thread is in ``batch_isend_irecv``."""


_batching = _Batching()


def patience() -> float:
    """Seconds, from the environment; 0: off."""
    return float(os.environ.get(VARIABLE) or 0)


def switch_on() -> None:
    """Here and in all processes forked from here, unless the environment says 0."""
    os.environ.setdefault(VARIABLE, f"{PATIENCE:g}")
    if patience() and not hasattr(c10d.ProcessGroup.allreduce, "__wrapped__"):
        install()


@contextlib.contextmanager
def waiting(seconds: float) -> Iterator[None]:
    """Ranks started meanwhile wait so long; 0: not at all, like Gloo."""
    with patch.dict(os.environ, {VARIABLE: f"{seconds:g}"}):
        yield


def install() -> None:
    """Wrap the calls of torch.distributed; of functional collectives, which call from C++, how they resolve a group."""
    groups = c10d.ProcessGroup
    for name in dir(groups):
        if name in MESSAGES or COLLECTIVES.match(name):
            setattr(groups, name, _meeting(name, getattr(groups, name)))
    for name, wrapped in (("batch_isend_irecv", _batch), ("_new_process_group_helper", _new_group)):
        _replace(name, wrapped(getattr(c10d, name)))
    for name in ("_broadcast_coalesced", "_verify_params_across_processes"):  # torch's DDP, from C++
        _replace(name, _meeting(name, getattr(_distributed_c10d, name)))
    names = "_group_or_group_name", "_resolve_group_name"  # the second before torch 2.13
    name = next(name for name in names if hasattr(functional, name))
    resolve = getattr(functional, name)

    @wraps(resolve)
    def meet_and_resolve(*args: Any, **kwargs: Any) -> Any:
        resolved = resolve(*args, **kwargs)
        group = c10d._resolve_process_group(resolved) if isinstance(resolved, str) else resolved
        meet(group, "a functional collective")
        return resolved

    setattr(functional, name, meet_and_resolve)


def _replace(name: str, new: Callable[..., Any]) -> None:
    """Also in the package, which has taken the name."""
    for module in (c10d, torch.distributed, _distributed_c10d):
        if hasattr(module, name):
            setattr(module, name, new)


def _meeting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def meet_and_call(group: Any, *args: Any, **kwargs: Any) -> Any:
        alone = name in MESSAGES
        if not (alone and _batching.now):
            meet(group, name, sorted((group.rank(), args[1])) if alone else None)  # after the tensors: the peer
        return call(group, *args, **kwargs)

    return meet_and_call


def _batch(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def meet_and_call(operations: list[Any]) -> Any:
        for operation in operations:
            meet(operation.group or c10d._get_default_group(), "batch_isend_irecv")
        _batching.now = True
        try:
            return call(operations)
        finally:
            _batching.now = False

    return meet_and_call


def _new_group(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def call_and_note(*args: Any, **kwargs: Any) -> Any:
        made = call(*args, **kwargs)
        if isinstance(made[0], c10d.ProcessGroup):
            name = made[0].group_name
            _times[name] += 1
            _made.difference_update([key for key in _made if key.split("|")[0] == name])
        return made

    return call_and_note


def meet(group: Any, operation: str, among: list[int] | None = None) -> None:
    """Wait, if the group's communicator does not exist, until all its ranks have joined.

    among: places in the group of a communicator of fewer ranks.

    Raises:
        MissingRanksError: if one has not joined in time.
    """
    key = group.group_name if among is None else f"{group.group_name}|{among}"
    if key in _made:
        return
    places = list(range(group.size())) if among is None else among
    seconds = patience()
    if not seconds or len(places) == 1 or group not in c10d._world.pg_map:
        return
    if group.bound_device_id is not None or c10d.get_backend(group) == "fake":
        return
    with _locks[key]:
        if key not in _made:
            _rendezvous(group, operation, places, f"lazy/{key}/{_times[group.group_name]}", seconds)
            _made.add(key)


def _rendezvous(group: Any, operation: str, places: list[int], key: str, seconds: float) -> None:
    store = c10d._get_process_group_store(group)
    store.set(f"{key}/{group.rank()}", operation)
    if store.add(f"{key}/came", 1) == len(places):
        store.set(f"{key}/all", "")
        return
    began, pause = time.monotonic(), 0.001
    while time.monotonic() < began + seconds:
        if store.check([f"{key}/all"]):
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    ranks = c10d.get_process_group_ranks(group)
    came: dict[str, list[int]] = defaultdict(list)
    never = []
    for place in places:
        if store.check([f"{key}/{place}"]):
            came[store.get(f"{key}/{place}").decode()].append(ranks[place])
        else:
            never.append(ranks[place])
    who = "all of its ranks" if len(places) == len(ranks) else f"the ranks {_spans([ranks[p] for p in places])}"
    raise MissingRanksError(
        f"rank {c10d.get_rank()}: {operation} is the first operation of group {group.group_desc!r} (ranks "
        f"{_spans(ranks)}), and NCCL makes a communicator in it by {who}. After {seconds:g} s these had come: "
        + ", ".join(f"{_spans(there)} ({op})" for op, there in came.items())
        + f"; these never did: {_spans(never)}"
    )


def _spans(ranks: list[int]) -> str:
    """``0, 2-4, 7``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
