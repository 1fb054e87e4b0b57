"""Activation recomputation that does not repeat attention (DistFlashAttn, arXiv 2310.03294, section 3.3).

    layers = Recomputed(layers)
    layers(x)    # forward; activations are dropped, but ``once`` keeps its results
    layers(x)    # recomputation, in the backward: ``once`` returns them in the same order

Wrap the checkpointed function anew for each call:
``torch.utils.checkpoint.checkpoint(Recomputed(layers), x, use_reentrant=False)``. Results belong to the wrapper, so
micro-batches cannot mix them up and they are freed with it. Outside of wrappers nothing is kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

_FORWARD, _RECOMPUTATION = 1, 2


class Recomputed[**P, R]:
    """A function run forward and again in the backward. A third run computes everything anew."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self._run = 0
        self._results: deque[Any] = deque()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self._run += 1
        regions = _regions()
        regions.append(self)
        try:
            found = self._function(*args, **kwargs)
        finally:
            regions.pop()
        if self._run == _RECOMPUTATION and self._results:
            raise RuntimeError(f"recomputation left {len(self._results)} attention results unused: {_UNEQUAL}")
        return found

    @property
    def keeps(self) -> bool:
        """Whether this run will be repeated."""
        return self._run == _FORWARD

    @property
    def repeats(self) -> bool:
        """Whether this run is the repetition."""
        return self._run == _RECOMPUTATION

    def keep(self, result: object) -> None:
        self._results.append(result)

    def take(self) -> Any:
        """The next result, which is no longer kept."""
        if not self._results:
            raise RuntimeError(f"recomputation requested more attention results than were kept: {_UNEQUAL}")
        return self._results.popleft()


def once[T](compute: Callable[[], T]) -> T:
    """The result of ``compute``, which is not called in a recomputation.

    In nested wrappers, the innermost one that is being repeated has the result, and those inside it keep it.
    """
    keepers = []
    for region in reversed(_regions()):
        if region.repeats:
            found: T = region.take()
            break
        keepers += [region] if region.keeps else []
    else:
        found = compute()
    for region in keepers:
        region.keep(found)
    return found


def to_be_repeated() -> bool:
    """Whether this run will be repeated, even if it has no gradients itself."""
    return any(region.keeps for region in _regions())


_UNEQUAL = "it must call the same layers in the same order as the forward pass"
_local = threading.local()  # a backward may run in another thread than the forward


def _regions() -> list[Recomputed[..., Any]]:
    """The wrappers this thread is in, innermost last."""
    if not hasattr(_local, "regions"):
        _local.regions = []
    return _local.regions
