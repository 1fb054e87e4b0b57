"""Every public call inside what people wrap around layers: checkpoints, offloading, torch.compile, a second derivative.

Each kind of wrapper against every call: what one of them gets wrong, another may too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nightly import nightly, pairs_at_night
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_plugin
from cp_plugin import ContextParallel
from cp_plugin.attention.convolution import short_convolution
from cp_plugin.attention.packs import place_documents
from cp_plugin.attention.recompute import Recomputed
from cp_plugin.attention.shift import shift
from cp_plugin.comm import Mesh, run_threads
from cp_plugin.core.options import Options
from cp_plugin.methods import registry as providers
from cp_plugin.methods.registry import names

Call = Callable[[ContextParallel, Tensor], Tensor]
"""Of a shard ``[s, 1, 2, 8]``."""


def attention(cp: ContextParallel, x: Tensor) -> Tensor:
    return cp.attention(x, x.sin(), x.cos())


def linear(cp: ContextParallel, x: Tensor) -> Tensor:
    return cp.linear_attention(x, x.sin(), x.cos())


def gated(cp: ContextParallel, x: Tensor) -> Tensor:
    return cp.linear_attention(x, x.sin(), x.cos(), -x.square().sum(-1))


def delta(cp: ContextParallel, x: Tensor) -> Tensor:
    key = nn.functional.normalize(x.sin(), dim=-1)
    return cp.linear_attention(x, key, x.cos(), -x.square().sum(-1), beta=x.sum(-1).sigmoid())


def convolution(cp: ContextParallel, x: Tensor) -> Tensor:
    flat = x.flatten(2)
    return short_convolution(cp, flat, flat[:1, 0].T.expand(-1, 4)).view_as(x)


def unshard(cp: ContextParallel, x: Tensor) -> Tensor:
    return cp.shard(cp.unshard(x.sin()).cos())


def shifted(cp: ContextParallel, x: Tensor) -> Tensor:
    return shift(cp, x.sin())


CALLS: dict[str, tuple[str, Call]] = (
    {f"attention, {name}": (name, attention) for name in names("softmax")}
    | {f"linear attention, {name}": (name, linear) for name in names("linear")}
    | {
        f"{what}, {name}": (name, call)
        for what, call in (("gated", gated), ("delta rule", delta))
        for name in ("lasp2", "lasp1", "zeco")
    }
    | {"short convolution": ("lasp2", convolution), "unshard": ("striped", unshard), "shift": ("ring", shifted)}
)


def offloaded(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return function(x)


WRAPPERS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "reentrant checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "recomputed, reentrant": lambda f, x: checkpoint(Recomputed(f), x, use_reentrant=True),
    "recomputed": lambda f, x: checkpoint(Recomputed(f), x, use_reentrant=False),
    "checkpoint in a checkpoint": lambda f, x: checkpoint(
        lambda y: checkpoint(f, y, use_reentrant=False), x, use_reentrant=False
    ),
    "offloaded": offloaded,
}


def on_ranks(name: str, run: Callable[[ContextParallel, Tensor], Tensor], ranks: int = 2, tokens: int = 32) -> Tensor:
    """The results of ``run`` on a shard of the same sequence, on all ranks, one after the other."""
    provider = CALLS[name][0]
    x = torch.randn(tokens, 1, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))
    problem = providers.Problem(size=ranks, heads=2, kv_heads=2, seq_length=tokens, dtype=torch.float64)
    settled = providers.settle(provider, problem, Options())

    def rank(mesh: Mesh) -> Tensor:
        cp = ContextParallel(provider, mesh=mesh, problem=problem)
        return run(cp, cp.shard(x).clone().requires_grad_())

    return torch.cat(run_threads(rank, settled.axes))


@pairs_at_night
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_without_the_wrapper(name: str, wrapper: str) -> None:
    call = CALLS[name][1]

    def gradient(how: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> Tensor:
        def run(cp: ContextParallel, x: Tensor) -> Tensor:
            how(lambda y: call(cp, 2 * y).sin(), x).square().sum().backward()
            return x.grad

        return on_ranks(name, run)

    assert torch.equal(gradient(WRAPPERS[wrapper]), gradient(lambda f, x: f(x)))


SECOND: dict[str, Callable[[Tensor, list[Tensor]], object]] = {
    "backward": lambda total, weights: total.backward(),
    "backward(inputs=)": lambda total, weights: total.backward(inputs=weights),
    "autograd.grad": torch.autograd.grad,
    "autograd.grad, of the last": lambda total, weights: torch.autograd.grad(total, weights[1:]),
}


@pairs_at_night
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("name", CALLS)
def test_a_penalty_on_gradients_is_right_or_refused(name: str, second: str) -> None:
    """``loss + penalty``: the loss has a gradient of its own, so that a lost penalty would go unnoticed."""
    provider, call = CALLS[name]
    x = torch.randn(16, 1, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cp = ContextParallel(provider)
    if call in (shifted, unshard):
        torch.autograd.gradgradcheck(lambda x: call(cp, x), x.requires_grad_())
        return
    for power in (1, 2):  # the gradient that comes in needs none but for the weight behind the call, and needs one
        weights = [torch.ones(8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        at = x.clone().requires_grad_()
        loss = (call(cp, at * weights[0]).view_as(at) * weights[1]).pow(power).sum()
        (slope,) = torch.autograd.grad(loss, at, create_graph=True)
        with pytest.raises(RuntimeError, match="first derivatives only"):
            SECOND[second](loss + slope.square().sum(), weights)


@pytest.mark.parametrize(
    "name",
    [
        "attention, striped",
        *(pytest.param(n, marks=nightly) for n in ("gated, lasp2", "short convolution", "unshard", "shift")),
    ],
)
def test_compiled_layers_take_another_length(name: str) -> None:
    """The second length of a compiled layer has symbolic sizes."""
    provider, call = CALLS[name]
    cp = ContextParallel(provider)
    torch._dynamo.reset()
    layer = torch.compile(lambda x: call(cp, x * 2) + cp.positions(len(x)).view(-1, 1, 1, 1), backend="eager")
    for tokens in (16, 24, 40):
        x = torch.randn(tokens, 1, 2, 8)
        assert torch.equal(layer(x), call(cp, x * 2) + cp.positions(tokens).view(-1, 1, 1, 1))
    torch._dynamo.reset()


def test_many_calls_in_a_compiled_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is traced but their common wrapper, and that not anew for each kind of call, up to torch's limit."""
    from torch._dynamo import convert_frame

    looked_into, look = set(), convert_frame.ConvertFrame.__call__

    def seen(self, frame, *args, **named):
        looked_into.add(Path(frame.f_code.co_filename))
        return look(self, frame, *args, **named)

    monkeypatch.setattr(convert_frame.ConvertFrame, "__call__", seen)
    # With torch 2.10 this stays True after dispatch modes that ended in several threads, and then nothing is compiled.
    inside = "_is_in_any_mode_without_ignore_compile_internals"
    monkeypatch.setattr(torch.utils._python_dispatch, inside, False, raising=False)

    def layer(x: Tensor) -> Tensor:
        for settings in ({}, {"causal": False}, {"scale": 0.3}, {"causal": False, "scale": 0.3}):
            x = softmax.attention(x, x, x, **settings).sin() + linear.linear_attention(x, x, v=x, **settings).cos()
        x = short_convolution(linear, x.flatten(2), x[0, 0].reshape(16, 1)).view_as(x)
        x = shift(softmax, x) + shift(softmax, x, by=2)
        return softmax.shard(softmax.unshard(x)) * softmax.positions(len(x)).view(-1, 1, 1, 1)

    softmax, linear = ContextParallel("ring"), ContextParallel("lasp2")
    x = torch.randn(16, 1, 2, 8, requires_grad=True)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        out = torch.compile(layer, backend="eager")(x)
    torch._dynamo.reset()
    (got,), (want,) = (torch.autograd.grad(y.sum(), x) for y in (out, layer(x)))
    assert torch.equal(out, layer(x)) and torch.equal(got, want)
    package = Path(cp_plugin.__file__).parent
    ours = {path.relative_to(package).as_posix() for path in looked_into if package in path.parents}
    assert Path(__file__) in looked_into and ours <= {"common/eager.py"}, ours


WRONG = {
    "of this rank's length": (torch.tensor([0, 5, 24]), "0 to the 48 tokens"),
    "without a start": (torch.tensor([5, 48]), "0 to the 48 tokens"),
    "without an end": (torch.tensor([0, 5]), "0 to the 48 tokens"),
    "not increasing": (torch.tensor([0, 30, 5, 48]), "must increase"),
    "of another dtype": (torch.tensor([0.0, 5.0, 48.0]), "int32 or int64"),
    "a matrix": (torch.tensor([[0, 5, 48]]), "int32 or int64"),
    "empty": (torch.tensor([], dtype=torch.int64), "must increase"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("call", ["attention", "linear_attention", "linear_state", "short_convolution"])
def test_bounds_that_are_none_are_refused_by_every_call(call: str, wrong: str) -> None:
    cu_seqlens, said = WRONG[wrong]

    def rank(mesh: Mesh) -> None:
        cp = ContextParallel("striped" if call == "attention" else "lasp2", mesh=mesh)
        x = torch.randn(24, 1, 2, 8)
        with pytest.raises(ValueError, match=said):
            if call == "short_convolution":
                short_convolution(cp, x.flatten(2), torch.ones(16, 4), cu_seqlens=cu_seqlens)
            else:
                getattr(cp, call)(*(x,) * (2 if call == "linear_state" else 3), cu_seqlens=cu_seqlens)

    run_threads(rank, {"cp": 2})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_of_another_pack_than_the_placement(dtype: torch.dtype) -> None:
    """Fewer bounds, or none, would let a state pass between documents; more are right."""
    placed, more = (torch.tensor(x, dtype=dtype) for x in ((0, 20, 31, 48), (0, 7, 20, 31, 40, 48)))
    x = torch.randn(48, 1, 2, 8, dtype=torch.float64)
    alone = ContextParallel("lasp2").linear_attention(x, x, x, cu_seqlens=more)

    def rank(mesh: Mesh) -> Tensor:
        before = ContextParallel("lasp2", mesh=mesh, layout="zigzag")
        y = before.shard(x)
        torch.testing.assert_close(before.unshard(before.linear_attention(y, y, y, cu_seqlens=more)), alone)
        cp = place_documents(before, placed)
        y = cp.shard(x)
        for fewer in (None, placed[[0, 1, 3]], placed[[0, 3]]):
            with pytest.raises(ValueError, match=r"placed by documents with bounds 0, 20, 31, 48, and cu_seqlens"):
                cp.linear_attention(y, y, y, cu_seqlens=fewer)
        return cp.unshard(cp.linear_attention(y, y, y, cu_seqlens=more))

    for found in run_threads(rank, {"cp": 2}):
        torch.testing.assert_close(found, alone)
