"""Feature maps: what stands in for exp(q k) in linear attention. Each maps heads of q and k ``[s, b, heads, d]``.

    elu         elu(x) + 1                                    Katharopoulos et al., arXiv 2006.16236
    silu        x * sigmoid(x)                                Lightning Attention, arXiv 2401.04658
    taylor      [1, x, x (x) x / sqrt 2], so that             Based, arXiv 2402.18668
                f(q) f(k) = 1 + q k + (q k)^2 / 2
    quadratic   f(q) f(k) = (q' k')^2, with                   Rebased, arXiv 2402.10644
                x' = gain * normalised(x) + bias, learned

The last two square the size of a head, so they first project it to ``PROJECTED`` dimensions, learned per head.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, layer_norm, silu

PROJECTED = 16


class Elementwise(nn.Module):
    """The same function of every number; no parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._function = {"elu": lambda x: elu(x) + 1, "silu": silu, "identity": lambda x: x}[name]

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


class Squared(nn.Module):
    """Heads projected, and all products of two of their dimensions."""

    def __init__(self, heads: range, head_dim: int, *, learned_norm: bool, seed: int) -> None:
        """
        Args:
            heads: numbers of this rank's heads among those of the model: a head's initial weights depend on its number
                alone, not on how many ranks share the heads.
            learned_norm: the quadratic map with learned gain and bias; otherwise the Taylor map.
            seed: other weights for other layers, and for queries and keys.
        """
        super().__init__()
        self._learned_norm = learned_norm
        self.projection = nn.Parameter(torch.stack([_initial(head_dim, seed, head) for head in heads]))
        if learned_norm:
            self.gain = nn.Parameter(torch.ones(len(heads) * PROJECTED))  # flat: optimizers spare vectors weight decay
            self.bias = nn.Parameter(torch.zeros(len(heads) * PROJECTED))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("sbhd,hdp->sbhp", x, self.projection.to(x.dtype))
        if self._learned_norm:
            gain, bias = (y.to(x.dtype).view(-1, PROJECTED) for y in (self.gain, self.bias))
            return _pairs(layer_norm(x, (PROJECTED,)) * gain + bias)
        x = x / PROJECTED**0.25
        return torch.cat((torch.ones_like(x[..., :1]), x, _pairs(x) / sqrt(2)), -1)


def _initial(head_dim: int, seed: int, head: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + head)
    return torch.randn(head_dim, PROJECTED, generator=generator) / sqrt(head_dim)


def _pairs(x: Tensor) -> Tensor:
    """Products x_i x_j, each once: their inner product of two vectors is the square of the vectors'."""
    i, j = torch.triu_indices(PROJECTED, PROJECTED, device=x.device)
    off_diagonal = x.new_full((len(i),), sqrt(2)).masked_fill(i == j, 1)
    return x[..., i] * x[..., j] * off_diagonal
