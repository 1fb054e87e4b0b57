"""A method is composed once per kind of call, and caches are bounded."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from cp_kernels import visible
from cp_kernels.visible import View
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem, Tree
from cp_plugin.engine.attention import api as attention
from cp_plugin.engine.attention.calls import settled
from cp_plugin.engine.comm import TraceMesh
from cp_plugin.engine.common.recent import Recent
from cp_plugin.engine.core import layout
from cp_plugin.engine.core.scaling import Delayed
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.moves import best_groups

CPU = torch.device("cpu")


def tensors(tokens: int = 8, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, tokens, 1, heads, 8)
    return q, k, v


def counted(built: list[Problem], name: str = "ring", **options: object) -> ContextParallel:
    """A provider on two ranks that records the problems it is built for."""
    provider = providers.get(name)

    def build(mesh, local, problem, chosen):
        built.append(problem)
        return provider.build(mesh, local, problem, chosen)

    return ContextParallel(replace(provider, build=build), mesh=TraceMesh({"cp": 2}, 1), **options)


def test_calls_of_one_kind_share_a_plan() -> None:
    built: list[Problem] = []
    cp, documents = counted(built), torch.tensor([0, 5, 16])
    calls = [
        dict(causal=True),
        dict(causal=False),
        dict(scale=0.5),
        dict(window=(3, 0)),
        dict(cu_seqlens=documents),
        dict(cu_seqlens=torch.tensor([0, 6, 16])),
        dict(tree=Tree((5, 4, 7), (-1, 0, 0))),
        dict(tree=Tree((5, 4, 7), (-1, 0, 1))),
        dict(sink=torch.zeros(2)),
    ]
    for _ in range(3):
        for call in calls:
            cp.attention(*tensors(), **call)
    cp.attention(*tensors(), tree=Tree([5, 4, 7], [-1, 0, 0]))
    assert len(built) == len(calls)
    cp.attention(*tensors(tokens=12))
    cp.attention(*(x.bfloat16() for x in tensors()))
    cp.attention(*tensors(heads=4))
    assert len(built) == len(calls) + 3
    cp.options = replace(cp.options, backend="reference")
    cp.attention(*tensors())
    assert len(built) == len(calls) + 4, "another kernel is another plan"


def test_evaluation_in_fp8_shares_a_plan() -> None:
    built: list[Problem] = []
    cp, scalings = counted(built, fp8="compute", backend="float8"), (Delayed(), Delayed())
    with torch.no_grad():
        for _ in range(3):
            for scaling in scalings:
                cp.attention(*(x.bfloat16() for x in tensors()), scaling=scaling)
    assert len(built) == 2, "one for each layer's scales"


def test_calls_of_linear_attention_share_a_plan() -> None:
    built: list[Problem] = []
    cp = counted(built, "lasp2")
    decay = -torch.rand(8, 1, 2)
    for _ in range(3):
        cp.linear_attention(*tensors())
        cp.linear_attention(*tensors(), decay)
        cp.linear_attention(*tensors(), causal=False)
        cp.linear_attention(*tensors(), cu_seqlens=torch.tensor([0, 5, 16]))
        cp.linear_attention(*tensors(), cu_seqlens=torch.tensor([0, 6, 16]))
    assert len(built) == 4, "where documents begin is data of a call"
    cp.options = replace(cp.options, backend="chunked")
    cp.linear_attention(*tensors())
    assert len(built) == 5, "another kernel is another plan"
    with pytest.raises(ValueError, match="share dtype and device"):
        cp.linear_attention(tensors()[0], *(x.double() for x in tensors()[1:]))


def test_a_shared_plan_refuses_as_a_new_one_does() -> None:
    cp = counted([])
    q, k, v = tensors()
    cp.attention(q, k, v)
    for bad in ((q, k[:, :, :1].expand(-1, -1, 3, -1), v), (q, k.double(), v), (q[0], k, v)):
        for _ in range(2):
            with pytest.raises(ValueError):
                cp.attention(*bad)
    with pytest.raises(ValueError, match="sink must be"):
        cp.attention(q, k, v, sink=torch.zeros(3))


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_PLANS", 4)
    built: list[Problem] = []
    cp = counted(built)
    for end in range(1, 16):
        cp.attention(*tensors(), cu_seqlens=torch.tensor([0, end, 16]))
    assert len(cp._plans) == 4 and len(built) == 15


def test_recent_keeps_the_last_used() -> None:
    recent: Recent[str, str] = Recent(3)
    for key in "abcad":
        recent.get(key, lambda key=key: key.upper())
    assert list(recent._kept) == ["c", "a", "d"]
    by_size: Recent[int, bytes] = Recent(100, len)
    for i in range(10):
        by_size.get(i, lambda: bytes(30))
    assert len(by_size) == 3
    by_size.get(99, lambda: bytes(500))
    assert list(by_size._kept) == [99], "one that is too large is kept alone"
    by_size.get(1, lambda: bytes(30))
    assert list(by_size._kept) == [1]


def test_recent_is_thread_safe(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    recent: Recent[int, int] = Recent(3)

    def find_wrong(thread: int) -> list[int]:
        return [i for i in range(9000) if recent.get(i % 5, lambda i=i: i % 5) != i % 5]

    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(find_wrong, range(4)))
    assert len(recent) == recent._total == 3


def test_tables_of_positions_are_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "KEPT_BYTES", 40_000)
    visible._kept.clear()
    for end in range(1, 20):
        visible.side((range(1000),), View(right=0, documents=(0, end, 1000)), 64, CPU)
    held = sum(map(visible._nbytes, visible._kept.values()))
    assert 30_000 < held <= 40_000 and len(visible._kept) == 4
    before = visible.side((range(1000),), View(right=0, documents=(0, 19, 1000)), 64, CPU)
    assert visible.side((range(1000),), View(right=0, documents=(0, 19, 1000)), 64, CPU) is before

    orders = Recent(40_000, layout._nbytes)
    monkeypatch.setattr(layout, "_orders", orders)
    for tokens in range(1000, 1020, 2):
        layout.sort_positions((range(0, tokens, 2), range(1, tokens, 2)), CPU)
    assert 30_000 < orders._total <= 40_000


def test_groups_of_heads_are_as_large_as_the_network_wants() -> None:
    problem = Problem(size=16, heads=8, kv_heads=8, seq_length=16 * 2048)  # 4 MiB of queries a rank
    assert best_groups(problem) == 1
    assert best_groups(replace(problem, seq_length=16 * 16384)) == 4
    assert best_groups(problem.with_transport(network="gloo")) == 8
    chosen = {
        network: providers.settle("attention2d", problem.with_transport(network=network), Options()).options.head_groups
        for network in ("nccl", "gloo")
    }
    assert chosen == {"nccl": 1, "gloo": 8}


def test_communicators_are_counted() -> None:
    problem = Problem(size=64, heads=64, kv_heads=64).with_transport(
        hosts=tuple(f"node{rank // 8}" for rank in range(64))
    )
    counts = {
        name: settled(providers.get(name), problem, Options()).communicators
        for name in ("ring", "attention2d", "burst", "ulysses")
    }
    assert counts == {"ring": 1, "attention2d": 3, "burst": 4, "ulysses": 1}
