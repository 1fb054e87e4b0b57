"""Releases of Megatron-Bridge that the plugin was tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from cp_plugin.common.versions import within

TESTED_RANGE = ">=0.6.2,<0.6.3"


def bridge_version() -> str:
    """The installed release; ValueError if there is none."""
    try:
        return version("megatron-bridge")
    except PackageNotFoundError:
        raise ValueError(
            "cp_plugin.nemo needs megatron-bridge, which is not installed: pip install 'cp-plugin[nemo]'"
        ) from None


def check(found: str, *, allow_untested: bool) -> None:
    """ValueError for an untested release, unless the user allows it."""
    if not allow_untested and not within(found, TESTED_RANGE):
        raise ValueError(
            f"megatron-bridge {found} was not tested with cp_plugin; megatron-bridge{TESTED_RANGE} was: install a "
            "release in that range, or pass allow_untested_bridge=True to apply. (The functions that the plugin "
            "replaces are still compared with their known sources.)"
        )
