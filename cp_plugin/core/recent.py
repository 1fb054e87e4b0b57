"""A bounded memory of what was made last, for plans and tables that are the same call after call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable


class Recent[K: Hashable, V]:
    """``key -> value``, of the keys that were asked for last. Several threads may ask."""

    def __init__(self, most: int, weight: Callable[[V], int] = lambda value: 1) -> None:
        """
        Args:
            most: what the values may weigh together; the last one is kept, whatever it weighs.
            weight: of a value, such as its bytes; default: 1, which makes ``most`` a number of values.
        """
        self._most, self._weight = most, weight
        self._found: dict[K, V] = {}
        self._total = 0
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of the key, made where it is not known (any more)."""
        with self._lock:
            if key in self._found:
                value = self._found[key] = self._found.pop(key)  # the last one asked for is the last to go
                return value
        value = make()
        with self._lock:
            self._total += self._weight(value) - (self._weight(self._found.pop(key)) if key in self._found else 0)
            self._found[key] = value
            while self._total > self._most and len(self._found) > 1:
                self._total -= self._weight(self._found.pop(next(iter(self._found))))
        return value

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._found.clear()
            self._total = 0

    def __len__(self) -> int:
        return len(self._found)
