"""The machine, the versions, and the kernels that can run here."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from pack import describe
from record import Step

from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.kernels import backends

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("triton", "flash-attn", "flash_attn_3", "transformer-engine", "nvidia-modelopt", "megatron-core", "fla-core"),
    "numpy",
)


def environment(step: Step) -> None:
    step.note(machine=machine(step.smoke), versions=versions(), made=made(), **describe())
    for name in backends.names():
        if name != "auto":
            reason = backends.get(name).unsupported(CallInfo(step.device, torch.bfloat16, 128, 128))
            if reason is not None:
                step.not_run(f"backend {name}", reason)


def machine(smoke: bool) -> dict[str, object]:
    if smoke:
        return {"name": "smoke test on a CPU", "processors": os.cpu_count()}
    gpu = torch.cuda.get_device_properties(0)
    return {
        "name": gpu.name,
        "devices": torch.cuda.device_count(),
        "compute capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "memory": f"{gpu.total_memory / 2**30:.0f} GiB",
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1],
        "processors": os.cpu_count(),
    }


def versions() -> dict[str, str]:
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    known = {"python": platform.python_version(), "torch": torch.__version__}
    known |= {"CUDA": torch.version.cuda or "none", "cuDNN": str(cudnn or "none")}
    for name in PACKAGES:
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            known[name] = "not installed"
    return known


def made() -> dict[str, str]:
    """Date and commit."""
    commit = os.environ.get("COMMIT")  # which plan.py has asked git for
    changed = output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no").strip()
    return {
        "commit": (commit or "not known: no git here, and no COMMIT") + (" and changes on top" if changed else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def output(*command: str) -> str:
    """Output of a command; "" if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    return done.stdout if done.returncode == 0 else ""
