"""A bounded, thread-safe LRU cache for plans and tables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable


class Recent[K: Hashable, V]:
    """LRU cache ``key -> value``."""

    def __init__(self, most: int, weight: Callable[[V], int] = lambda value: 1) -> None:
        """
        Args:
            most: total weight to keep; the newest value is always kept.
            weight: weight of a value, such as its bytes; default 1.
        """
        self._most, self._weight = most, weight
        self._kept: dict[K, V] = {}
        self._total = 0
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The cached value, built by ``make`` if missing."""
        with self._lock:
            if key in self._kept:
                value = self._kept[key] = self._kept.pop(key)  # most recent goes last
                return value
        value = make()
        with self._lock:
            self._total += self._weight(value) - (self._weight(self._kept.pop(key)) if key in self._kept else 0)
            self._kept[key] = value
            while self._total > self._most and len(self._kept) > 1:
                self._total -= self._weight(self._kept.pop(next(iter(self._kept))))
        return value

    def __len__(self) -> int:
        return len(self._kept)
