"""Does Triton's interpreter work with the NumPy that is installed? Found by running a kernel, not by version."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

import triton


@triton.jit
def _count(n):
    for _ in range(n):  # a bound that is known in the kernel only, as in all attention kernels
        pass


@cache
def broken() -> str | None:
    """Why kernels cannot be interpreted, and the remedy; None if they can. Call it under ``TRITON_INTERPRET=1`` only.

    Triton up to 3.6 converts arrays of one element to Python's integers, which NumPy 2.4 and later refuse.
    """
    try:
        _count[(1,)](2)
    except Exception as error:  # of Triton's class for whatever NumPy raised
        return (
            f"the interpreter of Triton {triton.__version__} does not work with NumPy {version('numpy')} ({error}); "
            'pip install "numpy<2.4", or a newer Triton'
        )
    return None
