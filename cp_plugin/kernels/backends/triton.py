"""The plugin's Triton kernels (``cp_kernels``): a block in one launch, for any positions and mask.

bfloat16, float16 and float32, head sizes up to 256, also different ones for keys and values.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cp_plugin.core.layout import Segments
from cp_plugin.core.mask import Mask

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST = 256


@dataclass(frozen=True, slots=True)
class Triton:
    """Blocks by positions; see ``cp_kernels.visible``."""

    name: str = "triton"
    packages: ClassVar = ("triton",)

    def unsupported(self, device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
        for module, advice in (
            ("triton", "pip install triton"),
            ("cp_kernels", "it is part of cp-plugin: reinstall it"),
        ):
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed ({advice})"
        if device.type == "cpu":
            if os.environ.get("TRITON_INTERPRET") != "1":
                return "Triton's kernels run on CUDA devices; on the CPU only for tests, under TRITON_INTERPRET=1"
            from cp_kernels.interpreter import broken

            if reason := broken():
                return reason
        if device.type not in ("cpu", "cuda"):
            return f"Triton's kernels do not run on {device.type}"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return "the kernels need a GPU of compute capability 8.0 (Ampere) or newer"
        if dtype not in _DTYPES:
            return f"the kernels take bfloat16, float16 and float32, not {dtype}"
        if max(head_dim, v_head_dim) > _LARGEST:
            return f"the kernels take head sizes up to {_LARGEST}, not {max(head_dim, v_head_dim)}"
        return None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Segments,
        keys: Segments,
        mask: Mask,
        scale: float,
        onto: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        from cp_kernels.forward import forward

        return forward(q, k, v, rows, keys, _view(mask), scale, onto)

    def gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        rows: Segments,
        keys: Segments,
        mask: Mask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from cp_kernels.backward import backward

        return backward(dout, q, k, v, lse, delta, rows, keys, _view(mask), scale)


def _view(mask: Mask) -> tuple[int | None, int | None, tuple[int, ...]]:
    from cp_kernels.visible import View

    assert not mask.stops, "a tree is taken level by level"
    return View(mask.left, mask.right, mask.documents)


BACKEND = Triton()
