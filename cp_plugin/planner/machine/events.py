"""Events of a ``Program``: kernel launches, passes over memory, and messages."""

from __future__ import annotations

from typing import Literal, NamedTuple

Direction = Literal["forward", "backward"]


class Shape(NamedTuple):
    """An attention tile: queries, keys, and the diagonal between them (``engine.core.tiles``)."""

    rows: int
    keys: int
    diagonal: int


class Auto(NamedTuple):
    """What ``auto`` chooses by, between calls of a library and a launch of our kernel."""

    shapes: tuple[Shape, ...]
    """Tiles of the tokens in order, which a library's calls are cut from."""
    keys: int
    kv_heads: int
    """Key/value heads times batch."""
    unsorted_rows: int = 0
    unsorted_keys: int = 0
    """Tokens that a library needs sorted first."""


class Attention(NamedTuple):
    direction: Direction
    shapes: tuple[Shape, ...]
    rows: int
    """Query tokens read and written."""
    heads: int
    """Query heads times batch."""
    head_dim: int
    v_head_dim: int
    dtype: str
    auto: Auto | None = None
    """None: a library takes all tiles in one call."""


class Products(NamedTuple):
    flops: int
    launches: int
    dtype: str


class Memory(NamedTuple):
    """Memory-bound passes: merging, casting, reordering, packing."""

    nbytes: int
    """Bytes read and written."""
    launches: int


class Post(NamedTuple):
    """A verb is posted: it sends what has been computed, and overlaps with what follows up to its ``Wait``."""

    number: int
    verb: str
    axis: str
    stream: str
    """Messages of one stream are serialised."""
    nbytes: int
    """Bytes sent by this rank; bytes received where it sends nothing."""
    messages: int
    """Number of tensors, each a message."""
    to: int | None
    """Rank in the whole mesh; None in collectives, and where nothing is sent."""
    source: int | None
    parts: tuple[tuple[int, int], ...] = ()
    """``all_to_all_v``: bytes to and from each rank of the axis."""

    @property
    def sent(self) -> int:
        """Bytes that this rank sends."""
        return 0 if self.verb == "exchange" and self.to is None else self.nbytes

    @property
    def each(self) -> tuple[int, ...]:
        """``all_to_all_v``: the larger of the bytes to and from each rank."""
        return tuple(map(max, self.parts))


class Wait(NamedTuple):
    """What follows needs the result of the post of that number."""

    number: int


Event = Attention | Products | Memory | Post | Wait


class Seconds(NamedTuple):
    """Seconds of one attention call of one micro-batch."""

    forward: float
    backward: float
    forward_on_card: float = 0.0
    """Part of it in which the rank's share of the network cards is busy."""
    backward_on_card: float = 0.0
