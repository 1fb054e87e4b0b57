"""Scaling of FP8 attention: current and delayed.

    q, k, v, dout    known before they are rounded
    out, dp, dqkv    known to the kernel only: it is given a scale and reports the largest element afterwards

``Scaling`` is current scaling: known tensors are scaled by their own largest element, the others by an upper bound.
``Delayed`` keeps, for one layer, a history of largest elements:

    scaling = Delayed(16, algorithm="max")
    out = cp.attention(q, k, v, scaling=scaling)    # forward and backward record largest elements
    scaling.update(group)                           # once per step, after the backward pass; collective

dp is dS = P * (dout v - delta); dqkv is dq, dk and dv, which share one scale as in Transformer Engine. P <= 1 has a
fixed scale. All scales are powers of two, so payloads already rounded in transit are not rounded again. Nothing here
synchronizes with the device.
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
"""Scale of probabilities: the largest power of two that keeps 1 within e4m3."""
ROLES = ("q", "k", "v", "out", "dout", "dp", "dqkv")
IN_BACKWARD = ("dp", "dqkv")
"""Roles whose bound is loose and relies on e5m2's range."""

Algorithm = Literal["most_recent", "max"]


class Scaling:
    """Current scaling; stateless."""

    def scale(self, role: str, largest: Tensor, dtype: torch.dtype) -> Tensor:
        """The scale of a tensor: a float32 scalar on its device, NaN if ``largest`` is not finite.

        largest: its largest absolute value, or an upper bound.
        """
        return scale_for(largest, dtype)

    def record(self, role: str, largest: Tensor) -> None:
        """Record the largest absolute value of a tensor."""

    def reader(self) -> Scaling:
        """The same scales for a call that must not be recorded. Readers of one scaling compare equal."""
        return _Reader(self)


@dataclass(frozen=True, slots=True)
class _Reader(Scaling):
    of: Scaling

    def scale(self, role: str, largest: Tensor, dtype: torch.dtype) -> Tensor:
        return self.of.scale(role, largest, dtype)


class Delayed(Scaling):
    """Delayed scaling of one layer; current scaling before the first update and for tensors that were always 0."""

    def __init__(
        self, length: int = 1, *, algorithm: Algorithm = "most_recent", margin: int = 0, roles: Collection[str] = ROLES
    ) -> None:
        """
        Args:
            length: steps in the history.
            algorithm: ``max``: scale by the largest of them; ``most_recent``: by the last.
            margin: lower scales by ``2 ** margin``. Elements that are still too large saturate.
            roles: tensors with delayed scaling; the others use current scaling.
        """
        if length < 1 or algorithm not in ("most_recent", "max"):
            raise ValueError(f"length {length}, algorithm {algorithm!r}: 1 step or more, most_recent or max")
        self.length, self.algorithm, self.margin, self.roles = length, algorithm, margin, tuple(roles)
        self.history = torch.zeros(length, len(ROLES))
        """Largest elements, float32 ``[length, roles]``, newest step first; 0: none."""
        self._known = torch.zeros(len(ROLES))
        self._recorded: dict[str, Tensor] = {}

    def scale(self, role: str, largest: Tensor, dtype: torch.dtype) -> Tensor:
        if role not in self.roles:
            return scale_for(largest, dtype)
        self._known = self._known.to(largest.device)
        known = self._known[ROLES.index(role)]
        used = torch.where(known > 0, known * 2.0**self.margin, largest)
        return scale_for(torch.where(largest.isfinite(), used, torch.nan), dtype)

    def record(self, role: str, largest: Tensor) -> None:
        finite = torch.where(largest.isfinite(), largest.float(), 0.0).amax()
        before = self._recorded.get(role)
        self._recorded[role] = finite if before is None else torch.maximum(before, finite)

    def update(self, group: dist.ProcessGroup | None = None) -> None:
        """Finish a step: scale the next one by what was recorded, on all ranks of the group; collective."""
        recorded = next(iter(self._recorded.values()), self._known)
        update([self], group, recorded.device)

    def load(self, history: Tensor) -> None:
        """Restore the history of another run of this layer, of the shape of ``self.history``."""
        self.history = history.detach().float().clone()
        chosen = self.history.amax(0) if self.algorithm == "max" else self.history[0]
        self._known = torch.where(chosen > 0, chosen, self._known.to(chosen.device))

    def take(self, device: torch.device) -> Tensor:
        """Return and clear what was recorded: float32 ``[roles]``."""
        nothing = torch.zeros((), device=device)
        recorded, self._recorded = torch.stack([self._recorded.get(role, nothing) for role in ROLES]), {}
        return recorded


def update(scalings: Sequence[Delayed], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Update several layers with one all-reduce; all ranks of the group must pass the same layers.

    device: where the group communicates.
    """
    recorded = torch.stack([scaling.take(device) for scaling in scalings])
    if group is not None and group.size() > 1:
        dist.all_reduce(recorded, op=dist.ReduceOp.MAX, group=group)
    for scaling, step in zip(scalings, recorded, strict=True):
        scaling.load(torch.cat((step.unsqueeze(0), scaling.history.to(step.device)[:-1])))


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two in 2^-100 .. 2^100 that keeps ``largest`` within a float8 type.

    1 for 0, NaN if ``largest`` is not finite.
    """
    exponent = torch.floor(torch.log2(torch.finfo(dtype).max / largest)).clamp(-100, 100)
    scale = torch.exp2(exponent)
    scale = torch.where(largest * scale > torch.finfo(dtype).max, scale / 2, scale)  # log2 may be off by rounding
    return torch.where(largest == 0, 1.0, torch.where(largest.isfinite(), scale, torch.nan))


def largest(x: Tensor) -> Tensor:
    """The largest absolute value, float32."""
    return x.abs().amax().float()


def elements(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` in a float8 type, saturating like the kernels."""
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype)


class Extent(NamedTuple):
    """Magnitudes of a tensor, float32 on its device."""

    largest: Tensor
    """The largest absolute value."""
    longest: Tensor
    """The largest row norm, over all tokens and heads."""


def extent(x: Tensor) -> Extent:
    return Extent(largest(x), x.float().square().sum(-1).amax().sqrt())


def bounds(
    dout: Extent, q: Extent, k: Extent, v: Extent, out: Extent, rows: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Upper bounds of the elements of dp, and of dq, dk and dv; float32, on the device.

    Rows of P sum to at most 1, its columns to ``rows``; delta = dout out. 10 % allow for rounding.

    rows: query rows that share a key head.
    """
    dp = 1.1 * dout.longest * (v.longest + out.longest)
    widest = torch.maximum(rows * q.largest, k.largest)
    return dp, torch.maximum(1.1 * scale * dp * widest, 1.1 * rows * dout.largest)


def bound_of_out(v: Extent) -> Tensor:
    """Upper bound of the elements of a weighted mean of v, including the rounding of P."""
    return 1.125 * v.largest
