"""The model's attention ``Problem`` from Megatron's parsed arguments.

Multi-latent attention (MLA) projects queries, keys and values up from latent vectors and rotates the last part of each
query and key (``--rope-type``). Core attention then sees as many key/value heads as query heads:

    q, k [s/cp, b, h, qk_head_dim + qk_pos_emb_head_dim]        v [s/cp, b, h, v_head_dim]
"""

from __future__ import annotations

import argparse

from cp_plugin.comm import network_between
from cp_plugin.core.problem import Problem
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.rules.rule import value_of


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


def problem_of(args: argparse.Namespace) -> Problem:
    """One attention call of the model on one rank."""
    tp = args.tensor_model_parallel_size
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    head_dim, v_head_dim = head_sizes(args)
    return Problem(
        seq_length=args.seq_length * joined(args),
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
        network=network_between("cpu" if cpu.active() else "cuda"),
    )
