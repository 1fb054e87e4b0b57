"""What FP8 attention takes its scales from: the largest element of a tensor, or of its like in earlier steps.

    q, k, v, dout    are known before they are rounded
    out, dp, dqkv    are known to the kernel: it is given a scale, and says afterwards what the largest element was

``Scaling`` is current scaling: what is known is scaled by its own largest element, the rest by a bound that no element
exceeds. ``Delayed`` remembers, for one layer, what was found in earlier steps:

    scaling = Delayed(16, algorithm="max")
    out = cp.attention(q, k, v, scaling=scaling)    # forward and backward record their largest elements
    scaling.update(group)                           # once a step, after the backward: all ranks of a group alike

dp is dS, P times (dout v - delta); dqkv is dq, dk and dv together, as Transformer Engine has one scale for the three. P
is 1 at most, and has a fixed scale. All scales are powers of two, so that what was rounded on its way between ranks is
not rounded again. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
P_SCALE = 256.0
"""Of probabilities: the largest power of two by which 1 stays in range of e4m3."""
ROLES = ("q", "k", "v", "out", "dout", "dp", "dqkv")
IN_BACKWARD = ("dp", "dqkv")
"""Those for which a bound is far too large, but for e5m2's wide range."""

Algorithm = Literal["most_recent", "max"]


class Scaling:
    """Current scaling, without a memory."""

    def scale(self, role: str, largest: Tensor, dtype: torch.dtype) -> Tensor:
        """The scale of a tensor, a float32 number on its device. NaN if ``largest`` is not finite.

        largest: its largest absolute value, or what none exceeds.
        """
        return scale_for(largest, dtype)

    def record(self, role: str, largest: Tensor) -> None:
        """What the largest absolute value of a tensor was."""

    def reader(self) -> Scaling:
        """The same scales, of a call that is not recorded. All readers of one scaling are equal."""
        return _Reader(self)


@dataclass(frozen=True, slots=True)
class _Reader(Scaling):
    of: Scaling

    def scale(self, role: str, largest: Tensor, dtype: torch.dtype) -> Tensor:
        return self.of.scale(role, largest, dtype)


class Delayed(Scaling):
    """Delayed scaling of one layer. Until there is a first update, and of what was always 0, current scaling."""

    def __init__(
        self,
        length: int = 1,
        *,
        algorithm: Algorithm = "most_recent",
        margin: int = 0,
        roles: Collection[str] = ROLES,
    ) -> None:
        """
        Args:
            length: steps that are remembered.
            algorithm: ``max``: scale by the largest of them. ``most_recent``: by the last.
            margin: scales are lower by a factor of ``2 ** margin``, which is room for larger elements. What is too
                large nevertheless becomes the largest number of its type.
            roles: what is scaled so. The rest has current scaling.
        """
        if length < 1 or algorithm not in ("most_recent", "max"):
            raise ValueError(f"length {length}, algorithm {algorithm!r}: 1 step or more, most_recent or max")
        self.length, self.algorithm, self.margin, self.roles = length, algorithm, margin, tuple(roles)
        self.history = torch.zeros(length, len(ROLES))
        """Largest elements, float32 ``[length, roles]``: of the last step first. 0: there was none."""
        self._known = torch.zeros(len(ROLES))
        self._found: dict[str, Tensor] = {}

    def scale(self, role: str, largest: Tensor, dtype: torch.dtype) -> Tensor:
        if role not in self.roles:
            return scale_for(largest, dtype)
        self._known = self._known.to(largest.device)
        known = self._known[ROLES.index(role)]
        used = torch.where(known > 0, known * 2.0**self.margin, largest)
        return scale_for(torch.where(largest.isfinite(), used, torch.nan), dtype)

    def record(self, role: str, largest: Tensor) -> None:
        finite = torch.where(largest.isfinite(), largest.float(), 0.0).amax()
        before = self._found.get(role)
        self._found[role] = finite if before is None else torch.maximum(before, finite)

    def update(self, group: dist.ProcessGroup | None = None) -> None:
        """Scale the next step by what was recorded since the last update, on all ranks of the group; collective."""
        found = next(iter(self._found.values()), self._known)
        update([self], group, found.device)

    def remember(self, found: Tensor) -> None:
        """A step in which these were the largest elements: ``[roles]``, 0 where there were none or not finite ones."""
        self.load(torch.cat((found.unsqueeze(0), self.history.to(found.device)[:-1])))

    def load(self, history: Tensor) -> None:
        """Go on from the history of another run of this layer; its shape must be that of ``self.history``."""
        self.history = history.detach().float().clone()
        chosen = self.history.amax(0) if self.algorithm == "max" else self.history[0]
        self._known = torch.where(chosen > 0, chosen, self._known.to(chosen.device))

    def take(self, device: torch.device) -> Tensor:
        """What was recorded, float32 ``[roles]``, from now on forgotten."""
        nothing = torch.zeros((), device=device)
        found, self._found = torch.stack([self._found.get(role, nothing) for role in ROLES]), {}
        return found


def update(scalings: Sequence[Delayed], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Update several layers by one message; collective over the group, whose ranks have the same layers.

    device: where the group's messages are.
    """
    found = torch.stack([scaling.take(device) for scaling in scalings])
    if group is not None and group.size() > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    for scaling, of_layer in zip(scalings, found, strict=True):
        scaling.remember(of_layer)


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two, from 2^-100 to 2^100, by which nothing leaves the range of a float8 type.

    largest: the largest absolute value, float32. A scale for 0 is 1; of what is not finite it is NaN.
    """
    exponent = torch.floor(torch.log2(torch.finfo(dtype).max / largest)).clamp(-100, 100)
    scale = torch.exp2(exponent)
    scale = torch.where(largest * scale > torch.finfo(dtype).max, scale / 2, scale)  # log2 may be off by rounding
    return torch.where(largest == 0, 1.0, torch.where(largest.isfinite(), scale, torch.nan))


def largest(x: Tensor) -> Tensor:
    """The largest absolute value, float32."""
    return x.abs().amax().float()


def elements(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` in a float8 type; what is too large becomes its largest number, as in kernels."""
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype)


class Extent(NamedTuple):
    """How large a tensor is, float32, on its device."""

    largest: Tensor
    """Its largest absolute value."""
    longest: Tensor
    """The largest norm of a row, over all tokens and heads."""


def extent(x: Tensor) -> Extent:
    return Extent(largest(x), x.float().square().sum(-1).amax().sqrt())


def bounds(
    dout: Extent, q: Extent, k: Extent, v: Extent, out: Extent, rows: int, scale: float
) -> tuple[Tensor, Tensor]:
    """What no element of dp, and none of dq, dk and dv, exceeds; float32, on the device.

    Rows of P add up to 1 at most, its columns to the number of rows that share a key head; delta is dout out. A tenth
    is for rounding.

    rows: that share a key head, of all its query heads.
    """
    dp = 1.1 * dout.longest * (v.longest + out.longest)
    widest = torch.maximum(rows * q.largest, k.largest)
    return dp, torch.maximum(1.1 * scale * dp * widest, 1.1 * rows * dout.largest)


def bound_of_out(v: Extent) -> Tensor:
    """What no element of an average of v exceeds, whatever the rounding of P."""
    return 1.125 * v.largest
