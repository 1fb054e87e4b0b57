"""Accumulation dtype and dtype names."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """The name in files, flags and messages: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
