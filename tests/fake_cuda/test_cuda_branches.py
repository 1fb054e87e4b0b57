"""Every provider x kernel x mask, forward and backward, on the branches taken on a GPU.

Results are on the device with the right shapes and dtypes, and a repeated call never makes the host wait: no copy from
the device, no blocking copy to it. First calls may wait: they copy tables to the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import product

import pytest
import torch
from equipment.cuda.calls import BACKENDS, MASKS, Linear, Peerless, Result, Softmax, leaf, linear_cases, softmax_cases
from equipment.cuda.device import CUDA, MixedDevicesError, Start, once_warm
from method_cases import kernel_calls
from nightly import NIGHT, nightly, one_case, pairs_at_night

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.kernels.backends import devices, sdpa
from cp_plugin.engine.kernels.blocks import LONG, Planned
from cp_plugin.engine.kernels.cost import cost, speeds_on
from cp_plugin.engine.linear.variants import variants
from cp_plugin.engine.methods import registry as providers

BLOCKS = {
    "causal": {},
    "full": {"causal": False},
    "window of 4,096": {"window": (4095, 0)},
    "4 documents": {"bounds": (0, 3000, 20000, 41000, 65536)},
}
"""Masks of the blocks that ``auto`` divides between a library and our own kernel."""
SHORT = tuple(
    dict.fromkeys(
        (
            *(Softmax(provider=name) for name in providers.names()),
            *(Softmax(provider="ring", layout="zigzag", backend=backend) for backend in BACKENDS),
            *(Softmax(provider="attention2d", layout="striped", mask=mask) for mask in MASKS),
            *(Softmax(provider="ring", backend="flash3", mask=mask) for mask in MASKS),
            *(Softmax(provider=name, mask="gqa", fp8="comm") for name in providers.names()),
        )
    )
)
SHORT_LINEAR = (
    *(Linear(variant=variant, backend="auto") for variant in variants()),
    *(Linear(variant=variant, packed=packed) for variant in ("basic", "lightning", "gla") for packed in (False, True)),
    Linear(variant="gla", causal=False),
    Linear(variant="basic", causal=False),
    Linear(variant="lightning", layout="zigzag", packed=True),
    Linear(variant="lightning", provider="lasp1"),
    Linear(variant="basic", provider="linear_ring"),
)


def left_for_night[T](cases: Iterable[T], short: Collection[T]) -> list[T]:
    """The other cases; by day one of them, which is shown as skipped."""
    left = sorted(set(cases) - set(short), key=str)
    return left if NIGHT else left[:1]


def check(result: Result, *out: int) -> None:
    """Check device, shape and dtype of out and gradients."""
    assert (tuple(result.out.shape), result.out.dtype, result.out.device) == (out, torch.bfloat16, CUDA)
    for gradient, x in zip(result.gradients, result.inputs, strict=True):
        assert (gradient.shape, gradient.dtype, gradient.device) == (x.shape, x.dtype, CUDA)


def softmax(gpu: Start, case: Softmax, capability: tuple[int, int] = (9, 0)) -> None:
    device = gpu(flash=case.flash, capability=capability)
    cp = case.context_parallel()
    check(once_warm(device, lambda: case.run(cp)), case.tokens, 1, case.problem.heads, case.problem.v_head_dim)


def linear(gpu: Start, case: Linear) -> None:
    device = gpu()
    cp, layer = case.context_parallel(), case.layer()
    check(once_warm(device, lambda: case.run(cp, layer)), case.tokens, 1, 4, 16)


def run(gpu: Start, case: Softmax | Linear) -> None:
    (softmax if isinstance(case, Softmax) else linear)(gpu, case)


@pytest.mark.parametrize("case", [*SHORT, *SHORT_LINEAR], ids=str)
def test_attention(gpu: Start, case: Softmax | Linear) -> None:
    run(gpu, case)


@nightly
@one_case
@pytest.mark.parametrize(
    "case", [*left_for_night(softmax_cases(), SHORT), *left_for_night(linear_cases(), SHORT_LINEAR)], ids=str
)
def test_attention_by_night(gpu: Start, case: Softmax | Linear) -> None:
    run(gpu, case)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("provider", ["ring", "attention2d"])
def test_generations_of_gpus(gpu: Start, provider: str, capability: tuple[int, int]) -> None:
    softmax(gpu, Softmax(provider=provider, fp8="comm"), capability)


@pytest.mark.parametrize("te", [False, True], ids=["cudnn", "te"])
@pytest.mark.parametrize("mask", ["causal", "full", "documents"])
def test_lengths_that_vary_stop_building_plans(gpu: Start, te: bool, mask: str) -> None:
    """The library computes the first few lengths, now and later; torch's flash attention or ours the others."""
    device, few = gpu(flash=None, te=te), 0 if mask == "documents" else Planned.MOST
    case = Softmax(provider="ring", layout="zigzag", mask=mask)
    cp, calls = case.context_parallel(), []
    for tokens in (*range(1024, 1024 + 8 * (Planned.MOST + 4), 8), 1024):
        before = len(device.ops.plans)
        device.ops.clear()
        replace(case, tokens=tokens, documents=(0, tokens, 3 * tokens + 8, 4 * tokens)).run(cp)
        by_library = any(("te " if te else "cudnn") in name for name in device.ops.counts)
        calls.append((by_library, len(device.ops.plans) > before))
    assert calls[:-1] == [(True, True)] * few + [(False, False)] * (len(calls) - few - 1)
    assert calls[-1] == (few > 0, False)
    replace(case, tokens=2048, mask="gqa").run(cp)
    assert len(device.ops.plans) > before, "other heads have their own few"


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("backend", ["cudnn", "te"])
def test_a_plan_meets_one_order_of_dout(gpu: Start, backend: str, batch_first: bool) -> None:
    """cuDNN's graph of a backward pass has the strides of its first call's out and dout (asserted in ``Ops.plan``)."""
    device, case = gpu(), Softmax(provider="ring", backend=backend)
    cp, s, h, d = case.context_parallel(), case.tokens, case.problem.heads, case.head_dim
    shape = (2, s, h, d) if batch_first else (s, 2, h, d)
    inputs = [leaf(*shape) for _ in range(3)]
    out = case.forward(cp, [x.transpose(0, 1) if batch_first else x for x in inputs])
    douts = leaf(s, 2, h, d), leaf(2, h, s, d).permute(2, 0, 1, 3), leaf(s, 2, 1, 2 * d)[..., :d].expand(-1, -1, h, -1)
    for dout in douts:
        torch.autograd.grad(out, inputs, dout.detach(), retain_graph=True)
    graphs = [(key[1][1], *strides) for (_, key), strides in device.ops.plans.items() if strides]
    assert graphs and all(len({tuple(sorted(range(3), key=x.__getitem__)) for x in graph}) == 1 for graph in graphs)


@pairs_at_night
@pytest.mark.parametrize("mask", BLOCKS)
@pytest.mark.parametrize("provider", providers.names())
def test_auto_launches_what_its_cost_says(gpu: Start, provider: str, mask: str) -> None:
    """Calls of the library, and launches of ours, in a forward in each layout, on rank 5 of 8 with flash-attn 3."""
    block, device, speeds = BLOCKS[mask], gpu(), speeds_on(devices.family((9, 0)), "flash", 3)
    options = {"head_groups": 1} if "head_groups" in providers.get(provider).options else {}
    bounds = torch.tensor(block["bounds"]) if "bounds" in block else None
    for layout, tokens in product(providers.get(provider).layouts, (512, 8192)[mask != "causal" :]):
        problem = Problem(size=8, heads=32, kv_heads=8, head_dim=128, seq_length=8 * tokens, **block)
        resolved = providers.settle(provider, problem, Options(layout=layout, **options))
        cp, counted = ContextParallel(resolved, mesh=Peerless(resolved.axes, 5)), Counter[str]()
        for one, sizes in kernel_calls(resolved, 5):
            if (each := cost(*one.area, sizes, speeds, LONG)).tiles != 0:
                kernel = "flash_attn_interface forward" if each.prefers_library else "triton _forward"
                counted[kernel] += each.tiles if each.prefers_library else 1
        device.ops.clear()
        q, k, v = (leaf(tokens, 1, heads, 128) for heads in (32, 8, 8))
        cp.attention(q, k, v, causal=problem.causal, window=problem.window, cu_seqlens=bounds)
        assert Counter({name: device.ops.counts[name] for name in counted}) == counted, (layout, tokens)
        assert not any("_forward" in name for name in device.ops.counts.keys() - counted.keys()), (layout, tokens)


def test_a_cpu_tensor_on_its_way_into_a_kernel_is_named(gpu: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    heads_first = sdpa.heads_first
    monkeypatch.setattr(sdpa, "heads_first", lambda x: heads_first(x) * torch.ones(x.size(3)))
    gpu()
    with pytest.raises(
        MixedDevicesError, match=r"aten\.mul at cp_plugin/engine/kernels/backends/sdpa\.py:\d+ _arranged: a CPU tensor"
    ):
        Softmax(provider="ring", backend="sdpa").run()
