"""Identities of attention's gradients hold for every provider and mask.

A wrong gradient breaks them: ``test_planted_faults``, ``test_planted_later``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from nightly import NIGHT
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.gradient_dtype import GRADIENT_DTYPE
from cp_plugin.megatron.selfcheck.exact_rows import Rounding
from cp_plugin.planner.trace.memory import Meter

pytestmark = pytest.mark.usefixtures("adapter")

CLEAN = 10_000 if NIGHT else 200
"""Random correct calls, in which nothing may be found."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "large": lambda x: 8 * x,
    "small": lambda x: x / 4096,
    "far from zero": lambda x: x + 5,
    "the same tokens again": lambda x: x[:4].repeat(len(x) // 4, *(1,) * (x.dim() - 1)),
    "some zero": lambda x: x * (torch.arange(len(x)) % 3 > 0).view(-1, *(1,) * (x.dim() - 1)),
}


class Case(NamedTuple):
    """A call with random inputs."""

    provider: str
    ranks: int
    dtype: torch.dtype
    tensors: dict[str, Tensor]
    call: dict[str, Any]
    options: dict[str, Any]

    @property
    def linear(self) -> bool:
        return providers.get(self.provider).kind == "linear"


def drawn(seed: int) -> Case:
    """A random case."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ranks = draw.choice((2, 4))
    dtype = draw.choice(DTYPES)
    provider = draw.choice(providers.names("softmax") + providers.names("linear"))
    linear = providers.get(provider).kind == "linear"
    s, b, g = ranks * draw.choice((4, 8, 16)), draw.choice((1, 2)), 4
    h, d = g * draw.choice((1, 2)), draw.choice((8, 16))
    shapes = {"q": (s, b, h, d), "k": (s, b, g, d), "v": (s, b, g, d), "dout": (s, b, h, d)}
    x = {n: DATA[draw.choice(list(DATA))](torch.randn(z, generator=generator)).to(dtype) for n, z in shapes.items()}
    call: dict[str, Any] = {}
    if linear:
        if provider in ("lasp2", "lasp1", "zeco") and draw.random() < 0.7:
            x["log_decay"] = -torch.rand(s, b, g, generator=generator).to(dtype)
    else:
        call["causal"] = draw.random() < 0.8
        if draw.random() < 0.3:
            call["window"] = (draw.randrange(1, s), 0)
        if draw.random() < 0.4:
            inside = sorted(draw.sample(range(1, s), 2))
            call["cu_seqlens"] = torch.tensor([0, *inside, s])
        if draw.random() < 0.3:
            call["sink"] = torch.randn(h, generator=generator).to(dtype)
    narrow = GRADIENT_DTYPE in providers.get(provider).options and seed % 5 == 0
    return Case(provider, ranks, dtype, x, call, {"gradient_dtype": "model"} if narrow else {})


def totals(case: Case) -> dict[str, Tensor] | None:
    """The sums over all ranks; None for a case that the provider refuses."""
    from cp_plugin.megatron.selfcheck.identities import sums

    q, k = case.tensors["q"], case.tensors["k"]
    problem = Problem(
        size=case.ranks, seq_length=len(q), heads=q.size(2), kv_heads=k.size(2), head_dim=q.size(3), dtype=case.dtype
    )
    try:
        settled = providers.settle(case.provider, problem, Options(**case.options))
    except ValueError:
        return None

    def rank(mesh: Mesh) -> dict[str, Tensor] | None:
        cp = ContextParallel(case.provider, mesh=mesh, problem=problem, **case.options)
        x = {name: cp.shard(value).clone().requires_grad_(name != "dout") for name, value in case.tensors.items()}
        inputs = [x[name] for name in ("q", "k", "v")]
        call = cp.linear_attention if case.linear else cp.attention
        try:
            out = call(*inputs, *([x["log_decay"]] if "log_decay" in x else ()), **case.call)
        except ValueError:
            return None
        grads = dict(zip("qkv", torch.autograd.grad(out, inputs, x["dout"]), strict=True)) | {"out": x["dout"]}
        values = dict(zip("qkv", inputs, strict=True)) | {"out": out}
        return {name: sums(name, values[name].detach(), grads[name], x["k"].shape[:3]) for name in grads}

    by_rank = run_threads(rank, settled.axes)
    if None in by_rank:
        return None
    return {name: torch.stack([sums_of_rank[name] for sums_of_rank in by_rank]).sum(0) for name in by_rank[0]}


@pytest.mark.parametrize("shape", [(40_000, 1, 1, 64), (300, 2, 8, 1024), (9, 1, 2, 250_000)])
def test_products_need_little_memory_beside_the_gradients(shape: tuple[int, int, int, int]) -> None:
    """At most 64 MB, and the sums of whole tensors."""
    from cp_plugin.megatron.selfcheck.identities import sums

    x, dx = (torch.randn(shape, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))
    dx = dx.movedim(0, -1).contiguous().movedim(-1, 0)  # autograd gives any strides
    with Meter() as meter:
        totals = sums("q", x, dx, shape[:3])
    assert meter.peak <= 64 << 20
    product = x.double() * dx.double()
    want = torch.stack([y.sum((0, 1, 3)) for y in (product, product**2, product.abs(), x.double() ** 2)])
    torch.testing.assert_close(totals, want, rtol=1e-12, atol=1e-9)


def apart(case: Case, total: dict[str, Tensor]) -> list[tuple[float, str]]:
    """How far each identity is from holding, in units of what rounding may do."""
    from cp_plugin.megatron.selfcheck.identities import LINEAR, SOFTMAX, compared

    hops = case.ranks if case.options else 0
    rounding = Rounding.from_dtype(case.dtype, cuda=False, hops=hops)
    pairs = []
    for one, other in LINEAR if case.linear else SOFTMAX:
        far, allowed = compared(total[one], total[other], rounding)
        fair = far.isfinite() & allowed.isfinite()
        pairs.append(
            ((far / allowed.clamp_min(1e-300))[fair].max().item() if fair.any() else 0.0, f"{one} and {other}")
        )
    return pairs


def test_clean_calls_of_all_kinds_pass() -> None:
    """No false alarm, and a margin of two."""
    worst: dict[torch.dtype, tuple[float, str, int]] = {dtype: (0.0, "", -1) for dtype in DTYPES}
    checked, seen = 0, set()
    seed = 0
    while checked < CLEAN:
        case = drawn(seed)
        total = totals(case)
        if total is not None:
            checked += 1
            seen.add(case.provider)
            far, pair = max(apart(case, total))
            worst[case.dtype] = max(worst[case.dtype], (far, f"{case.provider}: {pair}", seed))
        seed += 1
    print({str(dtype): farthest for dtype, farthest in worst.items()})
    assert seen == {*providers.names("softmax"), *providers.names("linear")}
    assert max(farthest[0] for farthest in worst.values()) < 0.5, worst
