"""A training run, as the rules see it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from cp_plugin.core.layout import Layout, get_layout
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.rules.model import packed_by
from cp_plugin.methods import registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a command line asks for."""

    args: argparse.Namespace
    settings: Settings
    version: str
    """Of megatron-core."""
    device: torch.device | None = None
    """None: of another machine."""

    @property
    def asked(self) -> str:
        """How a refusal begins."""
        return f"{self.settings.asked} does not support "

    @property
    def instead(self) -> str:
        """How a refusal ends."""
        return f" (or {self.settings.instead})"

    @property
    def packed(self) -> str:
        """The flags by which batches are packs of documents; empty: they are not."""
        return ", ".join(packed_by(self.args))

    @property
    def layout(self) -> Layout:
        """That of the tokens; while it is open, the one that accepts most lengths."""
        if self.settings.undecided:
            return get_layout(self.settings.options.layout or "contiguous")
        provider, options = self.settings.of(self.settings.kinds[-1])  # one layout serves both kinds
        return registry.layout_for(registry.get(provider), options)
