"""A bounded, thread-safe LRU cache for plans and tables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable


class Recent[K: Hashable, V]:
    """LRU cache ``key -> value``."""

    def __init__(self, most: int, weight: Callable[[V], int] = lambda value: 1) -> None:
        """most: total weight to keep, and the newest value in any case; weight: of a value, such as its bytes."""
        self._most, self._weight = most, weight
        self._found: dict[K, V] = {}
        self._total = 0
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The cached value, built by ``make`` if missing."""
        with self._lock:
            if key in self._found:
                value = self._found[key] = self._found.pop(key)  # most recent goes last
                return value
        value = make()
        with self._lock:
            self._total += self._weight(value) - (self._weight(self._found.pop(key)) if key in self._found else 0)
            self._found[key] = value
            while self._total > self._most and len(self._found) > 1:
                self._total -= self._weight(self._found.pop(next(iter(self._found))))
        return value

    def __len__(self) -> int:
        return len(self._found)
