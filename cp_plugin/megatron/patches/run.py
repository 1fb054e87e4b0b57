"""What is known of a run when its patches are chosen: the plugin's settings, and Megatron's arguments."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from cp_plugin.megatron.flags.args import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run."""

    settings: Settings
    args: argparse.Namespace | None = None
    """Validated; None: unknown, so that everything may be needed."""

    def has(self, *names: str) -> bool:
        """Whether any of these arguments is set, or may be."""
        return self.args is None or any(getattr(self.args, name, None) for name in names)

    @property
    def pattern(self) -> str:
        """The pattern of a hybrid model; empty for other models."""
        names = ("hybrid_layer_pattern", "hybrid_override_pattern")
        return next((found for name in names if (found := getattr(self.args, name, None))), "")

    @property
    def hybrid(self) -> bool:
        return bool(self.pattern)
