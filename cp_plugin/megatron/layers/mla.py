"""Multi-latent attention (MLA): head sizes of its calls.

Megatron's layer projects queries, keys and values up from small latent vectors and rotates the last part of each query
and key by angles of its own (``--rope-type``), which are cut where all rotary angles are (``rope``). The core attention
then sees as many key/value heads as queries, with values of another size:

    q, k [s/cp, b, h, qk_head_dim + qk_pos_emb_head_dim]        v [s/cp, b, h, v_head_dim]
"""

from __future__ import annotations

import argparse


def head_sizes(args: argparse.Namespace) -> tuple[int, int]:
    """Of queries and keys, and of values, in a model with or without MLA."""
    if args.multi_latent_attention:
        return args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    return args.kv_channels, args.kv_channels
