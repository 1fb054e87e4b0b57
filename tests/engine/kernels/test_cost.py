"""The cost model: which blocks go to a library in tiles and which to our own kernel, per GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mask_cases import held

from cp_plugin.engine.core import tiles
from cp_plugin.engine.core.block import Block
from cp_plugin.engine.core.mask import CAUSAL, Mask
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.tiles import Tile
from cp_plugin.engine.core.values import KeyValues, Queries
from cp_plugin.engine.kernels import backends, cost
from cp_plugin.engine.kernels.backends import devices
from cp_plugin.engine.kernels.blocks import Either, InOrder, Tiled, Whole, kernel
from cp_plugin.engine.kernels.cost import Cost, Sizes, Speeds

GROUPED = Sizes(heads=32, kv_heads=8, head_dim=128, v_head_dim=128, itemsize=2)
FEW = GROUPED._replace(heads=8, kv_heads=1)
"""As with tensor parallelism 4 or 8."""
LONG = 1024


def speeds(capability: tuple[int, int], backend: str, generation: int | None = None) -> Speeds:
    known = cost.speeds_on(devices.family(capability), backend, generation)
    assert known is not None
    return known


HOPPER = {name: speeds((9, 0), *name.split()[:1], *map(int, name.split()[1:])) for name in ("flash 3", "te", "cudnn")}
AMPERE = speeds((8, 0), "sdpa")


def gathered(method: str, layout: str, tokens: int, size: int = 8) -> Block:
    """What a rank of the method attends to; ``tokens`` per rank."""
    if method == "all_gather":
        rows, keys = (5,), tuple(range(size))
    else:  # a grid of 2 rows and half as many columns
        rows, keys = tuple(range(size // 2)), (size // 2 - 1, size - 1)
    return Block(*(held(layout, *ranks, tokens=tokens * size, size=size) for ranks in (rows, keys)), CAUSAL)


def price(block: Block, sizes: Sizes, at: Speeds | None) -> Cost:
    return cost.cost(*block.area, sizes, at, LONG)


@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize("method", ["all_gather", "attention2d"])
@pytest.mark.parametrize("sizes", [GROUPED, FEW], ids=["32 heads", "8 heads"])
def test_few_large_tiles_go_to_the_library_on_hopper(kernel: str, layout: str, method: str, sizes: Sizes) -> None:
    tokens = 2048 if kernel == "flash 3" else 4096
    for n in (tokens, 8192, 65536):
        estimate = price(gathered(method, layout, n), sizes, HOPPER[kernel])
        assert estimate.tiles is not None and estimate.tiles <= 8 and estimate.prefers_library, (n, estimate)
    assert estimate.tiles == 1 or estimate.library_s < 0.5 * estimate.own_s


@pytest.mark.parametrize("at", [*HOPPER.values(), AMPERE], ids=[*HOPPER, "sdpa on 8.0"])
def test_many_small_tiles_go_to_our_kernel(at: Speeds) -> None:
    for tokens, size in ((512, 8), (512, 64), (1024, 64)):
        estimate = price(gathered("all_gather", "striped", tokens, size), GROUPED, at)
        assert estimate.tiles == size and not estimate.prefers_library
    documents = tuple(range(0, 8 * 4096 + 1, 64))
    packed = Block(*gathered("all_gather", "zigzag", 4096)[:2], Mask(right=0, documents=documents))
    assert not price(packed, GROUPED, at).prefers_library
    narrow = Block((range(65536),), (range(65536),), Mask(left=127, right=0))
    estimate = price(narrow, GROUPED, at)
    assert not estimate.prefers_library and estimate.tiles is None, "more than are counted"


def test_terms_of_the_cost() -> None:
    at = HOPPER["flash 3"]
    block = gathered("all_gather", "contiguous", 4096)  # keys before the shard, and the shard with itself
    estimate = price(block, GROUPED, at)
    n, rows, full = 4096, 4096, 5 * 4096
    causal = (n // 128) * (n // 128 + 1) // 2 * 128**2
    flops = 2 * 32 * 128 * (full * rows + causal)
    products = flops * (2 / at.library.forward + 5 / at.library.backward) / 1e12
    merged = 256 * (2 * rows * 32 + (full + n) * 8) * (2 + 8)
    put_in_order = 256 * 8 * n * 8 * 3 * 2 * 2  # keys of all ranks, three times, read and written
    passes = (merged + put_in_order) / at.bytes_per_s
    assert estimate.tiles == 2
    assert estimate.library_s == pytest.approx(products + passes + 2 * 10 * devices.LAUNCH_S, rel=1e-12)
    pairs = full * rows + n * (n + 1) // 2 + rows * 64
    own = 2 * 32 * 128 * pairs * (2 / at.own.forward + 5 / at.own.backward) / 1e12
    assert estimate.own_s == pytest.approx(own + 3 * devices.LAUNCH_S, rel=1e-12)
    idle = price(block, GROUPED._replace(heads=1, kv_heads=1), at)
    forward, backward = (2 * 128 * pairs * n / rate / 1e12 for n, rate in zip((2, 5), at.own, strict=True))
    want = forward / (32 / 132) + backward + 3 * devices.LAUNCH_S  # 32 blocks of queries for 132 processors
    assert idle.own_s == pytest.approx(want, rel=1e-12)


def test_windows_and_documents_are_counted() -> None:
    wide = Block((range(131072),), (range(131072),), Mask(left=16383, right=0))
    assert price(wide, GROUPED, HOPPER["flash 3"]).prefers_library
    two = Mask(right=0, documents=(0, 30000, 65536))
    packed = Block((range(65536),), (range(65536),), two)
    estimate = price(packed, GROUPED, HOPPER["flash 3"])
    assert estimate.tiles == 2 and estimate.prefers_library


def test_counting_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tile] = []
    between, within = tiles._tiles_between, tiles._causal_tiles

    def counted(generated: Iterator[Tile]) -> Iterator[Tile]:
        for tile in generated:
            made.append(tile)
            yield tile

    monkeypatch.setattr(tiles, "_tiles_between", lambda *args: counted(between(*args)))
    monkeypatch.setattr(tiles, "_causal_tiles", lambda *args: counted(within(*args)))
    n = 2**20
    for rows, keys, mask in (
        ((range(n),), (range(n),), Mask(right=0, documents=tuple(range(0, n + 1, 16)))),
        ((range(n),), (range(n),), Mask(left=16, right=16)),
        ((range(n // 2, n),), (range(n),), Mask(right=0, documents=(0, *range(n // 2, n + 1, 16)))),
    ):
        made.clear()
        assert tiles.tiles_up_to(50, rows, keys, mask) is None and 0 < len(made) <= 51
    few = (range(64),), (range(64),), Mask(right=0, documents=(0, 16, 64))
    assert tiles.tiles_up_to(2, *few) == tiles.tiles(*few) and tiles.tiles_up_to(1, *few) is None


def test_without_speeds_the_library_runs_single_tiles_only() -> None:
    assert price(Block((range(64),), (range(64),), CAUSAL), GROUPED, None).prefers_library
    for block in (
        gathered("all_gather", "striped", 65536),
        Block((range(64),), (range(64),), Mask(left=9, right=0)),
        Block((range(64),), (range(64),), Mask(right=0, documents=(0, 64))),
    ):
        assert not price(block, GROUPED, None).prefers_library


@pytest.mark.parametrize(("tokens", "by_library"), [(4096, True), (256, False)])
def test_forward_and_backward_go_the_same_way(monkeypatch: pytest.MonkeyPatch, tokens: int, by_library: bool) -> None:
    seen: list[object] = []
    monkeypatch.setattr(InOrder, "forward", lambda self, *_: seen.append(self.inner))
    monkeypatch.setattr(InOrder, "backward", lambda self, *_: seen.append(self.inner))
    library, own = Tiled(backends.get("sdpa")), Tiled(backends.get("reference"))
    either = Either(library, InOrder(own, enough=LONG), HOPPER["flash 3"])
    block = gathered("all_gather", "zigzag", tokens)
    q, k = (
        torch.empty(sum(map(len, side)), 1, h, 128, dtype=torch.bfloat16, device="meta")
        for side, h in zip(block[:2], (32, 8), strict=True)
    )
    either.forward(Queries(q), KeyValues(k, k), block)
    either.backward(Queries(q, q, q[..., 0], q[..., 0]), KeyValues(k, k), block)
    assert seen == ([library] * 2 if by_library else [own] * 2)


def test_auto_weighs_kernels_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    problem, cuda = Problem(size=1), torch.device("cuda")
    either = kernel(backends.get("cudnn"), problem, cuda, auto=True)
    assert isinstance(either, Either) and either.speeds == HOPPER["cudnn"] and isinstance(either.own.inner, Whole)
    assert kernel(backends.get("cudnn"), problem, cuda, auto=False) == InOrder(Tiled(backends.get("cudnn")))
    assert kernel(backends.get("sdpa"), problem, torch.device("cpu"), auto=True) == InOrder(Tiled(backends.get("sdpa")))
