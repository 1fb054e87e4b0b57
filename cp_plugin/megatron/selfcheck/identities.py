"""Identities between attention's inputs, outputs and gradients that hold for every method, layout and mask.

For each key/value head, with sums over all tokens of all ranks, the batch, and the queries of the head:

    softmax attention           sum(v . dv) = sum(out . dout)          sum(q . dq) = sum(k . dk)
    linear attention            sum(q . dq) = sum(k . dk) = sum(v . dv) = sum(out . dout)
    delta rule                  sum(q . dq) = sum(v . dv) = sum(out . dout)
    short convolution           sum(x . dx) = sum(out . dout)          all channels; out without its bias
        its halo                digests of what ranks sent and received are equal, to the bit, forward and back

Batch entries and documents do not see each other: each has a weight in the sums, drawn by step, so that what is of
another one breaks them. docs/selfcheck.md says why they hold and what they find.

Rounding (u: unit roundoff of the dtype, a: of the accumulation). A kernel rounds elements independently: the error
grows as the root of the sum of squares, by less than 5 u in 10,000 calls, or where attention is uniform as the sum. In
float32 its own sums count, by less than 16 a for each unit of magnitudes. Float16 loses what is below its least number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cp_plugin.engine.attention.convolution import Rows
from cp_plugin.engine.comm.every_rank import gather_ranks
from cp_plugin.megatron.selfcheck.checked_call import Place
from cp_plugin.megatron.selfcheck.exact_rows import Rounding
from cp_plugin.megatron.selfcheck.slices import digest

_OF_SQUARES, _OF_MAGNITUDES = 10.0, 64.0
"""Limits in units of u and of a: at least twice what was seen in any case."""
_CHUNK = 1 << 20
"""Elements that are multiplied at once: of six copies in float64, 48 MB."""
SOFTMAX = (("v", "out"), ("q", "k"))
LINEAR = (*SOFTMAX, ("q", "out"))
DELTA_RULE = (("v", "out"), ("q", "out"))
CONVOLUTION = (("mixed", "convolved"),)


class Identities:
    """The identities of one call: collects ``x . dx`` of each tensor in the backward, and compares after the last."""

    def __init__(
        self,
        place: Place,
        q: Tensor,
        shape: Sequence[int],
        documents: Tensor | None,
        exchanged: Sequence[tuple[Rows, Rows]] = (),
    ) -> None:
        """
        Args:
            shape: tokens of this rank, batch.
            documents: bounds of a pack's documents; None: not packed.
            exchanged: what a convolution has exchanged by the end of its backward: ``convolution.told``.
        """
        self.place, self.pairs = place, list[tuple[str, str]]()
        self.rounding = Rounding.from_dtype(q.dtype, cuda=q.is_cuda, hops=place.hops)
        if place.cp.options.fp8 is not None:  # payloads and products in e4m3 have three bits of mantissa
            self.rounding = replace(self.rounding, unit=2.0**-4)
        self._expected, self._exchanged = 0, exchanged
        self._dots: dict[str, Tensor] = {}
        tokens, batch = shape[:2]
        self._batch, self._weights = batch, None
        if documents is not None or batch > 1:
            which = torch.zeros(tokens, dtype=torch.int64, device=q.device)
            if documents is not None:
                at = place.cp.positions(tokens * place.cp.size, q.device)
                which = torch.bucketize(at, documents.to(q.device, non_blocking=True), right=True)
            turned = 2.4 * which[:, None] + 1.7 * torch.arange(batch, device=q.device)
            self._weights = 1.25 + 0.75 * (turned.double() + 6.3 * place.draw.random()).cos()

    def watch(
        self, tensors: Mapping[str, Tensor], pairs: Sequence[tuple[str, str]], heads: int, bias: Tensor | None = None
    ) -> None:
        """Compare tensors, as the layer has them: those whose gradients autograd computes.

        bias: what ``convolved`` has besides the product.
        """
        single = len({x.data_ptr() for x in tensors.values()}) == len(tensors)  # k used as v has the gradient of both
        with_grad = {name for name, x in tensors.items() if x.requires_grad and single}
        pairs = [pair for pair in pairs if with_grad.issuperset(pair)]
        self.pairs += pairs
        for name in dict.fromkeys(name for pair in pairs for name in pair):
            x = tensors[name].detach()
            value = x if bias is None or name != "convolved" else x - bias.detach()
            self._expected += 1
            tensors[name].register_hook(partial(self._add, name, value, heads))

    def _add(self, name: str, x: Tensor, heads: int, dx: Tensor) -> None:
        """Take in a gradient; with the last one, compare: collective over the group.

        Raises:
            AttentionError: on every rank, naming heads and sums.
        """
        with self.place.booked():
            self._dots[name] = sums(name, x, dx, (len(x), self._batch, heads), self._weights)
            if len(self._dots) == self._expected:
                self._judge()

    def _judge(self) -> None:
        place, size = self.place, self.place.cp.size
        digests = [_rank_digests(rows, size) for exchange in self._exchanged for rows in exchange]
        own = [dots.flatten() for dots in self._dots.values()] + [x.view(torch.float64) for x in digests]
        everyone = gather_ranks(place.cp.mesh, torch.cat(own)).cpu().split([x.numel() for x in own], 1)
        halos = [x.contiguous().view(torch.int64) for x in everyone[len(self._dots) :]]
        wrong = []
        for name, left, arrived in zip(("forward", "backward"), halos[::2], halos[1::2], strict=False):
            ranks = place.ranks
            pairs = [f"rank {ranks[to]} from rank {ranks[of]}" for of, to in (left != arrived.T).nonzero().tolist()]
            if pairs:
                what = f"the halo of the short convolution's {name} is not what was sent"
                wrong.append(f"{what} ({', '.join(pairs[:4])})")
        total = {name: x.sum(0).view(4, -1) for name, x in zip(self._dots, everyone, strict=False)}
        for one, other in self.pairs:
            apart, allowed = compared(total[one], total[other], self.rounding)
            beyond = apart > allowed  # False for infinite sums and NaN: an overflow is for the loss scaling
            for head in beyond.nonzero().flatten().tolist():
                both = ", ".join(f"sum({name} . d{name}) = {total[name][0, head]:.6g}" for name in (one, other))
                number = place.tp_rank * len(beyond) + head
                what = "short convolution" if (one, other) in CONVOLUTION else f"head {number}"
                wrong.append(f"{what}: {both}, where rounding allows {allowed[head]:.1e} between them")
        place.stop_if_any(
            wrong,
            "gradients",
            f"of {place.cp.provider.name} attention break an identity that holds for any attention",
            "Gradients were lost, scaled or taken from other data: a device, a link or a buffer is at fault; "
            "--cp-check-every 1 also compares rows and names ranks",
        )


def _rank_digests(rows: Rows, size: int) -> Tensor:
    """Digests of the rows of each other rank, int64 ``[size]``."""
    x, at, counts = rows
    digests = torch.zeros(size, dtype=torch.int64, device=x.device)
    for rank, (some, places) in enumerate(zip(x.split(counts), at.split(counts), strict=True)):
        if len(some):
            digests[rank] = digest(some.flatten(1).t(), places)
    return digests


def sums(name: str, x: Tensor, dx: Tensor, shape: Sequence[int], weights: Tensor | None = None) -> Tensor:
    """float64 ``[4, g]``: products ``x . dx``, their squares, their magnitudes, and, for what float16
    loses, the squares of the factor that is not rounded.

    Args:
        name: ``q``, ``k``, ``v`` or ``out``.
        shape: tokens, batch, key/value heads g; the heads that share one follow each other in x.
        weights: float64 ``[tokens, batch]``, of x; None: 1.
    """
    total = torch.zeros(4, shape[2], dtype=torch.float64, device=x.device)
    rows = max(1, _CHUNK * shape[0] // max(1, x.numel()))
    weights = torch.ones_like(total[:1, :1]).expand(shape[:2]) if weights is None else weights
    for one, other, weight in zip(x.split(rows), dx.split(rows), weights.split(rows), strict=True):
        value, slope = (part.reshape(len(part), *shape[1:], -1).double() for part in (one, other))
        weight = weight[..., None, None]
        product = value * slope * weight
        factor = (slope if name == "out" else value) * weight
        total += torch.stack([y.sum((0, 1, 3)) for y in (product, product.square(), product.abs(), factor.square())])
    return total


def compared(one: Tensor, other: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Return how far two sums are apart, and how far rounding may bring them, per head: ``[g]``.

    Args:
        one, other: ``[4, g]``: ``sums``, added up over all ranks.
    """
    squares, magnitudes = (one[i] + other[i] for i in (1, 2))
    unit = rounding.unit * (1 + rounding.hops) ** 0.5
    allowed = unit * (_OF_SQUARES * squares.sqrt() + one[0].abs() + other[0].abs())
    allowed += _OF_MAGNITUDES * rounding.accumulation * magnitudes
    lost = (one[3] * other[3]).sqrt() + 4 * (one[3].sqrt() + other[3].sqrt())
    return (one[0] - other[0]).abs(), allowed + rounding.smallest * lost
