"""What the planner knows of a model: the sizes of a transformer, in the terms of its public configuration.

model("llama3-8b")            one of the catalogue, ``models.toml``; ``models()`` has all of them
Model(name="mine", ...)       one's own; ``cp_plugin.megatron.planned.command`` reads one out of Megatron's flags
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

from cp_plugin.core.mask import Window
from cp_plugin.core.names import did_you_mean, find
from cp_plugin.linear.variants import variants

Norm = Literal["rms", "layer"]
SOFTMAX, WINDOW, LINEAR = "N", "W", "L"
DENSE, EXPERTS = "D", "E"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder of layers that each have attention and a feed-forward part (FFN), in numbers of elements."""

    name: str
    layers: int
    hidden: int
    heads: int
    """Query heads."""
    kv_heads: int = 0
    """0: as many as query heads."""
    head_dim: int = 0
    """Size of a query or key head; 0: ``hidden / heads``. Of latent attention (MLA): with the rotated part."""
    v_head_dim: int = 0
    """0: as ``head_dim``."""
    ffn_hidden: int
    """Of a dense layer."""
    gated: bool = True
    """The FFN has three matrices (SwiGLU), not two."""
    vocab: int
    """Before padding."""
    tied: bool = False
    """The output layer is the embedding."""
    positions: int = 0
    """Learned position embeddings; 0: rotated queries and keys (RoPE)."""
    norm: Norm = "rms"
    """Parameters of a norm: a gain, or a gain and a bias, for each element."""
    bias: bool = False
    """All linear layers of attention and FFN have one."""
    qkv_bias: bool = False
    """Queries, keys and values have one."""
    qk_norm: bool = False
    """Queries and keys are normalised, head by head."""

    attention_pattern: str = SOFTMAX
    """Repeated over the layers: N softmax attention, W the same within ``window``, L linear attention."""
    window: Window | None = None
    """Tokens before and after itself that a token sees in W layers."""
    linear: str = ""
    """The kind of linear attention of L layers, by its name in ``cp_plugin.linear.variants``."""

    ffn_pattern: str = DENSE
    """Repeated over the layers: D dense, E experts."""
    experts: int = 1
    top_k: int = 1
    """Experts that a token goes to."""
    expert_hidden: int = 0
    """FFN size of one expert; 0: as ``ffn_hidden``."""
    shared_hidden: int = 0
    """FFN size of the expert that every token goes to; 0: there is none."""

    q_rank: int = 0
    """MLA: elements of a compressed query; 0: queries are not compressed."""
    kv_rank: int = 0
    """MLA: elements of the compressed key and value; 0: the attention is not latent."""
    rope_dim: int = 0
    """MLA: elements of a head that are rotated."""
    predicted: int = 0
    """Layers of multi-token prediction, beside ``layers``: each like the last of these."""
    source: str = ""

    def __post_init__(self) -> None:
        _check_types(self)
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
        """Whether keys and values are made of a compressed one (MLA)."""
        return self.kv_rank > 0

    @property
    def all_layers(self) -> range:
        """The numbers of all layers, from 0 on, those of multi-token prediction last."""
        return range(self.layers + self.predicted)

    def attention_of(self, layer: int) -> str:
        """The letter of a layer's attention."""
        return self.attention_pattern[min(layer, self.layers - 1) % len(self.attention_pattern)]

    def ffn_of(self, layer: int) -> str:
        """The letter of a layer's FFN."""
        return self.ffn_pattern[min(layer, self.layers - 1) % len(self.ffn_pattern)]

    def alike(self, layers: Iterable[int]) -> dict[int, int]:
        """The first of these layers of each kind, and how many there are of its kind."""
        first: dict[tuple[str, str], int] = {}
        count: dict[int, int] = {}
        for layer in layers:
            one = first.setdefault((self.attention_of(layer), self.ffn_of(layer)), layer)
            count[one] = count.get(one, 0) + 1
        return count


@cache
def models() -> dict[str, Model]:
    """The catalogue, by name."""
    tables = tomllib.loads(files("cp_plugin.planner.training").joinpath("models.toml").read_text(encoding="utf-8"))
    return {name: from_table(name, sizes) for name, sizes in tables.items()}


def from_table(name: str, sizes: Mapping[str, Any]) -> Model:
    """The model of that name with the fields of a table.

    Raises:
        ValueError: for fields that are unknown or missing, and sizes that are none.
    """
    known = {field.name: field for field in fields(Model) if field.name != "name"}
    if unknown := [field for field in sizes if field not in known]:
        raise ValueError(f"model {name}: {unknown[0]} is unknown{did_you_mean(unknown[0], known)}")
    if missing := [field for field in known.values() if field.default is MISSING and field.name not in sizes]:
        raise ValueError(f"model {name}: {missing[0].name} is missing")
    return Model(name=name, **sizes)


def model(name: str) -> Model:
    """The model of that name in the catalogue, whatever its case.

    Raises:
        ValueError: if there is none; the message has the nearest names and all of them.
    """
    return find("model", name, models())


MOST_LAYERS = 100_000
"""Of a model: more than that is a slip, and takes the planner minutes, which looks at every layer."""
_WINDOW = 2
"""Numbers that make a window: tokens before and after."""


def _check_types(m: Model) -> None:
    """ValueError for a size that is no whole number, and a text or a switch that is none."""
    for field in fields(Model):
        value, known = getattr(m, field.name), str(field.type)
        if known == "int" and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"model {m.name}: {field.name} {value!r}: write a whole number")
        if known == "bool" and not isinstance(value, bool):
            raise ValueError(f"model {m.name}: {field.name} {value!r}: write true or false")
        if known == "str" and not isinstance(value, str):
            raise ValueError(f"model {m.name}: {field.name} {value!r}: write a text")
    if m.norm not in (norms := get_args(Norm)):
        raise ValueError(f"model {m.name}: norm {m.norm!r}: write one of {', '.join(norms)}")
    if m.window is not None and not (
        isinstance(m.window, tuple | list)
        and len(m.window) == _WINDOW
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= -1 for n in m.window)
    ):
        raise ValueError(f"model {m.name}: window {m.window!r}: write tokens before and after, such as (4095, 0)")


def _check(m: Model) -> None:
    sizes = {name: getattr(m, name) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "v_head_dim")}
    sizes |= {name: getattr(m, name) for name in ("ffn_hidden", "vocab", "experts", "top_k", "expert_hidden")}
    wrong = {name: value for name, value in sizes.items() if value < 1}
    rest = ("positions", "shared_hidden", "q_rank", "kv_rank", "rope_dim", "predicted")
    wrong |= {name: getattr(m, name) for name in rest if getattr(m, name) < 0}
    if wrong:
        found = ", ".join(f"{name} {value}" for name, value in wrong.items())
        raise ValueError(f"model {m.name}: {found}: sizes must be 1 or more, and those that may be missing 0 or more")
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
        raise ValueError(f"model {m.name}: top_k {m.top_k} of {m.experts} experts: at most as many as there are")
    for field, known in (("attention_pattern", SOFTMAX + WINDOW + LINEAR), ("ffn_pattern", DENSE + EXPERTS)):
        pattern = getattr(m, field)
        if not pattern or set(pattern) - set(known):
            raise ValueError(f"model {m.name}: {field} {pattern!r}: write letters of {known}, such as {known[0] * 4}")
    if LINEAR in m.attention_pattern and m.linear not in variants():
        raise ValueError(
            f"model {m.name}: linear {m.linear!r}: layers with linear attention (L) need one of {', '.join(variants())}"
        )
    if WINDOW in m.attention_pattern and m.window is None:
        raise ValueError(f"model {m.name}: layers with a sliding window (W) need window, such as (4095, 0)")
