"""Supported library versions."""

from __future__ import annotations

import re
from importlib.util import find_spec

MEGATRON_RANGE = ">=0.18,<0.21"
TORCH_MINIMUM = "2.10.0a0"
MODELOPT_MINIMUM = "0.46"
NO_MEGATRON = f"Megatron is not installed: pip install 'megatron-core{MEGATRON_RANGE}'"


def version_tuple(version: str) -> tuple[int, ...]:
    """Leading numbers of a version string: ``"0.19.2+cu13"`` -> ``(0, 19, 2)``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def is_in_range(version: str, supported: str) -> bool:
    """Return True if a version lies in a range such as ``>=0.18,<0.21``."""
    low, high = (version_tuple(bound.lstrip("<>=")) for bound in supported.split(","))
    return low <= version_tuple(version) < high


def megatron_supported(version: str) -> bool:
    """Return True if megatron-core's version lies in ``MEGATRON_RANGE``."""
    return is_in_range(version, MEGATRON_RANGE)


def torch_supported(version: str) -> bool:
    """Return True if torch is ``TORCH_MINIMUM`` or newer."""
    return version_tuple(version) >= version_tuple(TORCH_MINIMUM)


def require_megatron() -> None:
    """Raise ModuleNotFoundError with install instructions if Megatron is missing; imports nothing."""
    try:
        spec = find_spec("megatron")
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise ModuleNotFoundError(NO_MEGATRON, name="megatron")
