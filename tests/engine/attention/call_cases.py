"""Public calls of plain torch, on shards and, by a formula, on the whole sequence; and what is wrapped around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import pairwise
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
from cp_plugin.engine.inference import Session, slots_for
from cp_plugin.engine.linear import recurrence
from cp_plugin.engine.placement.documents import get_layout


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
    asked: dict[str, Any] = field(default_factory=dict)
    """Of this call, in place of the trial's."""

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
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    rows: int
    """The batch dimension."""
    batches: tuple[Batch, ...]
    options: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    """Of the call: arguments beside tensors, and which tensors there are."""
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
    differs: tuple[int, int, dict[str, Any]] | None = None
    """A rank, a batch, and what this rank replaces in it."""

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
    whole: bool = False
    """It takes and returns whole sequences, and is not differentiable."""


# Attention


def _qkv(t: Trial, tokens: int) -> dict[str, tuple[int, ...]]:
    heads = {"q": (t.heads, t.head_dim), "k": (t.kv_heads, t.head_dim), "v": (t.kv_heads, t.v_head_dim)}
    return {name: (tokens, t.rows, *shape) for name, shape in heads.items()}


def _attention_inputs(t: Trial, tokens: int) -> dict[str, tuple[int, ...]]:
    return _qkv(t, tokens) | ({"sink": (t.heads,)} if t.asked["sink"] else {})


def _attention(cp: ContextParallel, t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    tree = Tree(*b.tree) if b.tree[0] else None
    asked = {name: (t.asked | b.asked)[name] for name in ("causal", "window", "scale", "softcap")}
    return cp.attention(**x, **asked, cu_seqlens=b.cu_seqlens, tree=tree)


def _case(t: Trial, b: Batch) -> Case:
    asked = t.asked | b.asked
    masks = {"window": asked["window"], "documents": b.bounds, "tree": b.tree}
    return Case(seq_length=b.tokens, heads=t.heads, kv_heads=t.kv_heads, causal=asked["causal"], **masks)


def _session(cp: ContextParallel, t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    """Prompts in two chunks, the last tokens of each but the first padding; then the rest token by token."""
    q, k, v = (x[name] for name in "qkv")
    asked = {name: t.asked[name] for name in ("window", "scale", "softcap")} | {"sink": x.get("sink")}
    mesh = cp.mesh.duplicate({"cp": cp.size}) if cp.size > 1 else None
    session = Session(cp, batch=t.rows, capacity=slots_for(b.tokens, cp.size, 2), mesh=mesh)
    found, prompt = [], _prompt(t, b)
    for first, stop in pairwise(sorted({0, 2 * t.size, prompt})):
        part = [cp.shard(y[first:stop]) for y in (q, k, v)]
        with session.prefill(stop - first):
            found.append(cp.unshard(session.attend(0, *part, **asked)))
    session.close([prompt - row for row in range(t.rows)])
    for token in range(prompt, b.tokens):
        with session.decode(1):
            found.append(session.attend(0, *(y[token : token + 1] for y in (q, k, v)), **asked))
    return torch.cat(found)


def _prompt(t: Trial, b: Batch) -> int:
    """Tokens of the padded prompt."""
    return max(2 * t.size, b.tokens - 2 * t.size)


def _session_alone(t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    prompt = _prompt(t, b)
    decoded, scores = [], {name: t.asked[name] for name in ("scale", "softcap")}
    for row in range(t.rows):
        at = [*range(prompt - row), *range(prompt, b.tokens)]
        text = {name: y if y.dim() == 1 else y[at, row : row + 1] for name, y in x.items()}
        whole = _case(t, replace(b, tokens=len(at))).outputs(**text, **scores)
        decoded.append(whole[prompt - row :])
    return torch.cat((_case(t, b).outputs(**x, **scores)[:prompt], torch.cat(decoded, 1)))


# Linear attention


def _linear_inputs(t: Trial, tokens: int) -> dict[str, tuple[int, ...]]:
    found = _qkv(t, tokens)
    decays = {"head": (t.kv_heads,), "token": found["k"][:3], "key": found["k"]}
    found |= {"log_decay": decays[t.asked["decay"]]} if t.asked["decay"] != "none" else {}
    return found | ({"beta": found["k"][:3]} if t.asked["delta"] else {})


def _linear(cp: ContextParallel, t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    asked = t.asked | b.asked
    return cp.linear_attention(**x, causal=asked["causal"], scale=asked["scale"] or 1.0, cu_seqlens=b.cu_seqlens)


def _linear_case(t: Trial, b: Batch) -> LinearCase:
    sizes = {"batch": t.rows, "heads": t.heads, "kv_heads": t.kv_heads, "head_dim": t.head_dim}
    packed = {"documents": bool(b.bounds), "bounds": tuple(dict.fromkeys(b.bounds)), "seq_length": b.tokens}
    causal = (t.asked | b.asked)["causal"]
    return LinearCase(decay=t.asked["decay"], delta=t.asked["delta"], causal=causal, **sizes, **packed)


def _five(x: dict[str, Tensor], scale: float | None = None) -> tuple[Tensor | None, ...]:
    return x["q"] * (scale or 1.0), x["k"], x["v"], x.get("log_decay"), x.get("beta")


def _extended(cp: ContextParallel, t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    """Two chunks; the last tokens of each row are padding."""
    unit, state, found = get_layout(cp.layout.name).divisor(t.size), None, []
    for rows in filter(len, (range(unit), range(unit, b.tokens))):
        part = {name: y if y.dim() == 1 else cp.shard(y[rows.start : rows.stop]) for name, y in x.items()}
        kept = cp.shard(_kept(t, b)[rows.start : rows.stop])
        out, state = cp.extend_linear(**part, scale=t.asked["scale"] or 1.0, state=state, kept=kept)
        found.append(cp.unshard(out).flatten())
    return torch.cat([*found, state.flatten()])


def _kept(t: Trial, b: Batch) -> Tensor:
    return torch.arange(b.tokens)[:, None] < b.tokens - torch.arange(t.rows)


def _extended_alone(t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    given, kept = _linear_case(t, b).make_tokens(*_five(x, t.asked["scale"])), _kept(t, b)[..., None, None]
    decay = None if given.log_decay is None else given.log_decay * kept
    out, state = recurrence.run(given._replace(k=given.k * kept, log_decay=decay))
    return torch.cat((out.flatten(), state.flatten()))


# Beside attention


def _x(t: Trial, tokens: int) -> dict[str, tuple[int, ...]]:
    return {"x": (tokens, t.rows, t.heads, t.head_dim)}


def _convolution_inputs(t: Trial, tokens: int) -> dict[str, tuple[int, ...]]:
    weight = {"x": (tokens, t.rows, t.head_dim), "weight": (t.head_dim, t.asked["width"])}
    return weight | ({"bias": (t.head_dim,)} if t.asked["bias"] else {})


def _convolution_alone(t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    number = torch.bucketize(torch.arange(b.tokens), torch.tensor(b.bounds or (0, b.tokens)), right=True)
    out = x["x"] * 0 + x.get("bias", 0)
    for back in range(min(x["weight"].size(1), b.tokens)):
        seen = (number == number.roll(back)) & (torch.arange(b.tokens) >= back)
        out = out + x["x"].roll(back, 0) * seen[:, None, None] * x["weight"][:, -1 - back]
    return out


def _shifted(cp: ContextParallel, t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    dim, by = (b.asked.get(name, t.asked[name]) for name in ("dim", "by"))
    return shift(cp, x["x"].movedim(0, dim), dim, by).movedim(dim, 0)


def _shifted_alone(t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    goal = torch.arange(b.tokens) + t.asked["by"]
    here = (goal >= 0) & (goal < b.tokens)
    return x["x"][goal.clamp(0, b.tokens - 1)] * here[:, None, None, None]


def _resharded(cp: ContextParallel, t: Trial, b: Batch, x: dict[str, Tensor]) -> Tensor:
    dim = t.asked["dim"]
    whole = cp.unshard(x["x"].movedim(0, dim), dim)
    return cp.shard(whole, dim).movedim(dim, 0) * (1 + cp.positions(b.tokens)[:, None, None, None])


CALLS = {
    "attention": Call(
        _attention_inputs,
        _attention,
        lambda t, b, x: _case(t, b).outputs(**x, **{name: (t.asked | b.asked)[name] for name in ("scale", "softcap")}),
    ),
    "linear_attention": Call(
        _linear_inputs,
        _linear,
        lambda t, b, x: _linear_case(t, b).outputs(*_five(x, (t.asked | b.asked)["scale"])),
    ),
    "short_convolution": Call(
        _convolution_inputs,
        lambda cp, t, b, x: short_convolution(cp, **x, cu_seqlens=b.cu_seqlens),
        _convolution_alone,
    ),
    "shift": Call(_x, _shifted, _shifted_alone),
    "unshard": Call(_x, _resharded, lambda t, b, x: x["x"] * (1 + torch.arange(b.tokens)[:, None, None, None])),
    "session": Call(_attention_inputs, _session, _session_alone, whole=True),
    "extend_linear": Call(_linear_inputs, _extended, _extended_alone, whole=True),
}


# Around them


class View(NamedTuple):
    """How an input lies in memory: a leaf, and the input as a view of it."""

    leaf: Callable[[Tensor], Tensor]
    view: Callable[[Tensor, tuple[int, ...]], Tensor]
    dim: int = 0
    """Of the leaf's tokens."""


VIEWS = {
    "plain": View(lambda x: x, lambda x, shape: x),
    "every second": View(lambda x: x.repeat_interleave(2, -1), lambda x, shape: x[..., ::2]),
    "batch first": View(lambda x: x.transpose(0, 1).contiguous(), lambda x, shape: x.transpose(0, 1), dim=1),
    "one row": View(lambda x: x[:, :1], lambda x, shape: x.expand(-1, *shape[1:])),
    "one head": View(lambda x: x[:, :, :1], lambda x, shape: x.expand(-1, -1, *shape[2:])),
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
}
if find_spec("cp_plugin.engine.attention.autocast"):
    WRAPPERS["bfloat16 autocast"] = lambda f: inside(lambda: torch.autocast("cpu", torch.bfloat16), f)
    WRAPPERS["float16 autocast"] = lambda f: inside(lambda: torch.autocast("cpu", torch.float16), f)
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
