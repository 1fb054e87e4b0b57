"""Activation recomputation that does not repeat attention (DistFlashAttn, arXiv 2310.03294, section 3.3).

    layers = Recomputed(layers)
    layers(x)    # forward; activations are dropped, but ``once`` keeps its results
    layers(x)    # recomputation, in the backward pass: ``once`` returns them in the same order

Wrap the checkpointed function anew for each call:
``torch.utils.checkpoint.checkpoint(Recomputed(layers), x, use_reentrant=False)``. Results belong to the wrapper, so
micro-batches cannot mix them up and they are freed with it. Outside of wrappers nothing is kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Recomputed[**P, R]:
    """A function run forward and again in the backward. A third run computes everything anew."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self._results: deque[Any] = deque()
        self.run = 0
        """Which one this is: 1 will be repeated, 2 is the repetition."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self.run += 1
        regions = _regions()
        regions.append(self)
        try:
            result = self._function(*args, **kwargs)
        finally:
            regions.pop()
        if self.run == 2 and self._results:
            raise RuntimeError(f"recomputation left {len(self._results)} attention results unused: {_UNEQUAL}")
        return result


def once[T](compute: Callable[[], T]) -> T:
    """The result of ``compute``, which is not called in a recomputation.

    In nested wrappers, the innermost one that is being repeated has the result, and those inside it keep it.
    """
    keepers = []
    for region in reversed(_regions()):
        if region.run == 2:
            if not region._results:
                raise RuntimeError(f"recomputation requested more attention results than were kept: {_UNEQUAL}")
            result: T = region._results.popleft()
            break
        keepers += [region] if region.run == 1 else []
    else:
        result = compute()
    for region in keepers:
        region._results.append(result)
    return result


def to_be_repeated() -> bool:
    """Return True if this run will be repeated, even if it has no gradients itself."""
    return any(region.run == 1 for region in _regions())


_UNEQUAL = "it must call the same layers in the same order as the forward pass"
_local = threading.local()  # a backward pass may run in another thread than the forward pass


def _regions() -> list[Recomputed[..., Any]]:
    """The wrappers this thread is in, innermost last."""
    if not hasattr(_local, "regions"):
        _local.regions = []
    return _local.regions
