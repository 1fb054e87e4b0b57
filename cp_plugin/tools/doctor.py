"""``cp-plugin doctor``: installed libraries, and one tile of every kernel on every device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import metadata
from itertools import product, starmap
from typing import Annotated

import torch
import typer
from rich.console import Console

from cp_plugin.engine.attention import calls
from cp_plugin.engine.common.versions import MEGATRON_RANGE, TORCH_MINIMUM, megatron_supported, torch_supported
from cp_plugin.engine.core.dtypes import dtype_name
from cp_plugin.engine.core.mask import CAUSAL
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import CallInfo, Problem
from cp_plugin.engine.kernels import backends, blocks
from cp_plugin.engine.kernels.backends import AnyBackend
from cp_plugin.testing import oracle
from cp_plugin.tools.output import new_console, print_lines, print_table, print_verdict

_OPTIONAL = {
    "transformer-engine": "FP8 and fused layers on CUDA; ci/gpu/build_te.sh, or pip install 'cp-plugin[te]'",
    "flash-attn": "FlashAttention-2 on CUDA; pip install 'cp-plugin[flash]' (takes hours to build)",
    "flash_attn_3": "FlashAttention-3 on Hopper; build hopper/ of github.com/Dao-AILab/flash-attention",
    "flash-attn-4": "FlashAttention-4 on Blackwell; pip install --pre flash-attn-4",
    "triton": "tile kernels on CUDA; comes with torch, or pip install 'cp-plugin[triton]'",
    "nvidia-modelopt": "quantisation; pip install 'cp-plugin[modelopt]'",
    "megatron-bridge": "NeMo; pip install 'cp-plugin[nemo]'",
    "matplotlib": "plots; pip install 'cp-plugin[plot]'",
}
_APEX_ADVICE = (
    "NVIDIA Apex speeds up norms and optimizers. Build it from github.com/NVIDIA/apex; "
    "never `pip install apex`, which is an unrelated project"
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A library that the plugin can use, or one tile of one kernel, forward and backward, against float64."""

    name: str
    which: str
    """The version of a library; the device and dtype of a tile."""
    result: str = ""
    """What to do about a library; what a tile gave."""
    works: bool | None = True
    """None: not installed, or not for this device or dtype."""
    needed: bool = True
    """Whether the plugin cannot work without it, ``auto`` chooses it here, or others are compared with it."""

    @property
    def ok(self) -> bool:
        return self.works is not False or not self.needed


def show(console: Console, *, everything: bool) -> bool:
    """Print the findings; return whether everything required works here.

    everything: list unavailable libraries and kernels in full, not in a line.
    """
    facts = [*library_checks(), *kernel_checks()]
    rows = [
        ((fact.name, fact.which, fact.result), "red" if fact.works is False else "")
        for fact in facts
        if everything or fact.works is not None
    ]
    print_table(console, "Libraries, and one tile of each attention kernel", ("what", "here", "result"), rows)
    shown = {cells[0] for cells, _ in rows}
    if idle := [name for name in dict.fromkeys(fact.name for fact in facts) if name not in shown]:
        where = "not here" if torch.cuda.is_available() else "not here, without a GPU"
        print_lines(console, f"{where}: {', '.join(idle)}; --all shows why, and how to get them")
    if spare := dict.fromkeys(fact.name for fact in facts if fact.works is False and fact.ok):
        print_lines(console, f"broken, but never chosen automatically: {', '.join(spare)}", style="bold yellow")
    broken = dict.fromkeys(fact.name for fact in facts if not fact.ok)
    print_verdict(not broken, ", ".join(broken) or "everything required works here", console)
    return not broken


def library_checks() -> list[Fact]:
    """Check all libraries that the plugin can use, required ones first."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    shown = f"{torch.__version__}, {devices} CUDA device{'' if devices == 1 else 's'}"
    torch_works, megatron = torch_supported(torch.__version__), _version("megatron-core")
    megatron_works = megatron is not None and megatron_supported(megatron)
    wanted = f"megatron-core {MEGATRON_RANGE}: pip install 'megatron-core{MEGATRON_RANGE}'"
    return [
        Fact("torch", shown, "" if torch_works else f"needs torch {TORCH_MINIMUM} or newer", torch_works),
        Fact("megatron-core", megatron or "no", "" if megatron_works else f"needs {wanted}", megatron_works),
        *starmap(_optional, _OPTIONAL.items()),
        _apex(),
    ]


def kernel_checks() -> list[Fact]:
    """Run one causal tile with grouped heads through every backend that claims it, on every device and dtype."""
    names = [name for name in backends.names() if name != "auto"]
    devices = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])
    every = product(devices, names, (torch.float32, torch.bfloat16, torch.float16))
    return [_run_tile(backends.get(name), device, dtype) for device, name, dtype in every]


def _optional(name: str, advice: str) -> Fact:
    version = _version(name)
    return Fact(name, "no", f"optional: {advice}", None) if version is None else Fact(name, version)


def _apex() -> Fact:
    fact = replace(_optional("apex", _APEX_ADVICE), name="NVIDIA Apex")
    if fact.works is None or any(file.match("apex/normalization/*") for file in metadata.files("apex") or ()):
        return fact
    advice = "this is PyPI's unrelated `apex`, which Megatron would mistake for NVIDIA's: pip uninstall apex"
    return replace(fact, which=f"WRONG: {fact.which}", result=advice, works=False)


_ROUNDING = 0.2
"""Relative error of kernels that round to float8: gradients keep two bits of mantissa there."""


def _run_tile(backend: AnyBackend, device: torch.device, dtype: torch.dtype) -> Fact:
    said = backends.Traits.from_backend(backend)
    problem = Problem(size=1, heads=4, kv_heads=2, head_dim=64, seq_length=128, dtype=dtype)
    chosen = blocks.choose(Options(), Problem(size=1, head_dim=64, dtype=dtype), device).backends
    libraries = ", ".join(f"{name} {_version(name) or 'not installed'}" for name in said.packages)

    def fact(result: str, works: bool | None) -> Fact:
        result += f" ({libraries})" if libraries else ""
        needed = backend.name in ("reference", *chosen)
        return Fact(backend.name, f"{device.type} {dtype_name(dtype)}", result, works, needed)

    reason = backend.unsupported(CallInfo(device, dtype, 64, 64))
    if reason is not None:
        return fact(f"not here: {reason}", None)
    case = oracle.make_case(problem)
    try:
        kernel = blocks.kernel(backend, problem, device, auto=False)
        got = calls.call_kernel(kernel, tuple(x.to(device) for x in case.inputs[:4]), CAUSAL)
    except Exception as failure:  # a kernel of another library may raise anything
        return fact(f"fails: {type(failure).__name__}: {failure}", False)
    error = max(oracle.relative_errors(got, case.want).values())
    tolerance = max(8 * torch.finfo(dtype).eps, _ROUNDING if said.in_fp8 else 0.0)
    if error <= tolerance:
        return fact(f"works, relative error {error:.1e}", True)
    return fact(f"WRONG: relative error {error:.1e}, not {tolerance:.1e}", False)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def doctor(
    everything: Annotated[
        bool, typer.Option("--all", help="also list libraries and kernels that are not available here")
    ] = False,
) -> None:
    """Show what is installed, which attention kernels work here, and how to get what is missing."""
    if not show(new_console(), everything=everything):
        raise typer.Exit(1)
