"""Kinds of linear attention: feature map, decay and normalisation.

    basic       elu + 1, divided by the sum of weights                              arXiv 2006.16236
    lightning   silu, a fixed decay per head (TransNormer's slopes), RMS norm       arXiv 2307.14995, 2401.04658
    retention   a fixed decay per head, group norm                                  arXiv 2307.08621
    gla         a decay per token, head and dimension from a gate, RMS norm         arXiv 2312.06635
    based       Taylor map of the exponential, divided by the sum of weights        arXiv 2402.18668
    rebased     learned quadratic map, divided by the sum of weights                arXiv 2402.10644

``LinearAttention`` applies one to a model's q, k and v. Third parties register a ``Variant`` in their pyproject:

    [project.entry-points."cp_plugin.linear_kinds"]
    mykind = "my_package.my_module:KIND"
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import log1p
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from cp_plugin.engine.common.names import not_one_of
from cp_plugin.engine.common.plugins import with_entry_points
from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.core.problem import Decay, Problem
from cp_plugin.engine.linear import rules
from cp_plugin.engine.linear.features import ELU, IDENTITY, PROJECTED, QUADRATIC, SILU, TAYLOR, FeatureMap
from cp_plugin.engine.linear.tokens import tokens_of

ENTRY_POINTS = "cp_plugin.linear_kinds"
EPSILON = 1e-6
"""Added to the sum of weights before dividing, and to mean squares before the root."""
GATE_SOFTNESS = 16.0
"""GLA: log decay = logsigmoid(gate) / 16."""
GATE_RANK = 16
"""GLA: the gate comes from the hidden state by way of so many dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The heads on this rank."""

    heads: int
    """Query heads on this rank."""
    kv_heads: int
    head_dim: int
    v_head_dim: int
    first_kv_head: int = 0
    """Model-wide number of the first key/value head here (tensor parallelism)."""
    all_kv_heads: int = 0
    """Key/value heads of the model; 0: those here."""
    layer: int = 0
    layers: int = 1


def transnormer_slope(heads: Heads, head: int) -> float:
    """TransNormer's log decay of a key/value head: weaker in later heads and layers."""
    slope = 2.0 ** (-8 * (head + 1) / (heads.all_kv_heads or heads.kv_heads))
    return -slope * (1 - heads.layer / max(1, heads.layers - 1) + 1e-5)


class Learned(NamedTuple):
    """Numbers of weights, all but the second of which belong to heads."""

    matrices: int
    replicated: int
    """Of the gate's first projection."""
    vectors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kind of linear attention."""

    name: str
    summary: str
    features: FeatureMap = IDENTITY
    decay: Decay = "none"
    head_decay: Callable[[Heads, int], float] = transnormer_slope
    """Fixed log decay of a key/value head by its number in the model, for decay per head."""
    gate_decay: Callable[[Tensor], Tensor] = lambda gate: logsigmoid(gate) / GATE_SOFTNESS
    """Log decay from a gate ``[s, b, g, d]``, for decay per token (``[s, b, g]``) or key dimension."""
    normalised: bool = False
    """Whether outputs are divided by the sum of weights, as in softmax attention."""
    norm: Literal["none", "rms", "group"] = "none"
    """Per-head norm of the outputs, with a learned gain."""

    @property
    def gated(self) -> bool:
        """True if it needs a gate from the hidden state."""
        return self.decay in ("token", "key")

    def problem(self, model: Problem) -> Problem:
        """A call of its layers in a model whose softmax layers have calls of ``model``."""
        size, values = self.features.size(model.head_dim), model.v_head_dim + self.normalised
        return replace(model, head_dim=size, v_head_dim=values, decay=self.decay)

    def learned(self, heads: int, kv_heads: int, head_dim: int, v_head_dim: int, hidden: int) -> Learned:
        """The numbers of a layer's own weights, from the sizes of the model."""
        many = heads + kv_heads
        projected = many * head_dim * PROJECTED if self.features.projected else 0
        vectors = 2 * PROJECTED * many if self.features.learned_norm else 0
        vectors += heads * v_head_dim if self.norm != "none" else 0
        gate = self.gated * kv_heads * head_dim
        return Learned(projected + gate * GATE_RANK, self.gated * hidden * GATE_RANK, vectors + gate)


_OURS = (
    Variant(name="basic", summary="elu + 1, normalised (arXiv 2006.16236)", features=ELU, normalised=True),
    Variant(
        name="lightning", summary="silu, a decay per head (arXiv 2401.04658)", features=SILU, decay="head", norm="rms"
    ),
    Variant(
        name="retention",
        summary="a decay per head (arXiv 2307.08621)",
        decay="head",
        head_decay=lambda heads, head: log1p(-(2.0 ** (-5 - head))),
        norm="group",
    ),
    Variant(name="gla", summary="gated linear attention (arXiv 2312.06635)", decay="key", norm="rms"),
    Variant(name="based", summary="Taylor map, normalised (arXiv 2402.18668)", features=TAYLOR, normalised=True),
    Variant(
        name="rebased",
        summary="learned quadratic map, normalised (arXiv 2402.10644)",
        features=QUADRATIC,
        normalised=True,
    ),
)


def get(name: str) -> Variant:
    """The variant of that name; ValueError lists the valid names."""
    if name not in variants():
        raise ValueError(not_one_of(f"linear attention {name!r}", name, variants()))
    return variants()[name]


class Prepared(NamedTuple):
    """Arguments of ``ContextParallel.linear_attention``."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    scale: float


class LinearAttention(nn.Module):
    """A variant as a module: ``prepare`` before, ``finish`` after the linear attention.

    out = layer(q, k, v, gate, cp.linear_attention)
    """

    def __init__(self, variant: Variant, heads: Heads) -> None:
        super().__init__()
        self.variant, self.heads = variant, heads
        first, g = heads.first_kv_head, heads.kv_heads
        repeat = heads.heads // g
        queries, keys = range(first * repeat, (first + g) * repeat), range(first, first + g)
        self.q_features = variant.features.module(queries, heads.head_dim, seed=2 * heads.layer)
        self.k_features = variant.features.module(keys, heads.head_dim, seed=2 * heads.layer + 1)
        if variant.norm != "none":
            self.gain = nn.Parameter(torch.ones(heads.heads * heads.v_head_dim))
        self._log_decay = tuple(variant.head_decay(heads, i) for i in keys)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, attend: Callable[..., Tensor]) -> Tensor:
        """Outputs ``[s, b, h, e]``.

        Args:
            q, k, v, gate: as in ``prepare``.
            attend: ``ContextParallel.linear_attention``, or alike.
        """
        x = self.prepare(q, k, v, gate)
        return self.finish(attend(x.q, x.k, x.v, x.log_decay, scale=x.scale))

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None) -> Prepared:
        """Apply the feature maps and compute the decay.

        Args:
            q ``[s, b, h, d]``, k ``[s, b, g, d]``, v ``[s, b, g, e]``.
            gate: ``[s, b, g, d]``, for a ``gated`` variant.
        """
        log_decay = None
        if self.variant.gated:
            assert gate is not None, f"{self.variant.name} needs a gate"
            log_decay = self.variant.gate_decay(gate.to(accumulation_dtype(gate.dtype)))
        elif self.variant.decay == "head":
            log_decay = _move_decays(self._log_decay, q.device)
        if self.variant.normalised:
            v = torch.cat((v, torch.ones_like(v[..., :1])), -1)  # its output is the sum of weights
        scale = q.size(3) ** -0.5 if self.variant.features.scaled else 1.0
        return Prepared(self.q_features(q), self.k_features(k), v, log_decay, scale)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate: Tensor | None = None,
        state: Tensor | None = None,
        attend: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Continue a sequence by one or more tokens, for generation.

        Args:
            q, k, v, gate: as in ``prepare``.
            state: ``[b, g, d', e']`` as returned for the preceding tokens; None at the start.
            attend: ``ContextParallel.extend_linear``, or alike, for shards of tokens; None: these are all.

        Returns:
            Outputs ``[s, b, h, e]`` in q's dtype, and the new state in the accumulation dtype.
        """
        x = self.prepare(q, k, v, gate)
        if attend is not None:
            out, after = attend(x.q, x.k, x.v, x.log_decay, scale=x.scale, state=state)
            return self.finish(out), after
        out, after = rules.run(tokens_of(x.q * x.scale, x.k, x.v, x.log_decay), state)
        return self.finish(out.to(q.dtype)), after

    def finish(self, out: Tensor) -> Tensor:
        """Divide by the sum of weights, or normalise: ``[s, b, h, e]`` in out's dtype."""
        dtype, out = out.dtype, out.to(accumulation_dtype(out.dtype))
        if self.variant.normalised:
            out = out[..., :-1] / (out[..., -1:] + EPSILON)
        if self.variant.norm == "group":
            out = out - out.mean(-1, keepdim=True)
        if self.variant.norm != "none":
            gain = self.gain.to(out.dtype).view(out.shape[2:])
            out = out * (out.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * gain
        return out.to(dtype)


@lru_cache(maxsize=1024)
def _move_decays(log_decay: tuple[float, ...], device: torch.device) -> Tensor:
    """A layer's decays on the device, float64; cached, since a copy would synchronize."""
    with torch.inference_mode(False):  # the next call may need gradients
        return torch.tensor(log_decay, device=device, dtype=torch.float64)


@cache
def variants() -> dict[str, Variant]:
    """Name -> kind of linear attention, built-in ones first; ValueError if two share a name, or an entry point does not
    load a ``Variant``."""
    return with_entry_points(
        ENTRY_POINTS,
        _OURS,
        fits=lambda loaded: isinstance(loaded, Variant),
        one="a kind of linear attention",
        many="kinds of linear attention",
    )
