"""Feature maps of linear attention, applied to heads of q and k ``[s, b, heads, d]``.

    elu         elu(x) + 1                                    Katharopoulos et al., arXiv 2006.16236
    silu        x * sigmoid(x)                                Lightning Attention, arXiv 2401.04658
    taylor      [1, x, x (x) x / sqrt 2], so that             Based, arXiv 2402.18668
                f(q) f(k) = 1 + q k + (q k)^2 / 2
    quadratic   f(q) f(k) = (q' k')^2, with                   Rebased, arXiv 2402.10644
                x' = gain * normalised(x) + bias, learned

The last two square the head size, so heads are first projected to ``PROJECTED`` dimensions, learned per head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, layer_norm, silu

PROJECTED = 16


class Squared(nn.Module):
    """Projected heads and all products of two of their dimensions."""

    def __init__(self, heads: range, head_dim: int, *, learned_norm: bool, seed: int) -> None:
        """
        Args:
            heads: this rank's head numbers in the model; initial weights depend on it, not on sharding.
            learned_norm: the quadratic map with learned gain and bias; otherwise the Taylor map.
            seed: differs between layers and between queries and keys.
        """
        super().__init__()
        self._learned_norm = learned_norm
        self.projection = nn.Parameter(
            torch.stack([initial((head_dim, PROJECTED), head_dim, seed, head) for head in heads])
        )
        if learned_norm:
            self.gain = nn.Parameter(torch.ones(len(heads) * PROJECTED))  # flat: no weight decay for vectors
            self.bias = nn.Parameter(torch.zeros(len(heads) * PROJECTED))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("sbhd,hdp->sbhp", x, self.projection.to(x.dtype))
        if self._learned_norm:
            gain, bias = (y.to(x.dtype).view(-1, PROJECTED) for y in (self.gain, self.bias))
            return _pairs(layer_norm(x, (PROJECTED,)) * gain + bias)
        x = x / PROJECTED**0.25
        return torch.cat((torch.ones_like(x[..., :1]), x, _pairs(x) / sqrt(2)), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureMap:
    """A feature map of q and k."""

    name: str
    function: Callable[[Tensor], Tensor] | None = None
    """Elementwise function; None: ``Squared``."""
    scaled: bool = False
    """Whether queries are scaled by d ** -0.5."""
    learned_norm: bool = False
    """Of ``Squared``: quadratic instead of Taylor."""

    @property
    def projected(self) -> bool:
        """True if heads go through a learned projection."""
        return self.function is None

    def size(self, head_dim: int) -> int:
        """Head size after the map."""
        pairs = PROJECTED * (PROJECTED + 1) // 2
        return head_dim if not self.projected else pairs if self.learned_norm else 1 + PROJECTED + pairs

    def module(self, heads: range, head_dim: int, seed: int) -> Callable[[Tensor], Tensor]:
        """The function, or a module for these heads (numbers in the model); ``seed`` as for ``Squared``."""
        return self.function or Squared(heads, head_dim, learned_norm=self.learned_norm, seed=seed)

    def __str__(self) -> str:
        return self.name


IDENTITY = FeatureMap(name="identity", function=lambda x: x, scaled=True)
SILU = FeatureMap(name="silu", function=silu, scaled=True)
ELU = FeatureMap(name="elu", function=lambda x: elu(x) + 1)
TAYLOR = FeatureMap(name="taylor")
QUADRATIC = FeatureMap(name="quadratic", learned_norm=True)


def initial(shape: tuple[int, int], inputs: int, seed: int, head: int = 0) -> Tensor:
    """Initial weights that depend on the head's number in the model, and not on how heads are divided."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + head)
    return torch.randn(shape, generator=generator) / sqrt(inputs)


def _pairs(x: Tensor) -> Tensor:
    """All products x_i x_j, scaled so that the inner product of two results is the squared inner product."""
    i, j = torch.triu_indices(PROJECTED, PROJECTED, device=x.device)
    off_diagonal = x.new_full((len(i),), sqrt(2)).masked_fill(i == j, 1)
    return x[..., i] * x[..., j] * off_diagonal
