"""Triton kernels on CPU tensors, in Triton's interpreter.

Triton decides when a kernel is defined whether it is compiled or interpreted, and its own functions are defined when it
is imported. So these tests have a process of their own, started with ``TRITON_INTERPRET=1``: see ci/test.sh.
"""

from __future__ import annotations

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def pytest_report_header() -> str:
    """Say what was left out, and how to run it."""
    return "Triton kernels: interpreted" if INTERPRETED else "tests/kernels: left out; they need TRITON_INTERPRET=1"
