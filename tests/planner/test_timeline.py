"""Timelines: traced programs send what the formulas say, and their times match hand calculations, also of ranks that
share processors and links, and of Gloo's collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_cases import kernel_calls
from nightly import nightly
from round_cluster import round_cluster

from cp_plugin.engine.attention.calls import Setup, settled
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.tiles import tiles
from cp_plugin.engine.kernels.backends import devices
from cp_plugin.engine.kernels.blocks import LONG
from cp_plugin.engine.kernels.cost import cost, speeds_on
from cp_plugin.engine.methods import registry as providers
from cp_plugin.planner.machine import kernel_time
from cp_plugin.planner.machine.hardware import Cluster, cluster, override
from cp_plugin.planner.machine.links import Links
from cp_plugin.planner.trace.program import Attention, Post, Products, Shape, Wait, program
from cp_plugin.planner.trace.simulation import HOST, WAITING, SharedSimulation, Simulation
from cp_plugin.planner.trace.timeline import run, simulate

LINEAR_BASELINE = "linear_ring"  # thousands of small products: slow to trace, never planned


def setups(problem: Problem, **options: Any) -> list[Setup]:
    names = [*providers.names(), *(n for n in providers.names("linear") if n != LINEAR_BASELINE)]
    every = [settled(providers.get(name), problem, Options(**options)) for name in names]
    return [setup for setup in every if setup.reason is None]


def toy(*, per_node: int = 1, nics: int = 1, rate: float = 1e9) -> Cluster:
    """Nothing but attention (1e12 FLOP/s) and messages (1e9 bytes/s between nodes) takes time."""
    return round_cluster(flops_per_s=1e12, per_node=per_node, intra=(0.0, 1e11), inter=(0.0, rate), nics=nics)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_ranks_share_all_pairs(size: int, causal: bool) -> None:
    """And send what the formula says, which real ranks are held to: ``tests/testing/test_traffic.py``."""
    problem = Problem(size=size, heads=8, kv_heads=8, head_dim=16, seq_length=64 * size, causal=causal)
    n = problem.seq_length
    for setup in setups(problem):
        programs = [program(setup, index) for index in range(size)]
        for index, one in enumerate(programs):
            assert one.sent == setup.provider.traffic(problem, setup.options, index), setup.provider.name
        if setup.provider.kind == "softmax":
            seen = sum(one.pairs() for one in programs)
            assert seen == (n * (n + 1) // 2 if causal else n * n) * problem.heads, setup.provider.name


def test_pairs_are_counted_in_whole_blocks() -> None:
    for rows, keys, diagonal, block in ((256, 256, 0, (128, 64)), (100, 300, 7, (32, 64)), (64, 64, -3, (16, 16))):
        seen = [[k <= q + diagonal for k in range(keys)] for q in range(rows)]
        expected = 0
        for q in range(0, rows, block[0]):
            for k in range(0, keys, block[1]):
                part = [row[k : k + block[1]] for row in seen[q : q + block[0]]]
                expected += len(part) * len(part[0]) * any(any(row) for row in part)
        assert kernel_time.pairs(Shape(rows, keys, diagonal), block) == expected


def test_a_ring_of_two_by_hand() -> None:
    """Two ranks, full mask: a message overlaps with the first kernel; the excess is exposed."""
    problem = Problem(size=2, heads=4, kv_heads=4, head_dim=64, seq_length=4096, causal=False)
    kernel = 2 * 2048**2 * 4 * 128 / 1e12
    kv = 2 * 2048 * 4 * 64 * 2
    ring = settled(providers.get("ring"), problem, Options(gradient_dtype="float32"))
    for rate in (1e9, 1e8):
        timeline = simulate(ring, cluster=toy(rate=rate), ranks="all")
        message = kv / rate
        assert timeline.forward.seconds == pytest.approx(2 * kernel + max(0.0, message - kernel), rel=1e-3)
        # one hop of k, v beside the first kernel; dk, dv in float32 return exposed after the second
        backward, home = 2.5 * kernel, 2 * message
        expected = max(backward, message) + backward + home
        assert timeline.backward.seconds == pytest.approx(expected, rel=2e-2)
        assert timeline.exposed_s[0] == pytest.approx(timeline.seconds - 2 * kernel - 2 * backward, rel=2e-2)


def test_cards_of_a_node_are_shared() -> None:
    """When all ranks of a node send across nodes, they wait four times as long with one card as with four."""
    problem = Problem(size=8, heads=4, kv_heads=4, head_dim=64, seq_length=8192, causal=False)
    rings = settled(providers.get("double_ring"), problem, Options(intra_size=1))
    one, four = (simulate(rings, cluster=toy(per_node=4, nics=n, rate=1e7), ranks="all") for n in (1, 4))
    assert one.seconds == pytest.approx(four.seconds, rel=1e-2), "around a ring one rank of a node sends outside"
    problem = Problem(size=8, heads=8, kv_heads=8, head_dim=64, seq_length=8192, causal=False)
    ulysses = settled(providers.get("ulysses"), problem, Options())
    one, four = (simulate(ulysses, cluster=toy(per_node=4, nics=n, rate=1e7), ranks="all") for n in (1, 4))
    assert max(one.exposed_s.values()) == pytest.approx(4 * max(four.exposed_s.values()), rel=1e-2)


@nightly
@pytest.mark.parametrize("name", ["dgx-h100", "a100-4-per-node", "h100-1-per-node"])
def test_few_ranks_stand_for_all_and_faster_links_never_cost_time(name: str) -> None:
    problem, slow_links = Problem(size=16, heads=16, kv_heads=16, seq_length=2**17), cluster(name)
    inter = slow_links.inter
    fast_links = override(slow_links, inter={"bytes_per_s": 2 * inter.bytes_per_s, "latency_s": inter.latency_s / 2})
    for setup in setups(problem):
        few, every = (simulate(setup, cluster=slow_links, ranks=ranks) for ranks in ("few", "all"))
        assert few.seconds == pytest.approx(every.seconds, rel=0.07), setup.provider.name
        after = run(setup, every.programs, fast_links).seconds
        assert after <= every.seconds * (1 + 1e-9), setup.provider.name


def test_a_refused_setup() -> None:
    with pytest.raises(ValueError, match="cannot be split across 64 ranks"):
        few_heads = settled(providers.get("ulysses"), Problem(size=64, heads=4, kv_heads=4), Options())
        simulate(few_heads, cluster=cluster("dgx-h100"))


def test_tiles_are_launches_on_a_cpu_and_one_launch_on_a_gpu() -> None:
    problem = Problem(size=4, heads=2, kv_heads=2, head_dim=16, seq_length=512)
    setup = settled(providers.get("all_gather"), problem, Options())
    for tiled in (True, False):
        events = [e for e in program(setup, 0, tiled=tiled).forward if isinstance(e, Attention)]
        cp_segments = (range(0, 64), range(448, 512))
        whole = tiles(cp_segments, (range(512),), Mask.from_arguments(True))
        assert len(events) == (sum(len(tile.cut()) for tile in whole) if tiled else 1)


def test_launch_takes_as_long_as_its_longest_block() -> None:
    """On 132 multiprocessors a block of 128 queries takes 132 times its share of the device."""
    device = cluster("dgx-h100").device
    kernel = kernel_time.kernel_for(device, "bfloat16")
    rate = kernel.forward

    def seconds(heads: int, diagonal: int, keys: int = 4096, rows: int = 128) -> float:
        event = Attention("forward", (Shape(rows, keys, diagonal),), rows, heads, 128, 128, "bfloat16")
        return kernel_time.seconds(event, device) - rate.overhead_s - heads * rows * rate.row_s

    one = 4 * 128 * 4096 * 128 / (rate.flops_per_s / 132)
    assert [seconds(n, 4096) for n in (1, 66, 132)] == pytest.approx([one] * 3)
    assert seconds(264, 4096) == pytest.approx(2 * one)
    assert seconds(1, 0, rows=4096) == pytest.approx(one), "the last of 32 blocks of a causal tile sees all keys"
    assert seconds(264, 4096, keys=4000, rows=100) == pytest.approx(2 * one), "blocks are computed whole"
    wide = Attention("backward", (Shape(4096, 128, 4096),), 4096, 1, 128, 128, "bfloat16")
    own = 10 * 128 * 4096 * 128 / (kernel.backward.flops_per_s / 132)
    assert kernel_time.seconds(wide, device) == pytest.approx(own + 15e-6 + 4096 * kernel.backward.row_s), "of keys"


@pytest.mark.parametrize(
    ("name", "layout", "tokens", "window"),
    [
        ("all_gather", "zigzag", 4096, None),
        ("all_gather", "striped", 512, None),
        ("all_gather", "striped", 8192, None),
        ("striped", "striped", 8192, 4095),
    ],
)
def test_a_block_is_priced_as_auto_computes_it(name: str, layout: str, tokens: int, window: int | None) -> None:
    device, sight = cluster("dgx-h100").device, None if window is None else (window, 0)
    problem = Problem(size=8, heads=32, kv_heads=8, head_dim=128, seq_length=8 * tokens, window=sight)
    setup = settled(providers.get(name), problem, Options(layout=layout))
    at = kernel_time.auto_speeds(device.processors)
    assert at == speeds_on(devices.family((9, 0)), "flash", 3) and "flash 3 is installed" in kernel_time.assumed(device)
    events = [e for e in program(setup, 5).forward if isinstance(e, Attention)]
    calls = [len(kernel_time.cut_tiles(event, at)[0]) for event in events]
    weighed = [cost(*block.area, sizes, at, LONG) for block, sizes in kernel_calls(setup, 5)]
    assert sum(calls) == sum(c.tiles or 0 for c in weighed if c.prefers_library) and any(c.tiles for c in weighed)
    for event, parts in zip(events, calls, strict=True):
        library = kernel_time.seconds(event._replace(auto=None), device)
        assert kernel_time.seconds(event, device) > (1 if parts else 1.3) * library, "merges, or our slower kernel"


def test_rates_by_head_dim() -> None:
    kernel = kernel_time.kernel_for(cluster("dgx-h100").device, "bfloat16")
    assert kernel.rate("forward", 128) == kernel.rate("forward", 112) == kernel.forward
    assert kernel.rate("forward", 64) == kernel.rate("forward", 80) == kernel.heads["64"].forward != kernel.forward
    assert kernel.rate("backward", 256) == kernel.heads["256"].backward


def test_kernels_and_messages_wait_for_the_host() -> None:
    """Four launches of 1 us each on a host that takes 5 us for one, and 20 us for the message between them."""
    device = toy().device.model_copy(update={"host_launch_s": 5e-6, "host_post_s": 20e-6})
    kernel = Attention("forward", (Shape(50, 50, 49),), 50, 1, 50, 50, "bfloat16")  # 0.5e6 FLOPs: 0.5 us
    posted, waits = Post(0, "exchange", "cp", "cp", 1000, 1, 1, 1), Wait(0)
    links = Links(toy(), {"cp": 2}, (0, 1))
    spent, ends = Simulation({0: (kernel, kernel, posted, kernel, waits, kernel)}, device, links).run()
    assert ends[0] == pytest.approx(40e-6 + 0.5e-6), "2 + 4 + 1 + 1: the host's time, and the last kernel's"
    total = {what: sum(spent[0][what]) for what in (HOST, "attention", WAITING)}
    assert total == pytest.approx({HOST: 38.5e-6, "attention": 2e-6, WAITING: 0.0})


SECOND = 10**9
"""FLOPs or bytes per second."""
LINKS = {"intra": (0.0, 1e13), "inter": (0.0, 1.0 * SECOND)}
GLOO = override(round_cluster(flops_per_s=1.0 * SECOND, shared_by=2, **LINKS), transport="gloo")
WORK = Products(SECOND, 1, "float32")


def _link(latency):
    return {"latency_s": latency, "bytes_per_s": 1.0 * SECOND}


def _ends(*programs):
    links = Links(GLOO, {"cp": len(programs)}, range(len(programs)))
    return SharedSimulation(dict(enumerate(programs)), GLOO.device, links).run()[1]


def _post(number, axis, seconds, to, source, stream=None):
    return Post(number, "exchange", axis, stream or axis, int(seconds * SECOND), 1, to, source)


def test_idle_ranks_leave_their_share_to_others():
    """The profile was measured with all ranks at work; alone a rank is as fast as all that share its core."""
    assert _ends((WORK,), (WORK,)) == {0: pytest.approx(1), 1: pytest.approx(1)}
    assert _ends((WORK,), ()) == {0: pytest.approx(0.5), 1: 0}
    assert _ends((WORK, WORK), (WORK,)) == {0: pytest.approx(1.5), 1: pytest.approx(1)}
    fewer = _ends((WORK,), (), (), ())
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
    cluster = override(GLOO, per_node=2, nics=nics)
    post = Post(0, "all_gather", "cp", "cp", 3 * SECOND, 2, None, None)
    assert Links(cluster, {"cp": 4}, (0, 0, 1, 1)).cost(post, 0).seconds == pytest.approx(3, rel=1e-3)


def test_gloo_sends_short_messages_directly():
    """Three peers, each with a message to start; NCCL uses a ring, all tensors in one launch."""
    cluster = override(GLOO, inter={"latency_s": 0.1, "verbs": {"all_to_all": _link(0.2)}})
    short, long = (Post(0, "all_gather", "cp", "cp", n, 2, None, None) for n in (3 * 256 * 1024, 3 * 256 * 1024 + 3))
    gloo, nccl = (Links(override(cluster, transport=name), {"cp": 4}, range(4)) for name in ("gloo", "nccl"))
    assert gloo.cost(short, 0).seconds == pytest.approx(0.6, abs=0.01), "as an all-to-all does"
    assert gloo.cost(long, 0).seconds == pytest.approx(0.3, abs=0.01)
    assert nccl.cost(short, 0).seconds == pytest.approx(0.3, abs=0.01)
    exchanged = Post(0, "all_to_all", "cp", "cp", 3 * 1024, 2, None, None)
    assert gloo.cost(exchanged, 0).seconds == pytest.approx(0.6, abs=0.01)
    assert nccl.cost(exchanged, 0).seconds == pytest.approx(0.2, abs=0.01), "to all at once"


def test_cards_are_full_duplex():
    """Of a ring over two nodes one message leaves each and one arrives."""
    cluster = override(GLOO, per_node=2, nics=1)
    links = Links(cluster, {"cp": 4}, (0, 0, 1, 1))
    sent = [links.cost(_post(0, "cp", 1, (r + 1) % 4, (r - 1) % 4), r).seconds for r in range(4)]
    assert sent == pytest.approx([1, 1, 1, 1], rel=1e-3)
    across = [links.cost(_post(0, "cp", 1, (r + 2) % 4, (r - 2) % 4), r).seconds for r in range(4)]
    assert across == pytest.approx([2, 2, 2, 2], rel=1e-3), "two leave each node"
