"""Shared processors and links, and Gloo's collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from round_cluster import round_cluster

from cp_plugin.engine.attention.calls import settled
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods import registry as providers
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.links import Links
from cp_plugin.planner.trace.program import Post, Products, Wait, program
from cp_plugin.planner.trace.simulation import SharedSimulation

_SECOND = 10**9
"""FLOPs or bytes per second."""
_LINKS = {"intra": (0.0, 1e13), "inter": (0.0, 1.0 * _SECOND)}
_CLUSTER = hardware.override(round_cluster(flops_per_s=1.0 * _SECOND, shared_by=2, **_LINKS), transport="gloo")
_WORK = Products(_SECOND, 1, "float32")


def _link(latency):
    return {"latency_s": latency, "bytes_per_s": 1.0 * _SECOND}


def _ends(*programs):
    links = Links(_CLUSTER, {"cp": len(programs)}, range(len(programs)))
    return SharedSimulation(dict(enumerate(programs)), _CLUSTER.device, links).run()[1]


def _post(number, axis, seconds, to, source, stream=None):
    return Post(number, "exchange", axis, stream or axis, int(seconds * _SECOND), 1, to, source)


def test_idle_ranks_leave_their_share_to_others():
    """The profile was measured with all ranks at work; alone a rank is as fast as all that share its core."""
    assert _ends((_WORK,), (_WORK,)) == {0: pytest.approx(1), 1: pytest.approx(1)}
    assert _ends((_WORK,), ()) == {0: pytest.approx(0.5), 1: 0}
    assert _ends((_WORK, _WORK), (_WORK,)) == {0: pytest.approx(1.5), 1: pytest.approx(1)}
    fewer = _ends((_WORK,), (), (), ())
    assert fewer[0] == pytest.approx(0.5), "it gets one core at most"


def test_concurrent_messages_share_a_link():
    """One of a second and one of two: both at half the rate, until the first arrives after two seconds."""
    both = (_post(0, "cp", 1, 1, 1, "a"), _post(1, "cp", 2, 1, 1, "b"))
    first = (*both, Wait(0))
    second = tuple(p._replace(to=0, source=0) for p in both)
    assert _ends((*first,), (*second, Wait(1))) == {0: pytest.approx(2), 1: pytest.approx(3)}


def test_chained_messages_are_serial():
    """A state passed from rank to rank."""
    first = (_post(0, "cp", 1, 1, None), Wait(0))
    middle = (_post(0, "cp", 1, None, 0), Wait(0), _post(1, "cp", 1, 2, None), Wait(1))
    last = (_post(0, "cp", 1, None, 1), Wait(0))
    assert _ends(first, middle, last) == {0: pytest.approx(1), 1: pytest.approx(2), 2: pytest.approx(2)}

    problem = Problem(size=3, heads=4, kv_heads=4, head_dim=8, seq_length=48, dtype=torch.float32)
    lasp1 = program(settled(providers.get("lasp1"), problem, Options()), 1)
    received, sent = (e for e in lasp1.forward if isinstance(e, Post))
    assert (received.to, sent.source) == (None, None) and received.nbytes == sent.nbytes == 4 * 8 * 8 * 4

    large = replace(problem, size=8, heads=8, kv_heads=8, head_dim=512, v_head_dim=512)
    zeco = program(settled(providers.get("zeco"), large, Options()), 3)
    posted = [(e.source, e.to, e.nbytes) for e in zeco.forward if isinstance(e, Post)]
    block = 8 * 512 * 128 * 4
    assert posted == [(2, None, block), *[(2, 4, block)] * 3, (None, 4, block)], "a block leaves as the next arrives"


def test_deadlocked_ranks_are_named():
    with pytest.raises(RuntimeError, match="rank 0 for exchange along cp"):
        _ends((_post(0, "cp", 1, 1, 1), Wait(0)), ())


@pytest.mark.parametrize("nics", [2, 1])
def test_gloo_ring_leaves_each_node_once(nics):
    """Four ranks on two nodes: one of the ring's messages leaves each node, with a card for itself."""
    cluster = hardware.override(_CLUSTER, per_node=2, nics=nics)
    post = Post(0, "all_gather", "cp", "cp", 3 * _SECOND, 2, None, None)
    assert Links(cluster, {"cp": 4}, (0, 0, 1, 1)).cost(post, 0).seconds == pytest.approx(3, rel=1e-3)


def test_gloo_sends_short_messages_directly():
    """Three peers, each with a message to start; NCCL uses a ring, all tensors in one launch."""
    cluster = hardware.override(_CLUSTER, inter={"latency_s": 0.1, "verbs": {"all_to_all": _link(0.2)}})
    short, long = (Post(0, "all_gather", "cp", "cp", n, 2, None, None) for n in (3 * 256 * 1024, 3 * 256 * 1024 + 3))
    gloo, nccl = (Links(hardware.override(cluster, transport=name), {"cp": 4}, range(4)) for name in ("gloo", "nccl"))
    assert gloo.cost(short, 0).seconds == pytest.approx(0.6, abs=0.01), "as an all-to-all does"
    assert gloo.cost(long, 0).seconds == pytest.approx(0.3, abs=0.01)
    assert nccl.cost(short, 0).seconds == pytest.approx(0.3, abs=0.01)
    exchanged = Post(0, "all_to_all", "cp", "cp", 3 * 1024, 2, None, None)
    assert gloo.cost(exchanged, 0).seconds == pytest.approx(0.6, abs=0.01)
    assert nccl.cost(exchanged, 0).seconds == pytest.approx(0.2, abs=0.01), "to all at once"


def test_cards_are_full_duplex():
    """Of a ring over two nodes one message leaves each and one arrives."""
    cluster = hardware.override(_CLUSTER, per_node=2, nics=1)
    links = Links(cluster, {"cp": 4}, (0, 0, 1, 1))
    sent = [links.cost(_post(0, "cp", 1, (r + 1) % 4, (r - 1) % 4), r).seconds for r in range(4)]
    assert sent == pytest.approx([1, 1, 1, 1], rel=1e-3)
    across = [links.cost(_post(0, "cp", 1, (r + 2) % 4, (r - 2) % 4), r).seconds for r in range(4)]
    assert across == pytest.approx([2, 2, 2, 2], rel=1e-3), "two leave each node"
