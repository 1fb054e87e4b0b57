"""What is known of a run when its patches are chosen: the plugin's settings, Megatron's arguments, the model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cp_plugin.megatron.flags.args import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run."""

    settings: Settings
    args: argparse.Namespace | None = None
    """Validated; None: unknown, so that everything may be needed."""

    built: Sequence[Any] = ()
    """Models and their configurations, once a script has built them: by what it sets without a flag."""

    def has(self, *names: str) -> bool:
        """Whether any of these arguments, or fields of a built model, is set, or may be."""
        return self.args is None or any(getattr(one, name, None) for one in (self.args, *self.built) for name in names)

    def is_compared(self) -> bool:
        """Return True if steps on N ranks are compared with those on one, by a provider's attention or Megatron's."""
        return self.settings.active or self.settings.of_stock

    @property
    def pattern(self) -> str:
        """The pattern of a hybrid model; empty for other models."""
        names = ("hybrid_layer_pattern", "hybrid_override_pattern")
        patterns = (getattr(one, name, None) for one in (self.args, *self.built) for name in names)
        return next((found for found in patterns if found), "")

    @property
    def hybrid(self) -> bool:
        return bool(self.pattern)
