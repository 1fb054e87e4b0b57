"""Replacements for compiled kernels on ``FakeCuda``: real signatures, and bodies that check shapes and make results.

ours          only the launch is replaced; tables, checks and strides are real
flash-attn    version 2 or 3
TE            ``tests/equipment/libraries/fake_te.py``, with float8 tensors and quantisers
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import fake_fla
import fake_te
import pytest
import torch
from equipment.cuda.device import CUDA, FakeCuda, MixedDevicesError
from equipment.cuda.ops import all_tensors, place
from fake_flash import FA2, FA3_LATER
from library_signatures import function, put
from torch import Tensor

from cp_plugin.engine import linear
from cp_plugin.engine.kernels import backends
from cp_plugin.engine.kernels.backends import te
from cp_plugin.engine.linear import fla

Call = dict[str, Any]

FLASH = {2: ("flash_attn.flash_attn_interface", *FA2), 3: ("flash_attn_interface", *FA3_LATER)}
"""Version -> module, and recorded parameters of its forward and backward."""


def install(
    patch: pytest.MonkeyPatch, device: FakeCuda, flash: int | None = 3, te: bool = True, triton: str = "3.7.1"
) -> None:
    """flash: the generation of flash-attn; None: none."""
    install_ours(patch, device)
    install_flash(patch, device, flash)
    install_te(patch, device)
    if not te:
        patch.setitem(sys.modules, "transformer_engine", None)
    patch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    patch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    install_fla(patch, device, triton)
    forget()


def install_ours(patch: pytest.MonkeyPatch, device: FakeCuda) -> None:
    """Replace the launch of our Triton kernels."""
    import cp_kernels

    for kernels in pkgutil.iter_modules(cp_kernels.__path__, "cp_kernels."):
        module = importlib.import_module(kernels.name)
        for name, value in list(vars(module).items()):
            if type(value).__name__ in ("JITFunction", "InterpretedFunction") and value.fn.__module__ == kernels.name:
                patch.setattr(module, name, _Kernel(device, name, value.arg_names))


class _Kernel:
    """A kernel that checks and counts its launches."""

    def __init__(self, device: FakeCuda, name: str, parameters: list[str]) -> None:
        self._device, self._name, self._parameters = device, name, parameters

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert grid and all(isinstance(n, int) and n > 0 for n in grid), f"{self._name} is launched with {grid}"

        def launch(*args: Any, **named: Any) -> None:
            call = dict(zip(self._parameters, args, strict=False)) | named
            missing = [name for name in self._parameters if name not in call]
            assert not missing, f"{self._name} is launched without {missing}"
            tensors = all_tensors(call)
            for x in tensors:
                if x.device != CUDA:
                    raise MixedDevicesError(f"{self._name} at {place()}: a CPU tensor {tuple(x.shape)}")
            if {"q", "k", "v", "blocks"} <= call.keys():
                _check_attention(call)
            self._device.ops.launch(f"triton {self._name}", tensors, ())

        return launch


def _check_attention(call: Call) -> None:
    """Check results and tables against q, k and v."""
    q, k, v = call["q"], call["k"], call["v"]
    rows = q.shape[:3]
    shapes = {"out": (*rows, v.size(3)), "dout": (*rows, v.size(3)), "lse": rows, "delta": rows}
    shapes |= {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    for name, shape in shapes.items():
        assert name not in call or call[name].shape == shape, f"{name} {tuple(call[name].shape)}, not {shape}"
    assert call.get("lse") is None or call["lse"].dtype == torch.float32
    tokens = k.size(0) if "dk" in call else q.size(0)
    assert call["first"].shape == call["last"].shape == (tokens,) and call["blocks"].size(1) == 2
    assert call["runs"].size(1) == 4
    assert {call[name].dtype for name in ("first", "last", "blocks", "runs")} == {torch.int32}


def install_flash(patch: pytest.MonkeyPatch, device: FakeCuda, generation: int | None) -> None:
    """Install one generation of flash-attn, or none."""
    for other in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn_config"):
        patch.setitem(sys.modules, other, None)
    if generation is None:
        return
    name, forward, backward = FLASH[generation]

    def attend(call: Call) -> tuple[Any, ...]:
        q, k, v = _batch_first(call, "q k v")
        with device.library(f"{name} forward", q, k, v) as made:
            made += [q.new_empty((*q.shape[:3], v.size(3)))]
            made += [q.new_empty((q.size(0), q.size(2), q.size(1)), dtype=torch.float32)]
        return (*made, None, None)

    def gradients(call: Call) -> Any:
        dout, q, k, v, out = _batch_first(call, "dout q k v out")
        lse, grads = call["softmax_lse"], [call[n] for n in ("dq", "dk", "dv")]
        assert lse.shape == (q.size(0), q.size(2), q.size(1)) and lse.dtype == torch.float32 and lse.is_contiguous()
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape] and out.shape == dout.shape
        with device.library(f"{name} backward", dout, q, k, v, out, lse, *grads) as made:
            made += [lse.new_empty(lse.shape)]
        return made[0]

    put(patch, name.partition(".")[0])
    parts = {"_flash_attn_forward": (forward, attend), "_flash_attn_backward": (backward, gradients)}
    put(patch, name, **{part: function(part, *made) for part, made in parts.items()})


def _batch_first(call: Call, names: str) -> list[Tensor]:
    """``[b, s, h, d]`` with one head size, or a pair that version 3 supports."""
    tensors = [call[name] for name in names.split()]
    sizes = {x.size(3) for x in tensors}
    assert len(sizes) == 1 or (128 < max(sizes) <= 192 and 96 < min(sizes) <= 128), f"head sizes {sizes}"
    assert all(x.stride(3) == 1 and x.device == CUDA and x.dtype == call["q"].dtype for x in tensors)
    return tensors


def install_te(patch: pytest.MonkeyPatch, device: FakeCuda) -> None:
    """Install Transformer Engine with FP8."""

    def attend(call: Call) -> tuple[Any, ...]:
        q, k, v = _dense(call, "q k v")
        device.ops.plan(("te forward", call["attn_mask_type"]), q, k, v)
        with device.library("te forward", q, k, v) as made:
            out = torch.empty((*q.shape[:3], v.size(3)), dtype=call["fake_dtype"], device=q.device)
            made += [out, torch.empty((q.size(1), q.size(2), q.size(0), 1), device=q.device)]
        return out, [made[1], torch.empty(2, dtype=torch.int64, device=q.device)]

    def gradients(call: Call) -> list[Any]:
        q, k, v, out, dout = _dense(call, "q k v o d_o")
        statistics = call["aux_ctx_tensors"][0]
        assert statistics.shape == (q.size(1), q.size(2), q.size(0), 1) and statistics.is_contiguous()
        assert statistics.dtype == torch.float32 and out.shape == dout.shape
        device.ops.plan(("te backward", call["attn_mask_type"]), q, k, v, others=(out, dout))
        with device.library("te backward", dout, q, k, v, out, statistics) as made:
            made += [torch.empty(x.shape, dtype=call["fake_dtype"], device=q.device) for x in (q, k, v)]
        return [*made, None, None]

    patch.setattr(fake_te, "forward", attend)
    patch.setattr(fake_te, "backward", gradients)
    fake_te.install(patch)
    constants = sys.modules["transformer_engine.pytorch.constants"]
    constants.DType = type("DType", (), {"kFloat8E4M3": "e4m3", "kFloat8E5M2": "e5m2"})  # type: ignore[attr-defined]
    put(patch, "transformer_engine.pytorch.tensor.float8_tensor", Float8Quantizer=_Quantizer)
    patch.setattr(sys.modules["transformer_engine_torch"], "get_fused_attn_backend", _any_kernel)
    patch.setattr(te, "_generator", lambda device: torch.Generator())


def _any_kernel(call: Call) -> tuple[fake_te.Kinds, str]:
    fp8 = call["qkv_dtype"] in ("e4m3", "e5m2")
    return (fake_te.Kinds.FP8 if fp8 else fake_te.Kinds.F16_arbitrary_seqlen), ""


def _dense(call: Call, names: str) -> list[Tensor]:
    """These tensors, of which some may be in float8; their lengths are as the call says."""
    tensors = [x.data if isinstance(x, _Float8Tensor) else x for x in map(call.__getitem__, names.split())]
    assert all(x.is_contiguous() and x.device == CUDA for x in tensors), f"{names} must be dense, on the device"
    for side, x in zip(("q", "kv"), tensors, strict=False):
        offsets = call[f"cu_seqlens_{side}"]
        assert call[f"max_seqlen_{side}"] == x.size(0) and offsets.dtype == torch.int32 and offsets.device == CUDA
        assert offsets.shape == (x.size(1) + 1,)
    return tensors


class _Quantizer:
    """``Float8Quantizer``."""

    def __init__(self, scale: Tensor, amax: Tensor, fp8_dtype: Any, *, rowwise: bool, columnwise: bool) -> None:
        assert scale.shape == amax.shape == (1,) and scale.device == amax.device == CUDA
        self.scale, self.amax = scale, amax

    def create_tensor_from_data(self, data: Tensor, fake_dtype: torch.dtype) -> _Float8Tensor:
        assert data.dtype == torch.uint8
        return _Float8Tensor(data)


class _Float8Tensor(NamedTuple):
    data: Tensor


def install_fla(patch: pytest.MonkeyPatch, device: FakeCuda, triton: str) -> None:
    """Install flash-linear-attention, compiled by that version of Triton."""

    def attend(name: str, tensors: dict[str, Tensor | None], wanted: bool) -> tuple[Tensor, Tensor | None]:
        assert all(x is None or x.device == CUDA for x in tensors.values())
        return _Fla.apply(device, name, wanted, *tensors.values())

    fake_fla.install(patch, attend)
    patch.setattr(fla, "triton_version", lambda: triton)


class _Fla(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, device: FakeCuda, name: str, wanted: bool, *call: Tensor | None) -> tuple[Any, ...]:
        ctx.device, ctx.name = device, name
        ctx.save_for_backward(*call)
        q, _, v = call[:3]
        with device.library(f"fla {name} forward", *call) as made:
            made += [torch.empty_like(v)]
            if wanted:
                made += [v.new_empty((v.size(0), v.size(2), q.size(3), v.size(3)), dtype=torch.float32)]
        return made[0], made[1] if wanted else None

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dfinal: Tensor | None) -> tuple[Any, ...]:
        call = ctx.saved_tensors
        with ctx.device.library(f"fla {ctx.name} backward", dout, dfinal, *call) as made:
            grads = [None if x is None else torch.empty_like(x) for x in call]
            made += [x for x in grads if x is not None]
        return None, None, None, *grads


def forget() -> None:
    """Clear the caches of adapters and of our kernels' tables."""
    import cp_kernels

    for package in (backends, cp_kernels, linear):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for value in vars(importlib.import_module(module.name)).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
