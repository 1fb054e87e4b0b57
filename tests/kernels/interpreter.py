"""Triton's interpreter and ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def one_at_a_time(owner: Any, names: tuple[str, ...], patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let these methods run in one thread at a time: the interpreter knows one thread."""
    lock = threading.Lock()

    def locked(call: Callable[..., Any]) -> Callable[..., Any]:
        def locked_call(*args: Any) -> Any:
            with lock:
                return call(*args)

        return locked_call

    for name in names:
        patch(owner, name, locked(getattr(owner, name)))
