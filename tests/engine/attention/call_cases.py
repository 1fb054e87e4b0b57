"""Public calls of plain torch, on shards and, by a formula, on the whole sequence; and what is wrapped around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from linear_cases import LinearCase
from oracle import Case
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cp_plugin import ContextParallel, Problem, Tree
from cp_plugin.engine.attention.convolution import short_convolution
from cp_plugin.engine.attention.recompute import Recomputed
from cp_plugin.engine.attention.shift import shift


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch."""

    tokens: int
    seed: int
    bounds: tuple[int, ...] = ()
    """Of documents, some of them empty; or no bounds at all, which must be refused."""
    placed: bool = False
    """By these documents, whatever the layout."""
    tree: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    mode: str = "train"
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of this call beside tensors, and which tensors there are."""

    @property
    def cu_seqlens(self) -> Tensor | None:
        return torch.tensor(self.bounds, dtype=torch.int32 if self.seed % 2 else torch.int64) if self.bounds else None

    @property
    def wrong(self) -> bool:
        """Whether the bounds are none."""
        ends = self.bounds[:1] + self.bounds[-1:]
        return bool(ends) and (ends != (0, self.tokens) or sorted(self.bounds) != list(self.bounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A layer with one public call in it, how it is wrapped, and what it is trained on."""

    call: str
    provider: str
    size: int
    batches: tuple[Batch, ...]
    args: dict[str, Any]
    """As of a batch, most of which have the same."""
    dtype: torch.dtype = torch.float64
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int = 8
    rows: int = 1
    """The batch dimension."""
    options: dict[str, Any] = field(default_factory=dict)
    views: dict[str, str] = field(default_factory=dict)
    """name -> how an input lies in memory."""
    wanted: frozenset[str] = frozenset()
    """Inputs with a gradient."""
    scaled: frozenset[str] = frozenset()
    """Inputs times a parameter of the layer."""
    wrappers: tuple[str, ...] = ()
    loss: str = "weighted"
    order: str = "in turn"
    repeated: bool = False
    """Two calls in the layer."""
    within: str = "nothing"
    derivative: str = "backward"
    """How gradients are asked for."""

    def problem(self, size: int) -> Problem:
        typical = {"head_dim": self.head_dim, "v_head_dim": self.v_head_dim, "dtype": self.dtype}
        return Problem(size=size, heads=self.heads, kv_heads=self.kv_heads, **typical)


SHARDED = ("q", "k", "v", "log_decay", "beta", "x")
"""Inputs that have tokens, but for a decay per head."""


class Call(NamedTuple):
    """A public call."""

    shapes: Callable[[Trial, int], dict[str, tuple[int, ...]]]
    """name -> shape of each input, of the whole sequence."""
    ours: Callable[[ContextParallel, Trial, Batch, dict[str, Tensor]], Tensor]
    alone: Callable[[Trial, Batch, dict[str, Tensor]], Tensor]
    """The same of the whole sequence, in plain torch."""


# Attention


def _qkv(t: Trial, tokens: int) -> dict[str, tuple[int, ...]]:
    heads = {"q": (t.heads, t.head_dim), "k": (t.kv_heads, t.head_dim), "v": (t.kv_heads, t.v_head_dim)}
    return {name: (tokens, t.rows, *shape) for name, shape in heads.items()}


def _attention_inputs(t: Trial, tokens: int) -> dict[str, tuple[int, ...]]:
    return _qkv(t, tokens) | ({"sink": (t.heads,)} if t.args["sink"] else {})


def _attention(cp: ContextParallel, t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    tree = Tree(*b.tree) if b.tree[0] else None
    args = {name: b.args[name] for name in ("causal", "window", "scale", "softcap")}
    return cp.attention(**x, **args, cu_seqlens=b.cu_seqlens, tree=tree)


def _case(t: Trial, b: Batch) -> Case:
    masks = {"causal": b.args["causal"], "window": b.args["window"], "documents": b.bounds, "tree": b.tree}
    return Case(seq_length=b.tokens, heads=t.heads, kv_heads=t.kv_heads, **masks)


# Linear attention


def _linear_inputs(t: Trial, tokens: int) -> dict[str, tuple[int, ...]]:
    shapes = _qkv(t, tokens)
    decays = {"head": (t.kv_heads,), "token": shapes["k"][:3], "key": shapes["k"]}
    shapes |= {"log_decay": decays[t.args["decay"]]} if t.args["decay"] != "none" else {}
    return shapes | ({"beta": shapes["k"][:3]} if t.args["delta"] else {})


def _linear(cp: ContextParallel, t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    return cp.linear_attention(**x, causal=b.args["causal"], scale=b.args["scale"] or 1.0, cu_seqlens=b.cu_seqlens)


def _linear_alone(t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    sizes = {"batch": t.rows, "heads": t.heads, "kv_heads": t.kv_heads, "head_dim": t.head_dim}
    packed = {"documents": bool(b.bounds), "bounds": tuple(dict.fromkeys(b.bounds)), "seq_length": b.tokens}
    kind = {name: b.args[name] for name in ("decay", "delta", "causal")}
    five = x["q"] * (b.args["scale"] or 1.0), x["k"], x["v"], x.get("log_decay"), x.get("beta")
    return LinearCase(**kind, **sizes, **packed).outputs(*five)


# Beside attention


def _x(t: Trial, tokens: int) -> dict[str, tuple[int, ...]]:
    return {"x": (tokens, t.rows, t.heads, t.head_dim)}


def _convolution_inputs(t: Trial, tokens: int) -> dict[str, tuple[int, ...]]:
    weight = {"x": (tokens, t.rows, t.head_dim), "weight": (t.head_dim, t.args["width"])}
    return weight | ({"bias": (t.head_dim,)} if t.args["bias"] else {})


def _convolution_alone(t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    number = torch.bucketize(torch.arange(b.tokens), torch.tensor(b.bounds or (0, b.tokens)), right=True)
    out = x["x"] * 0 + x.get("bias", 0)
    for back in range(min(x["weight"].size(1), b.tokens)):
        seen = (number == number.roll(back)) & (torch.arange(b.tokens) >= back)
        out = out + x["x"].roll(back, 0) * seen[:, None, None] * x["weight"][:, -1 - back]
    return out


def _shifted(cp: ContextParallel, t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    return shift(cp, x["x"].movedim(0, t.args["dim"]), t.args["dim"], t.args["by"]).movedim(t.args["dim"], 0)


def _shifted_alone(t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    goal = torch.arange(b.tokens) + t.args["by"]
    within = (goal >= 0) & (goal < b.tokens)
    return x["x"][goal.clamp(0, b.tokens - 1)] * within[:, None, None, None]


def _resharded(cp: ContextParallel, t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    dim = t.args["dim"]
    whole = cp.unshard(x["x"].movedim(0, dim), dim)
    return cp.shard(whole, dim).movedim(dim, 0) * (1 + cp.positions(b.tokens)[:, None, None, None])


CALLS = {
    "attention": Call(
        _attention_inputs,
        _attention,
        lambda t, b, x: _case(t, b).outputs(**x, scale=b.args["scale"], softcap=b.args["softcap"]),
    ),
    "linear_attention": Call(_linear_inputs, _linear, _linear_alone),
    "short_convolution": Call(
        _convolution_inputs, lambda cp, t, b, x: short_convolution(cp, **x, cu_seqlens=b.cu_seqlens), _convolution_alone
    ),
    "shift": Call(_x, _shifted, _shifted_alone),
    "unshard": Call(_x, _resharded, lambda t, b, x: x["x"] * (1 + torch.arange(b.tokens)[:, None, None, None])),
}


# Around them


class View(NamedTuple):
    """How an input lies in memory: a leaf, and the input as a view of it."""

    leaf: Callable[[Tensor], Tensor]
    view: Callable[[Tensor, tuple[int, ...]], Tensor]
    dim: int = 0
    """Of the leaf's tokens."""
    above: int = 0
    """It needs more dimensions than these."""


VIEWS = {
    "plain": View(lambda x: x, lambda x, shape: x),
    "every second": View(lambda x: x.repeat_interleave(2, -1), lambda x, shape: x[..., ::2]),
    "batch first": View(lambda x: x.transpose(0, 1).contiguous(), lambda x, shape: x.transpose(0, 1), dim=1, above=1),
    "one row": View(lambda x: x[:, :1], lambda x, shape: x.expand(-1, *shape[1:]), above=1),
    "one head": View(lambda x: x[:, :, :1], lambda x, shape: x.expand(-1, -1, *shape[2:]), above=2),
}
type Function = Callable[..., Tensor]


def inside(make: Callable[[], Any], f: Function) -> Function:
    def call(*x: Tensor) -> Tensor:
        with make():
            return f(*x)

    return call


WRAPPERS: dict[str, Callable[[Function], Function]] = {
    "checkpoint": lambda f: lambda *x: checkpoint(f, *x, use_reentrant=False),
    "reentrant checkpoint": lambda f: lambda *x: checkpoint(f, *x, use_reentrant=True),
    "recomputed": lambda f: lambda *x: checkpoint(Recomputed(f), *x, use_reentrant=False),
    "recomputed, reentrant": lambda f: lambda *x: checkpoint(Recomputed(f), *x, use_reentrant=True),
    "offloaded": lambda f: inside(torch.autograd.graph.save_on_cpu, f),
    "compiled": lambda f: torch.compile(f, backend="eager"),
    "compiled, aot_eager": lambda f: torch.compile(f, backend="aot_eager"),
    "bfloat16 autocast": lambda f: inside(lambda: torch.autocast("cpu", torch.bfloat16), f),
    "float16 autocast": lambda f: inside(lambda: torch.autocast("cpu", torch.float16), f),
}
OFTEN = sorted([*WRAPPERS, *[name for name in WRAPPERS if "compiled" not in name] * 20])
"""To compile takes as long as sixty others."""
PENALTIES: dict[str, Callable[[Tensor, list[Tensor]], object]] = {
    "penalty, grad": lambda penalty, leaves: torch.autograd.grad(penalty, leaves, materialize_grads=True),
    "penalty, backward": lambda penalty, leaves: penalty.backward(),
    "penalty, backward(inputs=)": lambda penalty, leaves: penalty.backward(inputs=leaves),
}
"""Ways to a second derivative, which is right or refused."""
MODES = {"train": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda y, w: y.sum(),  # its gradient is an expanded number
    "weighted": lambda y, w: (y * w).sum(),
    "batch first": lambda y, w: (y.transpose(0, 1).contiguous() * w.transpose(0, 1)).sum(),
    "twice": lambda y, w: (y * w).sum() + (y.sin() * w.cos()).sum(),
}
