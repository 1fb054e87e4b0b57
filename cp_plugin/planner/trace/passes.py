"""Cost of torch's own operations besides kernels: bytes read and written, and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from cp_plugin.common.without_data import Kind, WithoutData, empty, tensors_in
from cp_plugin.core.dtypes import dtype_name
from cp_plugin.core.payload import message_bytes
from cp_plugin.planner.trace.memory import Meter


class Passes(WithoutData):
    """While active, reports every operation that touches memory to ``memory`` or ``products``."""

    def __init__(self, memory: Callable[[int, int], None], products: Callable[[int, str], None], meter: Meter) -> None:
        """
        Args:
            memory: (bytes read and written, launches).
            products: (FLOPs, dtype).
            meter: counts live tensors.
        """
        super().__init__()
        self._memory, self._products, self._meter = memory, products, meter
        self._quiet = False
        self._inside = False  # one kernel: it has no temporaries

    def seen(self, func: Any, kind: Kind, args: Any, named: Any, result: Any) -> None:
        if kind == "view":
            return
        if kind != "in place" and not self._inside:
            for x in tensors_in((result,)):
                self._meter.count(x)
        if self._quiet or kind in ("made", "like"):
            return
        if kind == "product":
            flops = flop_registry[func.overloadpacket](*args, **named, out_val=result)
            self._products(flops, dtype_name(result.dtype))
        else:
            self._memory(_touched(func, args, named, result), 1)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Suspend counting."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def one_pass(self, name: str, operation: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """An operation of ``kernels.fused`` as one kernel that reads its arguments and writes its result once."""
        inside, self._inside = self._inside, True
        try:
            with self.unseen():
                result = _FUSED[name](*args) if name in _FUSED else operation()
        finally:
            self._inside = inside
        if not inside:
            for x in tensors_in((result,)):
                self._meter.count(x)
        if not self._quiet:
            written = _nbytes(args[:2]) if result is None else _nbytes((result,))  # in place: the accumulator
            self._memory(_nbytes(args) + written, 1)
        return result


def _merged(outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    return empty(outs[0].shape, dtype or lses[0].dtype), empty(lses[0].shape, lses[0].dtype)


def _rows(tensors: Sequence[Tensor], order: Tensor) -> tuple[Tensor, ...]:
    return tuple(empty((order.size(0), *x.shape[1:]), x.dtype) for x in tensors)


def _message(tensors: Sequence[Tensor], rows: Sequence[Sequence[int]], block: int) -> Tensor:
    shapes = [tuple(x.shape[1:]) for x in tensors]
    return empty((sum(message_bytes(shapes, part, block) for part in zip(*rows, strict=True)),), torch.uint8)


def _of_message(
    message: Tensor,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    rows: Sequence[Sequence[int]],
    _: int,
) -> tuple[Tensor, ...]:
    return tuple(empty((sum(n), *shape), dtype) for n, shape, dtype in zip(rows, shapes, dtypes, strict=True))


_FUSED: dict[str, Callable[..., Any]] = {
    "merge": _merged,
    "merge_into": lambda *parts: None,
    "gather_rows": _rows,
    "scatter_rows": _rows,
    "pack_message": _message,
    "unpack_message": _of_message,
}
"""Results of the operations of ``cp_plugin.kernels.fused``, without running them."""


def _touched(func: Any, args: Any, named: Any, result: Any) -> int:
    """Bytes read and written; an indexed write counts only what is put."""
    if func.overloadpacket.__name__ == "index_put_":
        return _nbytes(args[1:]) + _nbytes(args[2:3])
    return _nbytes((args, tuple(named.values()), result))


def _nbytes(tree: Iterable[Any]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_in(tree))
