"""``cp-plugin doctor``: installed libraries, one tile of every kernel on every device, and the choices of ``auto``.

With ``--megatron DIR``: what the plugin would replace in a Megatron, and whether it is as needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from itertools import product, starmap
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console

from cp_plugin.attention import calls
from cp_plugin.cli import flags, output
from cp_plugin.cli.terminal import new_console, print_lines, print_table, print_verdict
from cp_plugin.common.versions import MEGATRON_RANGE, TORCH_MINIMUM, megatron_supported, torch_supported
from cp_plugin.core.dtypes import dtype_name
from cp_plugin.core.mask import CAUSAL
from cp_plugin.core.options import Options
from cp_plugin.core.problem import CallInfo, Problem
from cp_plugin.kernels import backends, blocks
from cp_plugin.kernels.backends import AnyBackend
from cp_plugin.testing import oracle

_APEX_ADVICE = (
    "optional: NVIDIA Apex speeds up norms and optimizers. Build it from github.com/NVIDIA/apex; "
    "never `pip install apex`, which is an unrelated project"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryCheck:
    """One library; ``ok`` is False only if the plugin cannot work."""

    name: str
    found: str
    advice: str
    ok: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCheck:
    """One tile of one kernel, forward and backward, compared with the oracle in float64."""

    backend: str
    library: str
    """Its packages with their installed versions."""
    device: str
    dtype: str
    result: str
    works: bool | None
    """None: not installed, or not for this device or dtype; the result says which."""
    needed: bool
    """Whether ``auto`` chooses it here, or others are compared with it."""

    @property
    def ok(self) -> bool:
        return self.works is not False or not self.needed


class AutoChoice(NamedTuple):
    """The choice of ``--cp-backend auto`` on a device, for bfloat16."""

    device: str
    head_sizes: str
    """Of queries and keys; ``/`` of values, if different."""
    backend: str
    why: str


def show(console: Console, *, everything: bool) -> bool:
    """Print the findings; return whether everything required works here.

    everything: list unavailable libraries and kernels in full, not in a line each.
    """
    libraries, kernels = library_checks(), kernel_checks()
    found = [check for check in libraries if everything or check.found != "no" or not check.ok]
    rows = [((check.name, check.found, check.advice), "" if check.ok else "red") for check in found]
    print_table(console, "Libraries", ("library", "found", "what to do"), rows)
    run = [k for k in kernels if everything or k.works is not None]
    tiles = [((k.backend, k.library, k.device, k.dtype, k.result), "red" if k.works is False else "") for k in run]
    console.print()
    title = "Attention kernels (--cp-backend), one tile each"
    print_table(console, title, ("kernel", "library", "device", "dtype", "one tile"), tiles)
    console.print()
    choices = [(choice, "") for choice in auto_choices()]
    title = "What --cp-backend auto chooses here, for bfloat16"
    print_table(console, title, ("device", "head size", "auto", "why"), choices)
    if not everything:
        absent = [check.name for check in libraries if check not in found]
        idle = [name for name in dict.fromkeys(k.backend for k in kernels) if name not in {k.backend for k in run}]
        where = "" if torch.cuda.is_available() else "no GPU: "
        if absent:
            print_lines(console, f"optional, and not installed: {', '.join(absent)}; --all shows how to get them")
        if idle:
            print_lines(console, f"{where}{', '.join(idle)} cannot run here; --all shows why")
    if spare := dict.fromkeys(k.backend for k in kernels if k.works is False and k.ok):
        print_lines(console, f"broken, but never chosen automatically: {', '.join(spare)}", style="bold yellow")
    broken = [c.name for c in libraries if not c.ok] + [k.backend for k in kernels if not k.ok]
    print_verdict(not broken, ", ".join(broken) or "everything required works here", console)
    return not broken


def library_checks() -> list[LibraryCheck]:
    """All libraries that the plugin can use, required ones first."""
    return [_torch(), _megatron(), *starmap(_library, _OPTIONAL.items()), _apex()]


def kernel_checks() -> list[KernelCheck]:
    """Run one causal tile with grouped heads through every backend that claims it, on every device and dtype."""
    names = [name for name in backends.names() if name != "auto"]
    every = product(_devices(), names, (torch.float32, torch.bfloat16, torch.float16))
    return [_run_tile(backends.get(name), device, dtype) for device, name, dtype in every]


def auto_choices() -> list[AutoChoice]:
    """The choices of ``auto`` for the usual head sizes on every device, with reasons."""
    found = []
    for device in _devices():
        for size, v_size in ((64, 64), (128, 128), (192, 128), (256, 256)):
            chosen = _auto(device, torch.bfloat16, size, v_size)
            sizes = f"{size}" if v_size == size else f"{size}/{v_size}"
            found.append(AutoChoice(device.type, sizes, chosen.name, chosen.why))
    return found


def _auto(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> blocks.Chosen:
    problem = Problem(size=1, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)
    return blocks.choose(Options(), problem, device)


def _devices() -> list[torch.device]:
    return [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])


_OPTIONAL = {
    "transformer-engine": "optional: FP8 and fused layers on CUDA; ci/gpu/build_te.sh, or pip install 'cp-plugin[te]'",
    "flash-attn": "optional: FlashAttention-2 on CUDA; pip install 'cp-plugin[flash]' (takes hours to build)",
    "flash_attn_3": "optional: FlashAttention-3 on Hopper; build hopper/ of github.com/Dao-AILab/flash-attention",
    "flash-attn-4": "optional: FlashAttention-4 on Blackwell; pip install --pre flash-attn-4",
    "triton": "optional: tile kernels on CUDA; comes with torch, or pip install 'cp-plugin[triton]'",
    "nvidia-modelopt": "optional: quantisation; pip install 'cp-plugin[modelopt]'",
    "megatron-bridge": "optional: NeMo; pip install 'cp-plugin[nemo]'",
    "matplotlib": "optional: plots; pip install 'cp-plugin[plot]'",
}


def _library(name: str, advice: str, *, found: str | None = None, ok: bool = True) -> LibraryCheck:
    """The check of a library, with advice if it is missing or not ok."""
    found = found or _version(name)
    return LibraryCheck(name=name, found=found or "no", advice="" if found and ok else advice, ok=ok)


def _torch() -> LibraryCheck:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = f"{torch.__version__}, {devices} CUDA device{'' if devices == 1 else 's'}"
    return _library(
        "torch", f"needs torch {TORCH_MINIMUM} or newer", found=found, ok=torch_supported(torch.__version__)
    )


def _megatron() -> LibraryCheck:
    version = _version("megatron-core")
    advice = f"needs megatron-core {MEGATRON_RANGE}: pip install 'megatron-core{MEGATRON_RANGE}'"
    return _library("megatron-core", advice, ok=version is not None and megatron_supported(version))


def _apex() -> LibraryCheck:
    found = _distribution("apex")
    if found is None:
        return LibraryCheck(name="NVIDIA Apex", found="no", advice=_APEX_ADVICE)
    files = {str(f).split("/")[1] for f in found.files or () if str(f).startswith("apex/") and "/" in str(f)}
    if "normalization" in files:
        return LibraryCheck(name="NVIDIA Apex", found=found.version, advice="")
    advice = "this is PyPI's unrelated `apex`, which Megatron would mistake for NVIDIA's: pip uninstall apex"
    return LibraryCheck(name="NVIDIA Apex", found=f"WRONG: {found.version}", advice=advice, ok=False)


_ROUNDING = 0.2
"""Relative error of kernels that round to float8: gradients keep two bits of mantissa there."""


def _run_tile(backend: AnyBackend, device: torch.device, dtype: torch.dtype) -> KernelCheck:
    said = backends.about(backend)
    where = {
        "backend": backend.name,
        "library": ", ".join(f"{name} {_version(name) or 'not installed'}" for name in said.packages),
        "device": device.type,
        "dtype": dtype_name(dtype),
        "needed": backend.name in ("reference", *_auto(device, dtype, 64, 64).backends),
    }
    reason = backend.unsupported(CallInfo(device, dtype, 64, 64))
    if reason is not None:
        return KernelCheck(**where, result=f"cannot run here: {reason}", works=None)
    case = oracle.make_case(Problem(size=1, heads=4, kv_heads=2, head_dim=64, seq_length=128, dtype=dtype))
    try:
        kernel = blocks.kernel(backend, case.problem, device, auto=False)
        got = calls.of_kernel(kernel, tuple(x.to(device) for x in case.inputs[:4]), CAUSAL)
    except Exception as failure:  # a kernel of another library may raise anything
        return KernelCheck(**where, result=f"fails: {type(failure).__name__}: {failure}", works=False)
    error = max(oracle.relative_errors(got, case.want).values())
    tolerance = max(8 * torch.finfo(dtype).eps, _ROUNDING if said.in_fp8 else 0.0)
    if error <= tolerance:
        return KernelCheck(**where, result=f"works, relative error {error:.1e}", works=True)
    wrong = f"WRONG: relative error {error:.1e}, not {tolerance:.1e}"
    return KernelCheck(**where, result=wrong, works=False)


def _version(name: str) -> str | None:
    found = _distribution(name)
    return found.version if found is not None else None


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


_STATES = {"broken": "red", "absent": "dim", "checked": ""}


def examine(folder: str, words: Sequence[str]) -> dict[str, Any]:
    """What ``megatron.patches.doctor`` finds, in a process of its own. ValueError for a folder without Megatron, an
    unsupported version, or wrong flags; and if the process fails."""
    command = [sys.executable, "-m", "cp_plugin.megatron.patches.doctor", folder, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        found: dict[str, Any] = json.loads(last)
    except json.JSONDecodeError:
        why = (done.stderr.strip() or "it printed nothing").rpartition("\n")[2]
        raise ValueError(f"--megatron {folder}: Megatron could not be examined: {why}") from None
    if "error" in found:
        raise ValueError(found["error"])
    return found


def stops(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The symbols for which a run would not start."""
    return [one for one in found["symbols"] if one["state"] == "broken" and one["needed"] and not one["late"]]


def show_megatron(console: Console, found: dict[str, Any], folder: str) -> None:
    """Print the table, what its words mean, every broken contract, and whether a run would start."""
    rows = [
        ((one["state"], one["contract"], one["symbol"], one["for"]), _STATES[one["state"]]) for one in found["symbols"]
    ]
    title = f"megatron-core {found['version']} in {folder}: what a run would replace"
    print_table(console, title, ("state", "contract", "symbol", "what for"), rows)
    counts = Counter(one["state"] for one in found["symbols"])
    for state, meaning in (
        ("checked", "what the plugin relies on is there"),
        ("absent", "not in this version, and not needed"),
    ):
        if counts[state]:
            print_lines(console, f"{state}: {counts[state]}, {meaning}")
    broken = [one for one in found["symbols"] if one["state"] == "broken"]
    for one in broken:
        print_lines(console, "", *one["broken"].splitlines())
    stopping = stops(found)
    others = [one["for"] for one in broken if one not in stopping]
    verdict = f"{len(stopping)} broken: a run would not start" if stopping else "a run would start"
    print_verdict(not stopping, verdict + "".join(f"; broken: {what}" for what in others), console)


def doctor(
    everything: Annotated[
        bool, typer.Option("--all", help="also list libraries and kernels that are not available here")
    ] = False,
    megatron: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="examine this Megatron-LM checkout, or unpacked wheel, instead"),
    ] = None,
    as_json: output.AsJson = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORDS", help="with --megatron, after --: the flags of a run; default: examine everything"
        ),
    ] = None,
) -> None:
    """Show what is installed, which attention kernels work here, and how to get what is missing."""
    with flags.errors_in_one_line(translated=False):
        if megatron is None and (words or as_json):
            given = " ".join([*(words or []), *(["--json"] if as_json else [])])
            raise ValueError(f"{given} has no effect without --megatron DIR: add it, or leave this out")
        if megatron is not None and everything:
            raise ValueError("--all has no effect with --megatron: leave it out")
        found = {} if megatron is None else examine(megatron, words or [])
    console = new_console()
    if megatron is None:
        works = show(console, everything=everything)
    else:
        output.show(as_json, lambda: found, lambda: show_megatron(console, found, megatron))
        works = not stops(found)
    if not works:
        raise typer.Exit(1)
