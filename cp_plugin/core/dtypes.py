"""In which dtype partial results are summed."""

from __future__ import annotations

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
