"""Cost of torch's own operations besides kernels: bytes read and written, and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.flop_counter import flop_registry

from cp_plugin.common.without_data import Kind, WithoutData, tensors_in
from cp_plugin.core.dtypes import dtype_name
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
        if self._quiet or kind == "made":
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
                result = operation()
        finally:
            self._inside = inside
        if not inside:
            for x in tensors_in((result,)):
                self._meter.count(x)
        if not self._quiet:
            written = _nbytes(args[:2]) if result is None else _nbytes((result,))  # in place: the accumulator
            self._memory(_nbytes(args) + written, 1)
        return result


def _touched(func: Any, args: Any, named: Any, result: Any) -> int:
    """Bytes read and written; an indexed write counts only what is put."""
    if func.overloadpacket.__name__ == "index_put_":
        return _nbytes(args[1:]) + _nbytes(args[2:3])
    return _nbytes((args, tuple(named.values()), result))


def _nbytes(tree: Iterable[Any]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_in(tree))
