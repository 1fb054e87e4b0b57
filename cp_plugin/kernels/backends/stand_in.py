"""A stand-in for ``out`` in library kernels whose backward insists on it.

A flash backward uses ``out`` for one thing only, ``delta = rowsum(dout * out)``. Given delta instead, any out' with
``rowsum(dout * out') = delta`` will do, and

    out' = dout * delta / rowsum(dout^2)        (0 where dout is 0)

is one. Its terms all have one sign, so it loses nothing to cancellation, and |out'| <= |out| row by row, so it does not
overflow where ``out`` did not. Thus the query side of a backward travels as (q, dout, lse, delta), without ``out``, on
stock kernels.
"""

from __future__ import annotations

from torch import Tensor

from cp_plugin.kernels import fused


def out_from_delta(dout: Tensor, delta: Tensor) -> Tensor:
    """An ``out'`` of dout's shape ``[s, b, h, e]`` and dtype that gives ``delta [s, b, h]``, in one kernel on CUDA."""
    return fused.out_from_delta(dout, delta)
