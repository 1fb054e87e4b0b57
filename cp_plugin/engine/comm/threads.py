"""ThreadMesh: P ranks as threads of one process.

Real tensors on any device without a network: one GPU can run a method of P ranks with its real kernels, and tests need
no processes. Tensors pass through a shared ``Hub``, and ranks take turns: one runs until it has to wait.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from cp_plugin.engine.comm.mesh import WHOLE, Ledger, Mesh, Pending, Tensors
from cp_plugin.engine.common import background


def run_threads[T](fn: Callable[[ThreadMesh], T], axes: Mapping[str, int], *, patience: float = 60.0) -> list[T]:
    """Run ``fn(mesh)`` once per rank of a mesh with these axes, each in a thread that later calls use again; the
    results in rank order; RuntimeError if a rank raised (its error is the cause), or waited ``patience`` seconds for a
    peer that never sent.
    """
    hub = Hub(patience)
    return take_turns([partial(fn, ThreadMesh(axes, index, hub)) for index in range(prod(axes.values()))], hub)


def take_turns[T](ranks: Sequence[Callable[[], T]], hub: Hub) -> list[T]:
    """Results of the ranks, each in the thread of its number, which takes turns on the hub; RuntimeError if a rank
    raised; its error is the cause."""
    results: list[Any] = [None] * len(ranks)

    def run(index: int) -> None:
        # CUDA's backwards run in one thread of torch's otherwise, where ranks that wait for each other would deadlock
        with hub.turn, torch.autograd.set_multithreading_enabled(False):
            try:
                results[index] = ranks[index]()
            except BaseException as error:
                hub.fail(index, error)

    for ended in [_call_in_thread(index, partial(run, index)) for index in range(len(ranks))]:
        ended.wait()
    if hub.failure is not None:
        index, error = hub.failure
        raise RuntimeError(f"rank {index} of {len(ranks)} failed: {error!r}") from error
    return results


type _Queue = SimpleQueue[tuple[Callable[[], None], threading.Event]]
_idle: dict[int, list[_Queue]] = defaultdict(list)
"""Rank -> where its threads without a call wait for one; several after calls inside of calls or beside each other.

Threads live as long as the process: libraries keep what they have prepared for a shape per thread and never free it
(cuDNN's plans). And one that ends takes locks of the C library, with which a process that is forked meanwhile hangs.
"""
os.register_at_fork(after_in_child=_idle.clear)  # a child has no threads


def _call_in_thread(index: int, run: Callable[[], None]) -> threading.Event:
    """Run it in a thread of this rank, on the caller's device; the event is set when it has ended."""
    try:
        calls = _idle[index].pop()
    except IndexError:
        calls = SimpleQueue()
        background.start(_serve, f"rank-{index}", index, calls)
    ended = threading.Event()
    calls.put((background.keeping_device(run), ended))
    return ended


def _serve(index: int, calls: _Queue) -> None:
    while True:
        run, ended = calls.get()
        run()
        del run  # and with it the call's tensors
        if _is_as_new():  # or nobody finds it again
            _idle[index].append(calls)
        ended.set()


def _is_as_new() -> bool:
    """Return True if this thread's modes (gradients, inference, autocast, default device, tracing) are the defaults."""
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    cast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    return torch.is_grad_enabled() and not (torch.is_inference_mode_enabled() or cast or modes)


class _Message(NamedTuple):
    tensors: Tensors
    written: torch.cuda.Event | None
    """On CUDA, when the tensors are written; the reader's stream waits for it, no thread does."""


def _recorded(tensors: Tensors) -> torch.cuda.Event | None:
    if not tensors[0].is_cuda:
        return None
    written = torch.cuda.Event()
    written.record(torch.cuda.current_stream(tensors[0].device))
    return written


class Hub:
    """A mailbox shared by all ranks: each message is posted under a key of its own, and taken once.

    Ranks take turns. Threads that all ran would spend as long on passing the interpreter's lock at every torch
    operation as on computing.
    """

    def __init__(self, patience: float) -> None:
        self.turn = threading.Lock()  # held by the running rank; guards everything below
        self.patience = patience
        self.failure: tuple[int, BaseException] | None = None
        self._messages: dict[Hashable, _Message] = {}
        self._awaited: dict[Hashable, threading.Condition] = {}

    def post(self, key: Hashable, tensors: Tensors) -> None:
        self._messages[key] = _Message(tensors, _recorded(tensors))
        if key in self._awaited:
            self._awaited[key].notify()

    def take(self, key: Hashable) -> Tensors:
        """The message, once it is there: others have their turn until then, a rank's failure, or ``patience`` s."""
        if key not in self._messages and self.failure is None:
            self._awaited[key] = threading.Condition(self.turn)
            self._awaited[key].wait(self.patience)
            del self._awaited[key]
        if key not in self._messages:
            if self.failure is not None:
                raise RuntimeError(f"another rank failed before it sent {key}")
            raise RuntimeError(f"no peer sent {key} within {self.patience:g} s: the ranks disagree on what to send")
        message = self._messages.pop(key)
        if message.written is not None:
            stream = torch.cuda.current_stream(message.tensors[0].device)
            stream.wait_event(message.written)
            for t in message.tensors:
                t.record_stream(stream)
        return message.tensors

    def fail(self, index: int, error: BaseException) -> None:
        self.failure = self.failure or (index, error)
        for waiting in self._awaited.values():
            waiting.notify()


class ThreadMesh(Mesh):
    """One rank of a mesh of threads; made by ``run_threads``."""

    def __init__(
        self, axes: Mapping[str, int], index: int, hub: Hub, ledger: Ledger | None = None, name: tuple[int, ...] = ()
    ) -> None:
        super().__init__(axes, index, ledger)
        self._hub = hub
        self._calls: dict[Hashable, int] = defaultdict(int)
        self._name = name
        self._beside = 0

    def duplicate(self, axes: Mapping[str, int]) -> ThreadMesh:
        """A second mesh of the same ranks with messages of its own and the same ledger.

        As with process groups, all ranks make their meshes in the same order. ValueError for axes of another number of
        ranks.
        """
        if prod(axes.values()) != self.size:
            raise ValueError(f"a mesh derived from one of {self.size} ranks needs as many, got {dict(axes)}")
        self._beside += 1
        return ThreadMesh(axes, self.index, self._hub, self.ledger, (*self._name, self._beside))

    def _exchange(self, axis: str, tensors: Tensors, to: int | None, source: int | None) -> Pending:
        leaving = {} if to is None else {to: _copies(tensors)}
        arriving = self._pass(axis, "exchange", leaving, () if source is None else (source,))
        return Pending(lambda: tuple(chain(*arriving.wait())))

    def _all_gather(self, axis: str, tensors: Tensors) -> Pending:
        everyone = range(self.axes[axis])
        return _joined(self._pass(axis, "all_gather", dict.fromkeys(everyone, _copies(tensors)), everyone))

    def _all_to_all(self, axis: str, tensors: Tensors) -> Pending:
        n = self.axes[axis]
        parts = zip(*(t.chunk(n) for t in _copies(tensors)), strict=True)
        return _joined(self._pass(axis, "all_to_all", dict(enumerate(parts)), range(n)))

    def _all_to_all_v(self, axis: str, tensors: Tensors, sent: Sequence[int], received: Sequence[int]) -> Pending:
        parts = zip(*(t.split(list(sent)) for t in _copies(tensors)), strict=True)
        leaving = {peer: part for peer, part in enumerate(parts) if sent[peer]}
        arriving = self._pass(axis, "all_to_all_v", leaving, [peer for peer, rows in enumerate(received) if rows])
        return _joined(arriving) if any(received) else Pending.done(tuple(t[:0] for t in tensors))

    def _pass(
        self, axis: str, verb: str, leaving: Mapping[int, Tensors], sources: Sequence[int]
    ) -> Pending[list[Tensors]]:
        """Post tensors for places of the axis, and wait for those from the sources, in that order."""
        place = self._place(axis)
        for peer, tensors in leaving.items():
            self._hub.post(self._numbered("post", (axis, verb, place, peer)), tensors)
        keys = [self._numbered("take", (axis, verb, peer, place)) for peer in sources]
        return Pending(lambda: [self._hub.take(key) for key in keys])

    def _numbered(self, role: str, route: tuple[Hashable, ...]) -> Hashable:
        """The key of the next message on this route: the n-th one posted is the n-th one taken."""
        axis = route[0]
        others = () if axis == WHOLE else tuple((name, i) for name, i in self.coordinates.items() if name != axis)
        line = (self._name, others, *route)
        self._calls[role, line] += 1
        return (*line, self._calls[role, line])


def _copies(tensors: Tensors) -> Tensors:
    return tuple(t.detach().clone() for t in tensors)


def _joined(arriving: Pending[list[Tensors]]) -> Pending:
    """The sources' tensors one after the other."""
    return Pending(lambda: tuple(map(torch.cat, zip(*arriving.wait(), strict=True))))
