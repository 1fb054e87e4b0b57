"""Counts what torch's own operations cost beside kernels: bytes read and written, and products of matrices.

Shapes of elementwise operations are worked out here: torch's own way on tensors without data takes a millisecond each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from cp_plugin.core.dtypes import accumulation_dtype, dtype_name
from cp_plugin.planner.trace.memory import Meter

_FREE = ("empty", "empty_strided", "new_empty_strided", "detach", "scalar_tensor")
_META = torch.device("meta")


class Passes(TorchDispatchMode):
    """While it is active, every operation that touches memory is told to ``memory`` or to ``products``."""

    def __init__(
        self, memory: Callable[[int, int], None], products: Callable[[int, str, int], None], meter: Meter
    ) -> None:
        """
        Args:
            memory: (bytes read and written, launches).
            products: (FLOPs, dtype, bytes read and written).
            meter: counts what is alive.
        """
        super().__init__()
        self._memory, self._products, self._meter = memory, products, meter
        self._quiet = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks; with True, its default, it imports its compiler at the first operation, and asks that at each."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, named = _kind(func), kwargs or {}
        if not _without_data(args, named):
            return func(*args, **named)
        result = _RESULTS.get(kind, _run)(func, args, named)
        if kind == "view":
            return result
        if kind != "in place":
            for x in _tensors((result,)):
                self._meter.count(x)
        if self._quiet or kind in ("made", "like"):
            return result
        if kind == "product":
            flops = flop_registry[func.overloadpacket](*args, **named, out_val=result)
            self._products(flops, dtype_name(result.dtype), _nbytes((args, result)))
        else:
            self._memory(_touched(func, args, named, result), 1)
        return result

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Nothing inside the ``with`` block counts."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def one_pass(self, name: str, operation: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """An operation of ``kernels.fused``, one kernel: it reads its arguments once, and writes its result once."""
        before = self._quiet
        with self.unseen():
            result = _FUSED[name](*args) if name in _FUSED else operation()
        if not before:
            written = _nbytes(args[:2]) if result is None else _nbytes((result,))  # in place: the running partial
            self._memory(_nbytes(args) + written, 1)
        return result


_Kind = Literal["view", "made", "product", "in place", "elementwise", "like", "zeros", "index", "other"]


@cache
def _kind(func: Any) -> _Kind:
    name = func.overloadpacket.__name__
    if name in ("new_empty", "empty_like"):
        return "like"
    if name in ("zeros_like", "new_zeros"):
        return "zeros"
    if func.is_view:
        return "view"
    if name in _FREE:
        return "made"
    if func.overloadpacket in flop_registry:
        return "product"
    if torch.Tag.pointwise in func.tags or name in ("index_copy_", "copy_"):
        return "in place" if name.endswith("_") else "elementwise"
    return "index" if name == "index" else "other"


def _without_data(args: Any, named: Any) -> bool:
    """Whether the operation is the method's: positions, which are real, are sorted on the host while it runs, and
    brought to the device once for all calls."""
    tensors = list(_tensors(args))
    if tensors:
        return any(x.is_meta for x in tensors)
    device = named.get("device")
    return device is not None and torch.device(device).type == "meta"


def _tensors(tree: Iterable[Any]) -> Iterator[Tensor]:
    for x in tree:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple | list):
            yield from _tensors(x)


def _run(func: Any, args: Any, named: Any) -> Any:
    return func(*args, **named)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor without data; ``new_empty`` of one takes three times as long."""
    return torch.empty(shape, dtype=dtype, device=_META)


def _first(func: Any, args: Any, named: Any) -> Tensor:
    return args[0]


def _elementwise(func: Any, args: Any, named: Any) -> Tensor:
    if named or not all(isinstance(x, Tensor | int | float) for x in args):
        return func(*args, **named)
    tensors = [x for x in args if isinstance(x, Tensor)]
    shape = tuple(map(max, zip_longest(*(x.shape[::-1] for x in tensors), fillvalue=1)))[::-1]
    widest = max((x.dtype for x in tensors), key=lambda dtype: (dtype.is_floating_point, dtype.itemsize))
    compares = func.overloadpacket.__name__ in ("eq", "ne", "lt", "le", "gt", "ge")
    return _empty(shape, torch.bool if compares else widest)


def _like(func: Any, args: Any, named: Any) -> Tensor:
    x, *shape = args
    return _empty(shape[0] if shape else x.shape, named.get("dtype") or x.dtype)


def _index(func: Any, args: Any, named: Any) -> Tensor:
    x, indices = args
    if len(indices) == 1 and indices[0].dim() == 1 and indices[0].dtype != torch.bool:
        return _empty((indices[0].size(0), *x.shape[1:]), x.dtype)
    return func(*args, **named)


def _merged(outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    return _empty(outs[0].shape, dtype or lses[0].dtype), _empty(lses[0].shape, lses[0].dtype)


def _rows(tensors: Sequence[Tensor], order: Tensor) -> tuple[Tensor, ...]:
    return tuple(_empty((order.size(0), *x.shape[1:]), x.dtype) for x in tensors)


def _parts(q: Tensor, keys: Any, values: Any, v_head_dim: int, *rest: Any) -> tuple[Tensor, Tensor]:
    """Of one part: how many there are depends on the device, and is little beside the cache."""
    wide, shape = accumulation_dtype(q.dtype), (1, *q.shape[:3])
    return _empty((*shape, v_head_dim), wide), _empty(shape, wide)


_FUSED: dict[str, Callable[..., Any]] = {
    "merge": _merged,
    "merge_into": lambda *parts: None,
    "gather_rows": _rows,
    "scatter_rows": _rows,
    "decode": _parts,
}
"""What operations of ``cp_plugin.kernels.fused`` return, without running them."""
_RESULTS: dict[_Kind, Callable[[Any, Any, Any], Any]] = {
    "in place": _first,
    "elementwise": _elementwise,
    "like": _like,
    "zeros": _like,
    "index": _index,
}
"""Where torch's own way would take longer."""


def _touched(func: Any, args: Any, named: Any, result: Any) -> int:
    """Bytes read and written: of what is written to by indices, no more than what is put there."""
    if func.overloadpacket.__name__ == "index_put_":
        return _nbytes(args[1:]) + _nbytes(args[2:3])
    return _nbytes((args, tuple(named.values()), result))


def _nbytes(tree: Iterable[Any]) -> int:
    return sum(x.numel() * x.element_size() for x in _tensors(tree))
