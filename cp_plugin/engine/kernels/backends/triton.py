"""The plugin's Triton kernels (``cp_kernels``): a block in one launch, for any positions and mask.

bfloat16, float16 and float32, head sizes up to 256, also different ones for keys and values.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import ClassVar

import torch

from cp_plugin.engine.core.block import Block
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.core.values import NO_SUMS, Gradients, KeyValues, Partial, Queries, Sums
from cp_plugin.engine.kernels.merge import add_sums

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LARGEST = 256


@dataclass(frozen=True, slots=True)
class Triton:
    """Blocks by positions; see ``cp_kernels.visible``."""

    name: str = "triton"
    packages: ClassVar = ("triton",)
    caps: ClassVar = True

    def unsupported(self, call: CallInfo) -> str | None:
        for module, advice in (
            ("triton", "pip install triton"),
            ("cp_kernels", "it is part of cp-plugin: reinstall it"),
        ):
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed ({advice})"
        if call.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "Triton's kernels run on CUDA devices; on the CPU only for tests, under TRITON_INTERPRET=1"
        if call.device.type not in ("cpu", "cuda"):
            return f"Triton's kernels do not run on {call.device.type}"
        if call.device.type == "cuda" and torch.cuda.get_device_capability(call.device) < (8, 0):
            return "the kernels need a GPU of compute capability 8.0 (Ampere) or newer"
        if call.dtype not in _DTYPES:
            return f"the kernels take bfloat16, float16 and float32, not {call.dtype}"
        if max(call.head_dim, call.v_head_dim) > _LARGEST:
            return f"the kernels take head sizes up to {_LARGEST}, not {max(call.head_dim, call.v_head_dim)}"
        return None

    def forward(self, queries: Queries, kv: KeyValues, block: Block, onto: Partial | None = None) -> Partial:
        from cp_kernels.forward import forward

        rows, keys, mask, scores = block
        return Partial(*forward(queries.q, kv.k, kv.v, rows, keys, _view(mask), scores.scale, onto, scores.softcap))

    def backward(self, queries: Queries, kv: KeyValues, block: Block, onto: Sums = NO_SUMS) -> Gradients:
        from cp_kernels.backward import backward

        (q, dout, lse, delta), (rows, keys, mask, scores) = queries.tensors, block
        grads = backward(dout, q, kv.k, kv.v, lse, delta, rows, keys, _view(mask), *scores)
        return add_sums(onto, Gradients(*grads))


def _view(mask: Mask) -> tuple[int | None, int | None, tuple[int, ...]]:
    from cp_kernels.visible import View

    assert not mask.stops, "a tree is taken level by level"
    return View(mask.left, mask.right, mask.documents)


BACKEND = Triton()
