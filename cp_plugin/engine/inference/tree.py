"""Tree reduction: the one collective of a decoded token merges all ranks' partial attention.

    4 ranks     0-1  2-3   then   0-2  1-3         after step i a rank has merged the 2^(i+1) ranks around it
    5, 6, 7     those beyond 4 first send theirs to 0, 1, 2, and receive the result

Every pair merges in rank order, so all ranks compute the same tree: results are bitwise equal. Bytes depend on batch,
heads and value size, never on the context (after Tree Attention, arXiv 2408.04093, which reduces twice; normalised
outputs with their lse merge in one pass).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_plugin.engine.comm import Mesh
from cp_plugin.engine.core.values import Partial
from cp_plugin.engine.kernels import fused

AXIS = "cp"


def merged(mesh: Mesh, partial: Partial) -> Partial:
    """Attention over the keys of all ranks of the axis ``cp``, on every rank.

    partial: over this rank's keys; out and lse have the same dtype.
    """
    size, index = mesh.axes[AXIS], mesh.coordinates[AXIS]
    if size == 1:
        return partial

    def both(lower: Tensor, upper: Tensor) -> Tensor:
        return _packed(_merge(_unpacked(lower), _unpacked(upper)))

    message, whole = _packed(partial), 1 << (size.bit_length() - 1)
    if index >= whole:
        mesh.send(AXIS, (message,), index - whole).wait()
        return _unpacked(mesh.receive(AXIS, (message,), index - whole).wait()[0])
    helped = index + whole < size
    if helped:
        message = both(message, mesh.receive(AXIS, (message,), index + whole).wait()[0])
    step = 1
    while step < whole:
        peer = index ^ step
        (other,) = mesh.exchange(AXIS, (message,), to=peer, source=peer).wait()
        message = both(message, other) if index < peer else both(other, message)
        step *= 2
    if helped:
        mesh.send(AXIS, (message,), index + whole).wait()
    return _unpacked(message)


def messages(size: int, index: int) -> int:
    """Messages that a rank sends for one merge."""
    whole = 1 << (size.bit_length() - 1)
    return 1 if index >= whole else whole.bit_length() - 1 + (index + whole < size)


def bytes_sent(size: int, index: int, tokens: int, batch: int, heads: int, v_head_dim: int, wide: int = 4) -> int:
    """Closed formula: bytes a rank sends per layer and step; ``wide``: bytes of an element of a sum."""
    return messages(size, index) * tokens * batch * heads * (v_head_dim + 1) * wide


def _merge(lower: Partial, upper: Partial) -> Partial:
    outs, lses = zip(lower, upper, strict=True)
    return Partial(*fused.merge(outs, lses))


def _packed(partial: Partial) -> Tensor:
    return torch.cat((partial.out, partial.lse.unsqueeze(-1)), -1)


def _unpacked(message: Tensor) -> Partial:
    return Partial(message[..., :-1].contiguous(), message[..., -1].contiguous())
