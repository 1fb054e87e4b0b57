"""What attention gives back: results, gradients, and sums of them that are under way."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Partial(NamedTuple):
    """Attention over some of the keys. Rows that saw no key have out 0 and lse -inf."""

    out: Tensor
    """Normalised over the keys seen: the kernel's dtype, or the accumulation dtype once partials were merged."""
    lse: Tensor
    """log(sum(exp(scores))) over the keys seen, float32 (float64 for float64 inputs)."""


class Gradients(NamedTuple):
    """Gradients over some of the (query, key) pairs, in the kernel's or in the accumulation dtype."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class Sums(NamedTuple):
    """Gradients that are summed up on this rank over several calls; None: no sum yet, or not here."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


NO_SUMS = Sums()
