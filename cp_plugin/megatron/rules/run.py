"""The subject of the training rules: parsed arguments, resolved settings, version, device."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from cp_plugin.core.layout import LAYOUTS, Layout
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.rules.model import joined, packed_by
from cp_plugin.methods import registry
from cp_plugin.placement.documents import get_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    args: argparse.Namespace
    settings: Settings
    version: str  # megatron-core's
    device: torch.device | None = None  # None: planning for another machine

    @property
    def asked(self) -> str:
        """Prefix of a refusal."""
        return f"{self.settings.asked} does not support "

    @property
    def instead(self) -> str:
        """Suffix of a refusal."""
        return f" (or {self.settings.instead})"

    @property
    def packed(self) -> str:
        """The flags that pack documents; empty: none."""
        return ", ".join(packed_by(self.args))

    @property
    def layout(self) -> Layout:
        """The token layout; while undecided, the one that accepts most lengths."""
        if self.settings.undecided:
            return get_layout(self.settings.options.layout or "contiguous")
        provider, options = self.settings.of(self.settings.kinds[-1])  # one layout serves both kinds
        return registry.layout_for(registry.get(provider), options)

    @property
    def parts(self) -> int:
        """Tensor-parallel ranks that share a context-parallel rank's tokens under sequence parallelism."""
        return self.args.tensor_model_parallel_size if self.args.sequence_parallel else 1

    def padded(self, seq_length: int) -> int:
        """Length including ``--cp-pad-sequence`` padding; while the layout is undecided, enough for every one."""
        size = self.args.context_parallel_size
        if not self.settings.pad_sequence or size == 1:
            return seq_length
        still_open = self.settings.undecided and self.settings.options.layout is None
        layouts = LAYOUTS.values() if still_open else [self.layout]
        return max(layouts, key=lambda layout: layout.divisor(size)).padded(seq_length, size, self.parts)

    @property
    def padding(self) -> int:
        """Padding tokens at the end of each sequence or pack."""
        tokens = self.args.seq_length * joined(self.args)
        return self.padded(tokens) - tokens
