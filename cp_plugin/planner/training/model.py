"""Model configurations: the sizes of a transformer, in the terms of its public configuration.

model("llama3-8b")            from the catalogue, ``models.toml``; ``models()`` lists all
Model(name="mine", ...)       custom; ``cp_plugin.megatron.planned.command`` derives one from Megatron's flags
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from cp_plugin.engine.common.names import find
from cp_plugin.engine.core.mask import Window
from cp_plugin.engine.linear.variants import variants

Norm = Literal["rms", "layer"]
SOFTMAX, WINDOW, LINEAR = "N", "W", "L"
DENSE, EXPERTS = "D", "E"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder; sizes are numbers of elements."""

    name: str
    layers: int
    hidden: int
    heads: int
    """Query heads."""
    kv_heads: int = 0
    """0: as many as query heads."""
    head_dim: int = 0
    """Of queries and keys, for MLA with the rotated part; 0: ``hidden / heads``."""
    v_head_dim: int = 0
    """0: as ``head_dim``."""
    ffn_hidden: int
    """Of a dense layer."""
    gated: bool = True
    """Three FFN matrices (SwiGLU) instead of two."""
    vocab: int
    """Unpadded."""
    tied: bool = False
    """The output layer is the embedding."""
    positions: int = 0
    """Learned position embeddings; 0: RoPE."""
    norm: Norm = "rms"
    bias: bool = False
    """On all linear layers of attention and FFN."""
    qkv_bias: bool = False
    qk_norm: bool = False

    attention_pattern: str = SOFTMAX
    """Cycled over the layers: N softmax, W softmax within ``window``, L linear attention."""
    window: Window | None = None
    """Tokens visible before and after a token in W layers."""
    linear: str = ""
    """Kind of linear attention in L layers (``engine.linear.variants``)."""

    ffn_pattern: str = DENSE
    """Cycled over the layers: D dense, E experts."""
    experts: int = 1
    top_k: int = 1
    expert_hidden: int = 0
    """Of one expert; 0: as ``ffn_hidden``."""
    shared_hidden: int = 0
    """Of the shared expert; 0: none."""

    q_rank: int = 0
    """MLA: elements of the latent query; 0: not compressed."""
    kv_rank: int = 0
    """MLA: elements of the latent key and value; 0: no MLA."""
    rope_dim: int = 0
    """MLA: rotated elements of a head."""
    predicted: int = 0
    """Multi-token prediction layers beyond ``layers``, each like the last of these."""
    source: str = ""

    def __post_init__(self) -> None:
        for field, value in (
            ("kv_heads", self.heads),
            ("head_dim", self.hidden // max(1, self.heads)),
            ("v_head_dim", self.head_dim or self.hidden // max(1, self.heads)),
            ("expert_hidden", self.ffn_hidden),
        ):
            if getattr(self, field) == 0:
                object.__setattr__(self, field, value)
        _check(self)

    @property
    def latent(self) -> bool:
        """True if attention is multi-latent (MLA)."""
        return self.kv_rank > 0

    @property
    def all_layers(self) -> range:
        """Numbers of all layers, multi-token prediction last."""
        return range(self.layers + self.predicted)

    def attention_of(self, layer: int) -> str:
        return self.attention_pattern[min(layer, self.layers - 1) % len(self.attention_pattern)]

    def ffn_of(self, layer: int) -> str:
        return self.ffn_pattern[min(layer, self.layers - 1) % len(self.ffn_pattern)]

    def alike(self, layers: Iterable[int]) -> dict[int, int]:
        """The first of these layers of each kind -> number of its kind."""
        first: dict[tuple[str, str], int] = {}
        count: dict[int, int] = {}
        for layer in layers:
            one = first.setdefault((self.attention_of(layer), self.ffn_of(layer)), layer)
            count[one] = count.get(one, 0) + 1
        return count


@cache
def models() -> dict[str, Model]:
    tables = tomllib.loads(files("cp_plugin.planner.training").joinpath("models.toml").read_text(encoding="utf-8"))
    return {name: Model(name=name, **sizes) for name, sizes in tables.items()}


def model(name: str) -> Model:
    """Look up a catalogue model; ValueError with the nearest names for an unknown one."""
    return find("model", name, models())


def check_sizes(prefix: str, owner: object, positive: Iterable[str], optional: Iterable[str]) -> None:
    """ValueError naming the fields that are below 1, and the optional ones below 0."""
    small = [
        (name, getattr(owner, name))
        for least, names in ((1, positive), (0, optional))
        for name in names
        if getattr(owner, name) < least
    ]
    if small:
        listed = ", ".join(f"{name} {value}" for name, value in small)
        raise ValueError(f"{prefix}{listed}: sizes must be 1 or more, optional ones 0 or more")


MOST_LAYERS = 100_000
"""Sanity limit: the planner visits every layer."""


def _check(m: Model) -> None:
    positive = ("layers", "hidden", "heads", "kv_heads", "head_dim", "v_head_dim", "ffn_hidden", "vocab", "experts")
    optional = ("positions", "shared_hidden", "q_rank", "kv_rank", "rope_dim", "predicted")
    check_sizes(f"model {m.name}: ", m, (*positive, "top_k", "expert_hidden"), optional)
    if m.layers + m.predicted > MOST_LAYERS:
        raise ValueError(
            f"model {m.name}: layers {m.layers}, predicted {m.predicted}: at most {MOST_LAYERS:,} together"
        )
    if m.heads % m.kv_heads:
        raise ValueError(
            f"model {m.name}: {m.heads} query heads cannot share {m.kv_heads} key/value heads: the first must be a "
            "multiple of the second"
        )
    if m.top_k > m.experts:
        raise ValueError(f"model {m.name}: top_k {m.top_k} of {m.experts} experts: choose at most as many as there are")
    for field, known in (("attention_pattern", SOFTMAX + WINDOW + LINEAR), ("ffn_pattern", DENSE + EXPERTS)):
        pattern = getattr(m, field)
        if not pattern or set(pattern) - set(known):
            raise ValueError(
                f"model {m.name}: {field} {pattern!r}: use only the letters {known}, such as {known[0] * 4}"
            )
    if LINEAR in m.attention_pattern and m.linear not in variants():
        raise ValueError(
            f"model {m.name}: linear {m.linear!r}: layers with linear attention (L) need one of {', '.join(variants())}"
        )
    if WINDOW in m.attention_pattern and m.window is None:
        raise ValueError(f"model {m.name}: layers with a sliding window (W) need window, such as (4095, 0)")
