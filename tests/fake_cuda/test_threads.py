"""Threads beside the main one: on its device."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable

import pytest
import torch
from equipment.cuda.device import CUDA, FakeCuda, Start
from nightly import each_value

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.attention.calls import Inputs, call_through_autograd, settled
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.common import background
from cp_plugin.engine.methods import registry as providers

MINE = 3
"""The device of the main thread's rank."""


@pytest.fixture
def device(gpu: Start) -> FakeCuda:
    started = gpu()
    torch.cuda.set_device(MINE)
    return started


def elsewhere[T](call: Callable[[], T]) -> T:
    """The result of a call in a thread as the plugin starts them."""
    results: list[T] = []
    background.start(lambda: results.append(call()), "elsewhere").join()
    return results[0]


def test_a_thread_starts_on_device_0(device: FakeCuda) -> None:
    """What ``background`` is for."""
    plain = threading.Thread(target=lambda: torch.cuda.Event().record())
    plain.start()
    plain.join()
    assert device.contexts == {0, MINE}


def test_threads_of_the_plugin_are_on_the_device_of_their_starter(device: FakeCuda) -> None:
    assert elsewhere(torch.cuda.current_device) == MINE
    assert elsewhere(lambda: elsewhere(torch.cuda.current_device)) == MINE

    def rank(mesh: Mesh) -> int:
        assert not torch._C._is_multithreading_enabled(), "backwards of all ranks in the device's one thread"
        return torch.cuda.current_device()

    assert run_threads(rank, {"cp": 2}) == [MINE, MINE]
    assert device.contexts == {MINE}


def ranks(*, then: Callable[[int], object] = lambda rank: None) -> list[threading.Thread]:
    """The threads of three ranks in one call."""

    def rank(mesh: Mesh) -> threading.Thread:
        mesh.shift("cp", (torch.ones(1),)).wait()
        for last in (0, 1):  # rank 1 goes on when rank 0 does, and rank 0 when rank 2 does: none waits any more
            message = mesh.shift("cp", (torch.ones(1),))
            if mesh.index == last:
                message.wait()
        then(mesh.index)
        return threading.current_thread()

    return run_threads(rank, {"cp": 3}, patience=0.2)


@pytest.mark.parametrize(
    "leave",
    [lambda: torch.set_grad_enabled(False), lambda: torch.set_default_device("meta")],
    ids=["gradients off", "a default device"],
)
def test_a_rank_keeps_its_thread_until_it_leaves_a_mode(leave: Callable[[], object]) -> None:
    first = ranks()
    assert ranks() == first and [thread.name for thread in first] == ["rank-0", "rank-1", "rank-2"]
    assert ranks(then=lambda rank: run_threads(lambda mesh: None, {"cp": 3})) == first  # which starts others
    with pytest.raises(RuntimeError, match=r"rank 1 of 3 failed.*by zero"):
        ranks(then=lambda rank: rank == 1 and 1 / 0)
    assert ranks() == first
    ranks(then=lambda rank: rank == 1 and leave())
    again = ranks(then=lambda rank: torch.ones(1, requires_grad=True).exp().backward())
    assert again[0] == first[0] and again[1] != first[1] and again[2] == first[2]


@each_value
@pytest.mark.parametrize("te", [False, True], ids=["cudnn", "te"])
@pytest.mark.parametrize("provider", ["ring", "attention2d", "usp"])
def test_timed_calls_build_no_plans(gpu: Start, provider: str, te: bool) -> None:
    """As the check on GPUs times methods: the ranks are threads, and one call warms up."""
    device = gpu(flash=None, te=te)
    setup = settled(providers.get(provider), Problem(size=4, heads=8, kv_heads=4, seq_length=2**16), Options())
    shapes = ((2**14, 1, heads, 128) for heads in (8, 4, 4, 8))
    x = Inputs(*(torch.empty(shape, dtype=torch.bfloat16, device=CUDA, requires_grad=True) for shape in shapes))

    def rank(mesh: Mesh) -> None:
        with device.seen():
            call_through_autograd(ContextParallel(setup, mesh=mesh), x, setup.problem)

    run_threads(rank, setup.axes)
    warm = set(device.ops.plans)
    for _ in range(2):
        run_threads(rank, setup.axes)
    assert len({thread for thread, _ in warm}) == 4 and set(device.ops.plans) == warm


def test_a_forked_process_starts_its_own() -> None:
    ranks()
    child = multiprocessing.get_context("fork").Process(target=ranks)
    child.start()
    child.join(20)
    assert child.exitcode == 0


def test_cuda_is_not_initialized_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("current_device", "set_device"):
        monkeypatch.setattr(torch.cuda, name, None)
    assert elsewhere(lambda: 5) == 5
