"""What a ``Program`` consists of: launches of kernels, passes over memory, and messages."""

from __future__ import annotations

from typing import Literal, NamedTuple

Direction = Literal["forward", "backward"]


class Shape(NamedTuple):
    """One tile of attention: queries, keys, and the diagonal between them (``cp_plugin.core.tiles``)."""

    rows: int
    keys: int
    diagonal: int


class Attention(NamedTuple):
    """A launch of an attention kernel."""

    direction: Direction
    shapes: tuple[Shape, ...]
    rows: int
    """Query tokens that it reads and writes."""
    heads: int
    """Query heads, times the batch."""
    head_dim: int
    v_head_dim: int
    dtype: str


class Products(NamedTuple):
    """Matrix products."""

    flops: int
    launches: int
    dtype: str
    nbytes: int = 0
    """Read and written, where that may take longer than the FLOPs; 0: it does not."""


class Memory(NamedTuple):
    """Passes over memory that compute next to nothing: merging, casting, reordering, packing."""

    nbytes: int
    """Read and written."""
    launches: int


class Post(NamedTuple):
    """A verb is posted. What was computed before is sent; what is computed until the ``Wait`` runs beside it."""

    number: int
    verb: str
    axis: str
    stream: str
    """Messages of one stream follow each other."""
    nbytes: int
    """This rank sends; or receives, where it sends nothing."""
    messages: int
    """Tensors, each a message of its own."""
    to: int | None
    """The number of the rank in the whole mesh; None in collectives, and where nothing is sent."""
    source: int | None
    parts: tuple[tuple[int, int], ...] = ()
    """Of an ``all_to_all_v``: bytes to each rank of the axis, and from it."""

    @property
    def each(self) -> tuple[int, ...]:
        """Of an ``all_to_all_v``: bytes to each rank of the axis, or from it where more come."""
        return tuple(map(max, self.parts))


class Wait(NamedTuple):
    """All that follows needs what the verb of that number brings."""

    number: int


Event = Attention | Products | Memory | Post | Wait


class Seconds(NamedTuple):
    """Of one attention call, of one micro-batch."""

    forward: float
    backward: float
    forward_on_card: float = 0.0
    """Of these, for how long its messages keep the rank's share of the network cards."""
    backward_on_card: float = 0.0
