"""Identities between attention's inputs, outputs and gradients that hold for every method, layout and mask.

For each key/value head, with sums over all tokens of all ranks, the batch, and the queries of the head:

    softmax attention           sum(v . dv) = sum(out . dout)          sum(q . dq) = sum(k . dk)
    linear attention            sum(q . dq) = sum(k . dk) = sum(v . dv) = sum(out . dout)

Derivation (Euler's theorem on homogeneous functions). Let L be the loss. If v becomes c v, out becomes c out, so
``dL/dc`` at c = 1 is ``sum(v . dv)`` and also ``sum(out . dout)``; a sink adds no value, and documents and windows only
say which keys there are. If q becomes c q and k becomes k / c, all scores stay, so ``sum(q . dq) - sum(k . dk)`` is 0.
In linear attention, with its decays as they are, out is proportional to q, to k and to v alike.

A gradient that is lost, doubled, scaled, late or of another rank's tokens breaks them, and so does an output that is
merged otherwise than its backward assumes. Nothing is recomputed: a few dot products on each rank, and sixteen numbers
per head that go around. What they cannot see is a fault that is a right attention of other inputs, such as swapped keys
with their own gradients: the rows of ``--cp-check-every`` are for these.

Rounding (u: unit roundoff of the dtype, a: of the accumulation). The sums are in float64 and their elements rounded by
the kernel, independently: the error grows as the root of the sum of squares, by less than 5 u in 10,000 calls
(``tests/megatron/test_identities.py``). Where attention is uniform, all weights are rounded alike, and the sum as much
as one of them. In float32 a kernel's own sums count as well, by less than 16 a for each unit of the sum of magnitudes.
In float16, weights and gradients below the smallest number are lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cp_plugin.comm.every_rank import of_every_rank
from cp_plugin.megatron.selfcheck.checked_call import AttentionError, Place
from cp_plugin.megatron.selfcheck.exact_rows import Rounding

_OF_SQUARES, _OF_MAGNITUDES = 10.0, 64.0
"""Limits in units of u and of a: at least twice what was seen in any case."""
_CHUNK = 1 << 20
"""Elements that are multiplied at once: of six copies in float64, 48 MB."""
_SOFTMAX = (("v", "out"), ("q", "k"))
_LINEAR = (("v", "out"), ("q", "k"), ("q", "out"))


def watch_identities(place: Place, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, packed: bool, linear: bool) -> None:
    """Compare in the backward of this call.

    Args:
        q, k, v, out: as the layer has them: the tensors whose gradients autograd computes.
        packed: whether they lack the batch dimension.
    """
    tensors = {"q": q, "k": k, "v": v, "out": out}
    single = len({x.data_ptr() for x in tensors.values()}) == len(tensors)  # k used as v has the gradient of both
    with_grad = {name for name, x in tensors.items() if x.requires_grad and single}
    pairs = [pair for pair in (_LINEAR if linear else _SOFTMAX) if with_grad.issuperset(pair)]
    shape = (k.size(0), 1, k.size(1)) if packed and k.dim() == 3 else k.shape[:3]
    identities = Identities(place, pairs, tuple(shape), rounding_of(place, q))
    for name in {name for pair in pairs for name in pair}:
        tensors[name].register_hook(partial(identities.add, name, tensors[name].detach()))


def rounding_of(place: Place, q: Tensor) -> Rounding:
    """Of this call; payloads and products in FP8 (e4m3) have three bits of mantissa."""
    found = Rounding.of(q.dtype, cuda=q.is_cuda, hops=place.hops)
    return found if place.cp.options.fp8 is None else replace(found, unit=2.0**-4)


class Identities:
    """The identities of one call: collects ``x . dx`` of each tensor in the backward, and compares after the last."""

    def __init__(
        self, place: Place, pairs: Sequence[tuple[str, str]], shape: tuple[int, ...], rounding: Rounding
    ) -> None:
        """
        Args:
            pairs: the tensors whose sums are equal.
            shape: tokens of this rank, batch, key/value heads.
        """
        self.place, self.pairs, self.shape, self.rounding = place, pairs, shape, rounding
        self._expected = len({name for pair in pairs for name in pair})
        self._dots: dict[str, Tensor] = {}

    def add(self, name: str, x: Tensor, dx: Tensor) -> None:
        """Take in a gradient; with the last one, compare: collective over the group.

        Raises:
            AttentionError: on every rank, naming heads and sums.
        """
        with self.place.booked():
            self._dots[name] = sums(name, x, dx, self.shape)
            if len(self._dots) == self._expected:
                self._judge()

    def _judge(self) -> None:
        names = list(self._dots)
        everyone = of_every_rank(self.place.cp.mesh, torch.stack([self._dots[name] for name in names])).sum(0)
        total = dict(zip(names, everyone, strict=True))
        wrong = []
        for one, other in self.pairs:
            apart, allowed = compared(total[one], total[other], self.rounding)
            beyond = apart > allowed  # False for infinite sums and NaN: an overflow is for the loss scaling
            for head in beyond.nonzero().flatten().tolist():
                both = ", ".join(f"sum({name} . d{name}) = {total[name][0, head]:.6g}" for name in (one, other))
                number = self.place.tp_rank * self.shape[2] + head
                wrong.append(f"head {number}: {both}, where rounding allows {allowed[head]:.1e} between them")
        if wrong:
            raise AttentionError(self._message(wrong))

    def _message(self, wrong: Sequence[str]) -> str:
        place = self.place
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        return (
            f"--cp-check-every: in step {place.step}, layer {place.layer}, the gradients of {place.cp.provider.name} "
            f"attention on the {place.cp.layout.name} layout break an identity that holds for any attention. "
            f"{'; '.join(wrong[:3])}{more}. Gradients were lost, scaled or taken from other data: a device, a link or "
            "a buffer is at fault. Resume from an earlier checkpoint; --cp-check-every 1 also compares rows and names "
            "ranks; --cp-check-every 0 checks nothing"
        )


def sums(name: str, x: Tensor, dx: Tensor, shape: Sequence[int]) -> Tensor:
    """float64 ``[4, g]``: products ``x . dx``, their squares, their magnitudes, and and, for what float16
    loses, the squares of the factor that is not rounded.

    Args:
        name: ``q``, ``k``, ``v`` or ``out``.
        shape: tokens, batch, key/value heads g; the heads that share one follow each other in x.
    """
    total = torch.zeros(4, shape[2], dtype=torch.float64, device=x.device)
    rows = max(1, _CHUNK * shape[0] // max(1, x.numel()))
    for parts in zip(x.split(rows), dx.split(rows), strict=True):
        value, slope = (part.reshape(len(part), *shape[1:], -1).double() for part in parts)
        product = value * slope
        factor = slope if name == "out" else value
        total += torch.stack([y.sum((0, 1, 3)) for y in (product, product.square(), product.abs(), factor.square())])
    return total


def compared(one: Tensor, other: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """How far two sums are apart, and how far rounding may bring them, per head: ``[g]``.

    Args:
        one, other: ``[4, g]``: ``sums``, added up over all ranks.
    """
    squares, magnitudes = (one[i] + other[i] for i in (1, 2))
    unit = rounding.unit * (1 + rounding.hops) ** 0.5
    allowed = unit * (_OF_SQUARES * squares.sqrt() + one[0].abs() + other[0].abs())
    allowed += _OF_MAGNITUDES * rounding.accumulation * magnitudes
    lost = (one[3] * other[3]).sqrt() + 4 * (one[3].sqrt() + other[3].sqrt())
    return (one[0] - other[0]).abs(), allowed + rounding.smallest * lost
