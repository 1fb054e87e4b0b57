"""Threads beside the main one, on its CUDA device.

CUDA starts every thread on device 0. The first call of a thread that has not set its device opens a context there, half
a gigabyte that each rank of a host would take from GPU 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def start[**P](target: Callable[P, object], name: str, *args: P.args, **named: P.kwargs) -> threading.Thread:
    """Start a daemon thread that calls ``target(*args, **named)`` on the caller's CUDA device."""
    thread = threading.Thread(target=keeping_device(target), name=name, args=args, kwargs=named, daemon=True)
    thread.start()
    return thread


def keeping_device[**P, T](target: Callable[P, T]) -> Callable[P, T]:
    """Make any thread that calls ``target`` do so on the CUDA device that is the caller's now.

    Does not initialize CUDA in a process that has not used it.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(*args: P.args, **named: P.kwargs) -> T:
        if device is not None:
            torch.cuda.set_device(device)
        return target(*args, **named)

    return run
