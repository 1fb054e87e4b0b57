"""The subject of the training rules: parsed arguments, settings, version, device; the attention that these describe."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from cp_plugin.engine.comm import network_between
from cp_plugin.engine.core.layout import LAYOUTS, Layout
from cp_plugin.engine.core.problem import Problem, Transport
from cp_plugin.engine.methods import registry
from cp_plugin.engine.placement.documents import get_layout
from cp_plugin.megatron import compat
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.rules.rule import value_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    args: argparse.Namespace
    settings: Settings
    version: str  # megatron-core's
    device: torch.device | None = None  # None: planning for another machine

    @property
    def packed(self) -> str:
        """The flags that pack documents; empty: none."""
        return ", ".join(packed_by(self.args))

    @property
    def pattern(self) -> str:
        """The pattern of a hybrid model; empty for other models."""
        return compat.hybrid_pattern(self.args)

    @property
    def layout(self) -> Layout:
        """The token layout; while undecided, the one that accepts most lengths."""
        if self.settings.undecided:
            return get_layout(self.settings.options.layout or "contiguous")
        provider, options = self.settings.choice(self.settings.kinds[-1])  # one layout serves both kinds
        return registry.layout_for(registry.get(provider), options)

    @property
    def layout_name(self) -> str:
        """The name of the token layout, for messages."""
        return f"padded {self.layout.name}" if self.settings.pad_sequence else self.layout.name

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

    @property
    def problem(self) -> Problem:
        """One attention call of the model on one rank, with padding."""
        args = self.args
        tp = args.tensor_model_parallel_size
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        head_dim, v_head_dim = head_sizes(args)
        return Problem(
            seq_length=self.padded(args.seq_length * joined(args)),
            size=args.context_parallel_size,
            heads=args.num_attention_heads // tp,
            kv_heads=max(1, groups // tp),
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            batch=args.micro_batch_size // joined(args),
            dtype=args.params_dtype,
            causal=True,
            window=None if args.window_size is None else tuple(args.window_size),
            documents=bool(packed_by(args)),
            sink=args.softmax_type != "vanilla",
            softcap=compat.softcap(args) is not None,
            transport=Transport(network=network_between("cpu" if cpu.active() else "cuda")),
        )


def packed_by(args: argparse.Namespace) -> list[str]:
    """The given flags that pack documents."""
    return [flag for flag in ("--sft", "--dataloader-inter-document-masking") if value_of(args, flag)]


def joined(args: argparse.Namespace) -> int:
    """Sequences that Megatron concatenates: the whole micro-batch if packed."""
    return args.micro_batch_size if packed_by(args) else 1


def head_sizes(args: argparse.Namespace) -> tuple[int, int]:
    """Head size of queries and keys, and of values."""
    if args.multi_latent_attention:
        return args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    return args.kv_channels, args.kv_channels
