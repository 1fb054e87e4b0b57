"""Memory-bound operations as one kernel each: merging, permutation, payloads, row sums, convolution, cached decoding.

CUDA tensors use the Triton kernels of the same names in ``cp_kernels``, which describe arguments and results, if triton
is installed; otherwise the same computation runs in plain torch, with several passes. Permutations, payloads and float8
are bit-identical, sums equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, reduce, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from cp_plugin.engine.core import payload, scaling
from cp_plugin.engine.core.dtypes import accumulation_dtype

Observer = Callable[[str, Callable[[], Any], tuple[Any, ...]], Any]
"""Called instead of an operation with its name, itself and its arguments; returns its result."""
_observer: Observer | None = None


@contextmanager
def observed(by: Observer | None) -> Iterator[None]:
    """Within the ``with`` block, ``by`` observes every operation of this module as the single CUDA kernel it is."""
    global _observer  # noqa: PLW0603
    before, _observer = _observer, by
    try:
        yield
    finally:
        _observer = before


def _one_kernel[**P, R](module: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run the function of that name in ``cp_kernels.<module>`` on CUDA tensors, and the decorated one on others.

    module: None: the decorated function dispatches itself.
    """

    def decorate(plain: Callable[P, R]) -> Callable[P, R]:
        def run(*args: P.args, **named: P.kwargs) -> R:
            first: Any = args[0]
            if module is None or not _kernels(first if isinstance(first, Tensor) else first[0]):
                return plain(*args, **named)
            return getattr(import_module(f"cp_kernels.{module}"), plain.__name__)(*args, **named)

        @wraps(plain)
        def call(*args: P.args, **named: P.kwargs) -> R:
            if _observer is None:
                return run(*args, **named)
            return _observer(plain.__name__, lambda: run(*args, **named), args)

        return call

    return decorate


@_one_kernel("merge")
def merge(outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Attention over the keys of all partials, whose key sets are disjoint."""
    whole = reduce(torch.logaddexp, lses)
    total = outs[0] * _weight(lses[0], whole)
    for out, lse in zip(outs[1:], lses[1:], strict=True):
        total.add_(out * _weight(lse, whole))
    return total.to(dtype or whole.dtype), whole


@_one_kernel("merge")
def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge a partial into ``out`` and ``lse`` in place; ``out`` has the dtype of ``lse``."""
    whole = torch.logaddexp(lse, part_lse)
    out.mul_(_weight(lse, whole)).add_(part_out * _weight(part_lse, whole))
    lse.copy_(whole)


@_one_kernel("permute")
def gather_rows(tensors: Sequence[Tensor], order: Tensor) -> tuple[Tensor, ...]:
    """``x[order]`` of every tensor ``[s, ...]``."""
    return tuple(x[order] for x in tensors)


@_one_kernel("permute")
def scatter_rows(tensors: Sequence[Tensor], order: Tensor) -> tuple[Tensor, ...]:
    """The inverse: ``scattered[order[i]] = x[i]``, contiguous."""
    return tuple(x.new_empty(x.shape).index_copy_(0, order, x) for x in tensors)


pack = _one_kernel("payload")(payload.pack)
unpack = _one_kernel("payload")(payload.unpack)
pack_message = _one_kernel("payload")(payload.pack_message)
unpack_message = _one_kernel("payload")(payload.unpack_message)


def _run_in_pieces(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Run on a few rows at a time on the CPU: their intermediate results stay in the cache."""

    @wraps(function)
    def call(*tensors: Tensor) -> Tensor:
        rows = max(1, _PIECE // max(1, tensors[0][:1].numel()))
        if not tensors[0].is_cpu or len(tensors[0]) <= rows:
            return function(*tensors)
        pieces = zip(*(x.split(rows) for x in tensors), strict=True)
        first = function(*next(pieces))
        whole = first.new_empty(len(tensors[0]), *first.shape[1:])
        whole[:rows] = first
        for begin, piece in enumerate(pieces, 1):
            whole[begin * rows : (begin + 1) * rows] = function(*piece)
        return whole

    return call


_PIECE = 2**18
"""Elements of a piece."""


@_one_kernel("row_term")
@_run_in_pieces
def delta(dout: Tensor, out: Tensor) -> Tensor:
    """``rowsum(dout * out)`` of ``[s, b, h, e]``: ``[s, b, h]`` in the accumulation dtype."""
    wide = accumulation_dtype(dout.dtype)
    return (dout.to(wide) * out).sum(-1)


@_one_kernel("row_term")
@_run_in_pieces
def out_from_delta(dout: Tensor, delta: Tensor) -> Tensor:
    """An ``out'`` for library kernels whose backward requires ``out``; shape ``[s, b, h, e]`` and dtype of dout.

    They use it only for ``delta = rowsum(dout * out)`` (``[s, b, h]``), so a query side can travel as (q, dout, lse,
    delta), and ``out' = dout * delta / rowsum(dout^2)``, 0 where dout is 0, will do. Its terms have one sign, so there
    is no cancellation, and |out'| <= |out| per row, so it does not overflow.
    """
    largest = dout.abs().amax(-1).to(delta.dtype)  # gradients of 1e-20 would vanish when squared
    blank = largest == 0
    largest = largest.masked_fill(blank, 1.0)
    unit = dout / largest.unsqueeze(-1)
    ratio = delta / largest / torch.linalg.vector_norm(unit, dim=-1).square().masked_fill(blank, 1.0)
    return unit.mul_(ratio.unsqueeze(-1)).to(dout.dtype)


@_one_kernel()
def extents(tensors: Sequence[Tensor]) -> tuple[scaling.Extent, ...]:
    """See ``engine.core.scaling.extent``; of ``[s, b, h, d]`` tensors, each read once."""
    if _kernels(tensors[0]):
        from cp_kernels.float8 import extents as kernel

        return tuple(scaling.Extent(*maxima.unbind()) for maxima in kernel(tensors))
    return tuple(map(scaling.extent, tensors))


@_one_kernel("float8")
def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` of ``[s, b, h, d]`` in a float8 type, contiguous; see ``engine.core.scaling.elements``."""
    return scaling.elements(x, scale, dtype).contiguous()


@_one_kernel("float8")
def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x [s, b, h, d]`` rounded to a float8 type at that scale, in its own dtype, contiguous."""
    return (scaling.elements(x, scale, dtype).float() / scale).to(x.dtype).contiguous()


@_one_kernel("convolution")
def convolve(x: Tensor, halo: Tensor, places: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A short causal convolution of ``x [s, b, c]``, in its dtype."""
    rows = torch.cat((x, halo, x.new_zeros((1, *x.shape[1:]))))  # the last one is also number -1
    taps = weight.to(accumulation_dtype(x.dtype)).flip(1).unbind(1)
    out = x * taps[0]
    for place, tap in zip(places[1:], taps[1:], strict=True):
        out += rows[place] * tap
    return (out if bias is None else out + bias).to(x.dtype)


@_one_kernel("convolution")
def convolve_back(
    dout: Tensor, x: Tensor, after: Tensor, weight: Tensor, returned: Tensor | None = None, home: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradient of the rows ``x [n, b, c]``, and their terms of the gradients of weight and bias, ``[w + 1, c]``."""
    wide = accumulation_dtype(x.dtype)
    gradients = torch.cat((dout, dout.new_zeros((1, *dout.shape[1:])))).to(wide)
    drows, sums = torch.zeros(x.shape, dtype=wide, device=x.device), list[Tensor]()
    for place, tap in zip(after, weight.to(wide).flip(1).unbind(1), strict=True):
        gradient = gradients[place]
        drows += gradient * tap
        sums.append((gradient * x).sum((0, 1)))
    if returned is not None and home is not None:
        back = torch.cat((returned, returned.new_zeros((1, *returned.shape[1:])))).to(wide)
        for place in home:
            drows += back[place]
    return drows.to(x.dtype), torch.stack((*sums[::-1], gradients[after[0]].sum((0, 1))))


CachedRows = tuple[Tensor, Tensor | None]
"""Rows of a cache, ``[n, b, g, d]``: numbers, or bytes with exponents ``[n, b, g]`` (``payload``, block 1)."""
Parts = tuple[Tensor, Tensor]
"""Attention to parts of a cache: outs ``[parts, t, b, h, e]``, lses ``[parts, t, b, h]``."""


@_one_kernel()
def decode(
    q: Tensor,
    keys: CachedRows,
    values: CachedRows | None,
    v_head_dim: int,
    held: Tensor,
    positions: Tensor,
    scale: float,
    left: int,
    softcap: float | None,
    otherwise: Callable[[], Parts],
) -> Parts:
    """Causal attention of ``q [t, b, h, d]`` to cache slots, in the accumulation dtype; to be merged by
    ``merge_parts``.

    otherwise: the plain torch version, which reads the cache in blocks.
    """
    if _kernels(q):
        from cp_kernels.decode import decode as kernel

        return kernel(q, keys, values, v_head_dim, held, positions, scale, left, softcap)
    return otherwise()


@_one_kernel("decode")
def merge_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over all of ``Parts``."""
    whole = lses.logsumexp(0)
    return (outs * _weight(lses, whole)).sum(0), whole


def _kernels(x: Tensor) -> bool:
    return x.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _weight(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole) as ``[..., 1]``; 0 where the part saw no key (also where none did: -inf - -inf)."""
    return torch.where(part == -torch.inf, 0.0, torch.exp(part - whole)).unsqueeze(-1)
