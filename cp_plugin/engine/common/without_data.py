"""Fast shape propagation on the meta device.

Results of elementwise operations are computed here: torch's meta kernels take a millisecond each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "scalar_tensor")
_META = torch.device("meta")


class Mode(TorchDispatchMode):
    """A dispatch mode that does not involve torch's compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True, torch's default, would import the compiler at the first operation."""
        return False


class WithoutData(Mode):
    """Operations on meta tensors take microseconds while it is active."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, named = kind_of(func), kwargs or {}
        if not _concerns(args, named):
            return func(*args, **named)
        result = _elementwise(func, args, named) if kind == "elementwise" else func(*args, **named)
        self.seen(func, kind, args, named, result)
        return result

    def seen(self, func: Any, kind: Kind, args: Any, named: Any, result: Any) -> None:
        """Called for every operation; for subclasses."""


Kind = Literal["view", "made", "product", "in place", "elementwise", "other"]


@cache
def kind_of(func: Any) -> Kind:
    """Classify an operation by its result."""
    name = func.overloadpacket.__name__
    if func.is_view:
        return "view"
    if name in _FREE:
        return "made"
    if func.overloadpacket in flop_registry:
        return "product"
    if torch.Tag.pointwise in func.tags or name in ("index_copy_", "copy_"):
        return "in place" if name.endswith("_") else "elementwise"
    return "other"


def _concerns(args: Any, named: Any) -> bool:
    """Return True if the operation belongs to the method.

    Positions are real tensors: they are sorted on the host during the trace and copied to the device once for all
    calls.
    """
    tensors = list(tensors_in(args))
    if tensors:
        return any(x.is_meta for x in tensors)
    device = named.get("device")
    return device is not None and torch.device(device).type == "meta"


def tensors_in(tree: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors in nested lists and tuples."""
    for x in tree:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple | list):
            yield from tensors_in(x)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A meta tensor; three times faster than ``new_empty``."""
    return torch.empty(shape, dtype=dtype, device=_META)


def _elementwise(func: Any, args: Any, named: Any) -> Tensor:
    if named or not all(isinstance(x, Tensor | int | float) for x in args):
        return func(*args, **named)
    tensors = [x for x in args if isinstance(x, Tensor)]
    shape = tuple(map(max, zip_longest(*(x.shape[::-1] for x in tensors), fillvalue=1)))[::-1]
    widest = max((x.dtype for x in tensors), key=lambda dtype: (dtype.is_floating_point, dtype.itemsize))
    compares = func.overloadpacket.__name__ in ("eq", "ne", "lt", "le", "gt", "ge")
    return empty(shape, torch.bool if compares else widest)
