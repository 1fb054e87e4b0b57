"""What ``cp-plugin doctor`` looks at: installed libraries, and one tile of every kernel on every device."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution

import torch

from cp_plugin import backends
from cp_plugin.dtypes import accumulation_dtype
from cp_plugin.versions import MEGATRON_RANGE, TORCH_MINIMUM, megatron_supported, version_tuple

_APEX_ADVICE = (
    "optional: NVIDIA Apex speeds up norms and optimizers. Build it from github.com/NVIDIA/apex; "
    "never `pip install apex`, which is an unrelated project"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryCheck:
    """One library: ``ok`` is False only where it stops the plugin from working."""

    name: str
    found: str
    advice: str
    ok: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCheck:
    """One tile of one kernel, forward and backward, compared with the reference kernel in float64."""

    backend: str
    device: str
    dtype: str
    result: str
    ok: bool


def library_checks() -> list[LibraryCheck]:
    """Everything the plugin can use, needed libraries first."""
    return [_torch(), _megatron(), *map(_optional, _OPTIONAL), _apex()]


def kernel_checks() -> list[KernelCheck]:
    """Run one causal tile with grouped heads through every backend that claims it, on every device and dtype."""
    devices = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [
        _run_tile(backends.get(name), device, dtype)
        for device in devices
        for name in backends.names()
        if name != "auto"
        for dtype in dtypes
    ]


_OPTIONAL = {
    "transformer-engine": "optional: FP8 and fused layers on CUDA; pip install 'cp-plugin[te]'",
    "flash-attn": "optional: FlashAttention kernels on CUDA; pip install 'cp-plugin[flash]'",
    "triton": "optional: tile kernels on CUDA; comes with torch, or pip install 'cp-plugin[triton]'",
    "nvidia-modelopt": "optional: quantisation; pip install 'cp-plugin[modelopt]'",
    "megatron-bridge": "optional: NeMo; pip install 'cp-plugin[nemo]'",
    "matplotlib": "optional: plots; pip install 'cp-plugin[plot]'",
}


def _optional(name: str) -> LibraryCheck:
    version = _version(name)
    return LibraryCheck(name=name, found=version or "no", advice="" if version else _OPTIONAL[name])


def _torch() -> LibraryCheck:
    ok = version_tuple(torch.__version__) >= version_tuple(TORCH_MINIMUM)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = f"{torch.__version__}, {devices} CUDA device{'' if devices == 1 else 's'}"
    return LibraryCheck(name="torch", found=found, advice="" if ok else f"needs torch {TORCH_MINIMUM} or newer", ok=ok)


def _megatron() -> LibraryCheck:
    version = _version("megatron-core")
    ok = version is not None and megatron_supported(version)
    advice = "" if ok else f"needs megatron-core {MEGATRON_RANGE}: pip install 'megatron-core{MEGATRON_RANGE}'"
    return LibraryCheck(name="megatron-core", found=version or "no", advice=advice, ok=ok)


def _apex() -> LibraryCheck:
    found = _distribution("apex")
    if found is None:
        return LibraryCheck(name="NVIDIA Apex", found="no", advice=_APEX_ADVICE)
    files = {str(f).split("/")[1] for f in found.files or () if str(f).startswith("apex/") and "/" in str(f)}
    if "normalization" in files:
        return LibraryCheck(name="NVIDIA Apex", found=found.version, advice="")
    advice = "this is PyPI's unrelated `apex`, and Megatron will take it for NVIDIA's: pip uninstall apex"
    return LibraryCheck(name="NVIDIA Apex", found=f"WRONG: {found.version}", advice=advice, ok=False)


def _run_tile(backend: backends.Backend, device: torch.device, dtype: torch.dtype) -> KernelCheck:
    where = {"backend": backend.name, "device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    reason = backend.unsupported(device, dtype, 64, 64)
    if reason is not None:
        return KernelCheck(**where, result=f"not here: {reason}", ok=True)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(128, 1, heads, 64, generator=generator).to(device, dtype) for heads in (4, 2, 2, 4))
    try:
        error = _tile_error(backend, q, k, v, dout)
    except (RuntimeError, ValueError, AssertionError) as failure:
        return KernelCheck(**where, result=f"fails: {failure}", ok=False)
    tolerance = 8 * torch.finfo(dtype).eps
    return KernelCheck(**where, result=f"works, relative error {error:.1e}", ok=error <= tolerance)


def _tile_error(
    backend: backends.Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> float:
    """The largest relative error (norm) of out, dq, dk and dv against the reference kernel in float64."""
    got = _forward_backward(backend, q, k, v, dout)
    want = _forward_backward(backends.get("reference"), q.double(), k.double(), v.double(), dout.double())
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))


def _forward_backward(
    backend: backends.Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    scale = q.size(-1) ** -0.5
    out, lse = backend.forward(q, k, v, 0, scale)
    wide = accumulation_dtype(q.dtype)
    delta = (dout.to(wide) * out.to(wide)).sum(-1)
    return out, *backend.backward(dout, q, k, v, lse, backend.row_term(dout, delta), 0, scale)


def _version(name: str) -> str | None:
    found = _distribution(name)
    return found.version if found is not None else None


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None
